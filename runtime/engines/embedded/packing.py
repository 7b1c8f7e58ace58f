"""The next forward pass: whose tokens it computes, in the order in which they are packed."""

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from sostenuto.runtime.engines.embedded.attention import Chunk, Decode, Step
from sostenuto.runtime.engines.embedded.lanes import Lane
from sostenuto.runtime.engines.embedded.pool import Pool
from sostenuto.runtime.engines.embedded.tensors import as_tensor
from sostenuto.runtime.engines.embedded.turn import Turn

_CHUNK_TOKENS = 512
"""Prompt tokens in one step, of all requests together."""

Fed = list[tuple[Turn, int]]
"""Who is computed, with how many tokens each."""


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """One step."""

    fed: Fed
    sampling: list[Turn]
    """Whose next tokens are drawn from the pass, in the order of `wanted`: 1 + drafted each."""
    token_ids: torch.Tensor
    positions: torch.Tensor
    wanted: torch.Tensor
    """Places of the tokens whose logits are needed."""
    step: Step


def plan(pool: Pool, device: torch.device) -> Plan:
    """One token of each request that decodes with its guesses, and chunks of the prompts that wait for it."""
    fed: Fed = []
    decodes: list[Decode] = []
    for lane in pool.lanes:
        if not lane.decoding:
            continue
        turns = cast("list[Turn]", lane.occupants)[: lane.decoding]
        first = sum(count for _, count in fed)
        fed.extend((turn, 1 + turn.drafted) for turn in turns)
        decodes.append(_decode(lane, turns, first, device))
    return _packed(fed, decodes, _chunks(pool, fed), device)


def _decode(lane: Lane, turns: list[Turn], first: int, device: torch.device) -> Decode:
    counts = tuple(1 + turn.drafted for turn in turns)
    positions = np.concatenate([np.arange(t.length - 1, t.length + t.drafted) for t in turns])
    longest = int(positions.max()) + 1
    return Decode(first, lane.keys, lane.values, counts, as_tensor(positions, device), longest)


def _chunks(pool: Pool, fed: Fed) -> list[Chunk]:
    """Prompt tokens for this step, oldest request first; what is fed is added to `fed`."""
    budget, first = _CHUNK_TOKENS, sum(count for _, count in fed)
    chunks: list[Chunk] = []
    for turn in pool.running:
        assert turn.lane is not None
        if turn.decodes or not budget:
            continue
        count = min(turn.length - turn.computed, budget)
        keys, values = turn.lane.keys[:, turn.row], turn.lane.values[:, turn.row]
        chunks.append(Chunk(first, keys, values, turn.computed, count))
        fed.append((turn, count))
        first += count
        budget -= count
    return chunks


def _packed(fed: Fed, decodes: list[Decode], chunks: list[Chunk], device: torch.device) -> Plan:
    token_ids = np.concatenate([turn.tokens[turn.computed : turn.computed + count] for turn, count in fed])
    positions = np.concatenate([np.arange(turn.computed, turn.computed + count) for turn, count in fed])
    ends = np.cumsum([count for _, count in fed])
    done = [turn.computed + count == turn.length + turn.drafted for turn, count in fed]
    drawn: list[NDArray[np.int64]] = [
        np.arange(end - 1 - turn.drafted, end)
        for (turn, _), end, samples in zip(fed, ends, done, strict=True)
        if samples
    ]
    return Plan(
        fed=fed,
        sampling=[turn for (turn, _), samples in zip(fed, done, strict=True) if samples],
        token_ids=as_tensor(token_ids.astype(np.int64), device),
        positions=as_tensor(positions, device),
        wanted=as_tensor(np.concatenate(drawn) if drawn else ends[-1:] - 1, device),
        step=Step(tuple(decodes), tuple(chunks)),
    )
