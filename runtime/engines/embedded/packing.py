"""The next forward pass: whose tokens it computes, in the order in which they are packed."""

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from sostenuto.runtime.engines.embedded.attention import Chunk, Decode, Step
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
    """Whose next token is drawn from the pass, in the order of `wanted`."""
    token_ids: torch.Tensor
    positions: torch.Tensor
    wanted: torch.Tensor
    """Places of the tokens whose logits are needed."""
    step: Step


def plan(pool: Pool, device: torch.device) -> Plan:
    """One token of each request that decodes, and chunks of the prompts that wait for it."""
    fed: Fed = []
    decodes: list[Decode] = []
    for lane in pool.lanes:
        if not lane.decoding:
            continue
        turns = cast("list[Turn]", lane.occupants)[: lane.decoding]
        last = [turn.length - 1 for turn in turns]
        positions = torch.tensor(last, device=device)
        decodes.append(Decode(len(fed), lane.keys, lane.values, positions, max(last) + 1))
        fed.extend((turn, 1) for turn in turns)
    return _packed(fed, decodes, _chunks(pool, fed), device)


def _chunks(pool: Pool, fed: Fed) -> list[Chunk]:
    """Prompt tokens for this step, oldest request first; what is fed is added to `fed`."""
    budget, first = _CHUNK_TOKENS, len(fed)
    chunks: list[Chunk] = []
    for turn in pool.running:
        assert turn.lane is not None
        if turn.row < turn.lane.decoding or not budget:
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
    ends = np.cumsum([count for _, count in fed]) - 1
    done = [turn.computed + count == turn.length for turn, count in fed]
    return Plan(
        fed=fed,
        sampling=[turn for (turn, _), samples in zip(fed, done, strict=True) if samples],
        token_ids=as_tensor(token_ids.astype(np.int64), device),
        positions=as_tensor(positions, device),
        wanted=as_tensor(ends[done] if any(done) else ends[-1:], device),
        step=Step(tuple(decodes), tuple(chunks)),
    )
