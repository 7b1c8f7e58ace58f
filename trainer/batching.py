"""Micro-batches by a token budget, padded on the right.  No torch.

- Every sample is in exactly one micro-batch.
- Padding never takes part: attention is causal, so no real token sees what stands to its right, and only
  masked positions are read.

Suffixes: B = sequences of a micro-batch, T = its longest sequence, M = its masked tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sostenuto.errors import RecordError
from sostenuto.records import Experts, Floats
from sostenuto.trainer.samples import Sample

Indices = NDArray[np.int64]

# A sequence shorter than this share of the longest one starts a micro-batch of its own kind.
_SHORTEST_SHARE = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Masked token m stands at column `columns[m]` + 1 of row `rows[m]` and is predicted from that column."""

    indices: tuple[int, ...]
    """Which samples, row by row."""
    token_ids: Indices
    """(B, T), zeros as padding."""
    rows: Indices
    columns: Indices
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
    sequences: Indices
    """(M,) which sequence of the micro-batch a token is of."""
    extras: Mapping[str, Floats] = field(default_factory=dict[str, Floats])
    """(M,) or (M, K) each, of the masked tokens; NaN where a sample has none of that name."""
    teacher: str = ""
    """Of all its samples."""
    experts: Experts | None = None
    """(B, T, layers with a router, experts a token), -1 where none are known; None: of no sample."""

    def extra(self, name: str) -> Floats | None:
        """(M,) or (M, K); None where no sample has it."""
        return self.extras.get(name)


def plan(lengths: list[int], budget_tokens: int) -> list[list[int]]:
    """Cut samples, longest first, into micro-batches of at most `budget_tokens` padded tokens.

    A sample above the budget goes alone.  At most half of a micro-batch is padding.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
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
    token_ids = np.zeros((len(chosen), max(len(sample) for sample in chosen)), dtype=np.int64)
    for row, sample in enumerate(chosen):
        token_ids[row, : len(sample)] = sample.token_ids
    positions = [np.flatnonzero(sample.mask) for sample in chosen]
    counts = [len(found) for found in positions]
    rows = np.repeat(np.arange(len(chosen), dtype=np.int64), counts)
    columns = np.concatenate(positions).astype(np.int64) - 1
    return MicroBatch(
        indices=tuple(indices),
        token_ids=token_ids,
        rows=rows,
        columns=columns,
        targets=token_ids[rows, columns + 1],
        behaviour=np.concatenate([sample.logprobs[sample.mask] for sample in chosen]),
        rollout=np.concatenate([_rollout(sample) for sample in chosen]),
        advantages=np.concatenate([sample.advantages[sample.mask] for sample in chosen]),
        weights=np.repeat(np.array([weights[i] for i in indices], dtype=np.float32), counts),
        fresh=np.repeat(np.array([fresh[i] for i in indices], dtype=np.bool_), counts),
        sequences=rows,
        extras=_extras(chosen),
        teacher=chosen[0].teacher,
        experts=_experts(chosen, token_ids.shape[1]),
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


def _experts(samples: list[Sample], longest: int) -> Experts | None:
    known = {sample.experts.shape[1:] for sample in samples if sample.experts is not None}
    if not known:
        return None
    if len(known) > 1:
        raise RecordError(f"experts: samples of different models in one batch, {sorted(known)} a token")
    experts = np.full((len(samples), longest, *known.pop()), -1, dtype=np.int16)
    for row, sample in enumerate(samples):
        if sample.experts is not None:
            experts[row, : len(sample.experts)] = sample.experts
    return experts


def _rollout(sample: Sample) -> Floats:
    if sample.rollout_logprobs is None:
        return np.full(sample.masked_tokens, np.nan, dtype=np.float32)
    return sample.rollout_logprobs[sample.mask]
