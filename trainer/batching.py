"""Micro-batches by a token budget: sequences one after the other, without padding.  No torch.

- Every sample is in exactly one micro-batch.
- Positions that predict nothing recorded, from the last masked token on, do not run at all.

Suffixes: N = tokens of a micro-batch, M = its masked tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sostenuto.errors import RecordError
from sostenuto.records import Experts, Floats
from sostenuto.trainer.samples import Sample

Indices = NDArray[np.int64]

# Where a model pads, a sequence shorter than this share of the longest one goes elsewhere.
_SHORTEST_SHARE = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Masked token m is of sequence `sequences[m]` and is predicted from the token at `positions[m]` of N."""

    indices: tuple[int, ...]
    """Which samples, one sequence each."""
    token_ids: Indices
    """(N,), sequence after sequence."""
    lengths: tuple[int, ...]
    """Tokens of each sequence, N together."""
    sequences: Indices
    """(M,) which sequence a token is of."""
    positions: Indices
    targets: Indices
    behaviour: Floats
    """(M,) the engine's log-probabilities; NaN in demonstrations."""
    rollout: Floats
    """(M,) the trainer's under the weights that sampled; NaN where unknown."""
    advantages: Floats
    weights: Floats
    """(M,) of the token in the batch's loss."""
    fresh: NDArray[np.bool_]
    """(M,) sampled under exactly the weights that the trainer holds."""
    extras: Mapping[str, Floats] = field(default_factory=dict[str, Floats])
    """(M,) or (M, K) each, of the masked tokens; NaN where a sample has none of that name."""
    teacher: str = ""
    """Of all its samples."""
    experts: Experts | None = None
    """(N, layers with a router, experts a token), -1 where none are known; None: of no sample."""

    def extra(self, name: str) -> Floats | None:
        """(M,) or (M, K); None where no sample has it."""
        return self.extras.get(name)


def plan(lengths: list[int], budget_tokens: int, *, padded: bool = False) -> list[list[int]]:
    """Cut samples, longest first, into micro-batches of at most `budget_tokens`.

    A sample above the budget goes alone.  `padded`: for a model that pads each sequence to the longest; then
    padding counts, and is at most half of a micro-batch.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    return (_padded if padded else _packed)(order, lengths, budget_tokens)


def _packed(order: list[int], lengths: list[int], budget_tokens: int) -> list[list[int]]:
    """Each into the first micro-batch that has room."""
    batches: list[list[int]] = []
    room: list[int] = []
    for index in order:
        place = next((i for i, free in enumerate(room) if lengths[index] <= free), len(batches))
        if place == len(batches):
            batches.append([])
            room.append(budget_tokens)
        batches[place].append(index)
        room[place] -= lengths[index]
    return batches


def _padded(order: list[int], lengths: list[int], budget_tokens: int) -> list[list[int]]:
    batches: list[list[int]] = []
    for index in order:
        current = batches[-1] if batches else []
        longest = lengths[current[0]] if current else 0
        fits = bool(current) and (len(current) + 1) * longest <= budget_tokens
        if fits and lengths[index] >= _SHORTEST_SHARE * longest:
            current.append(index)
        else:
            batches.append([index])
    return batches


def by_teacher(samples: list[Sample], indices: list[int]) -> list[list[int]]:
    """The indices of samples with the same teacher together."""
    kin: dict[str, list[int]] = {}
    for index in indices:
        kin.setdefault(samples[index].teacher, []).append(index)
    return list(kin.values())


def collate(samples: list[Sample], indices: list[int], weights: list[float], fresh: list[bool]) -> MicroBatch:
    """The arrays of one micro-batch; `weights` and `fresh` are per sample of the whole batch."""
    chosen = [samples[index] for index in indices]
    masked = [np.flatnonzero(sample.mask) for sample in chosen]
    lengths = [int(found[-1]) for found in masked]
    starts = np.cumsum([0, *lengths[:-1]])
    counts = [len(found) for found in masked]
    return MicroBatch(
        indices=tuple(indices),
        token_ids=_joined([s.token_ids[:n] for s, n in zip(chosen, lengths, strict=True)]),
        lengths=tuple(lengths),
        sequences=np.repeat(np.arange(len(chosen), dtype=np.int64), counts),
        positions=_joined([start + found - 1 for start, found in zip(starts, masked, strict=True)]),
        targets=_joined([sample.token_ids[sample.mask] for sample in chosen]),
        behaviour=np.concatenate([sample.logprobs[sample.mask] for sample in chosen]),
        rollout=np.concatenate([_rollout(sample) for sample in chosen]),
        advantages=np.concatenate([sample.advantages[sample.mask] for sample in chosen]),
        weights=np.repeat(np.array([weights[i] for i in indices], dtype=np.float32), counts),
        fresh=np.repeat(np.array([fresh[i] for i in indices], dtype=np.bool_), counts),
        extras=_extras(chosen),
        teacher=chosen[0].teacher,
        experts=_experts(chosen, lengths),
    )


def _extras(samples: list[Sample]) -> dict[str, Floats]:
    widths = {name: known.shape[1:] for sample in samples for name, known in sorted(sample.extras.items())}
    return {
        name: np.concatenate([_extra(sample, name, width) for sample in samples])
        for name, width in widths.items()
    }


def _extra(sample: Sample, name: str, width: tuple[int, ...]) -> Floats:
    known = sample.extras.get(name)
    if known is None:
        return np.full((sample.masked_tokens, *width), np.nan, dtype=np.float32)
    return known[sample.mask]


def _joined(parts: list[NDArray[np.int32]] | list[Indices]) -> Indices:
    return np.concatenate(parts).astype(np.int64)


def _experts(samples: list[Sample], lengths: list[int]) -> Experts | None:
    known = {sample.experts.shape[1:] for sample in samples if sample.experts is not None}
    if not known:
        return None
    if len(known) > 1:
        raise RecordError(f"experts: samples of different models in one batch, {sorted(known)} a token")
    shape = known.pop()
    return np.concatenate(
        [_routed(sample.experts, n, shape) for sample, n in zip(samples, lengths, strict=True)]
    )


def _routed(experts: Experts | None, length: int, shape: tuple[int, ...]) -> Experts:
    whole = np.full((length, *shape), -1, dtype=np.int16)
    if experts is not None:
        whole[: len(experts)] = experts[:length]
    return whole


def _rollout(sample: Sample) -> Floats:
    if sample.rollout_logprobs is None:
        return np.full(sample.masked_tokens, np.nan, dtype=np.float32)
    return sample.rollout_logprobs[sample.mask]
