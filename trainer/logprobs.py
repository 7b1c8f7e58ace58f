"""Log-probabilities of recorded tokens under the present weights.  Nothing is sampled.

Token t is predicted from position t - 1, from one causal forward over the whole
sequence.  Only masked positions reach the output layer, in chunks, in float32.  Suffix M: masked tokens.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows
from torch import Tensor

from sostenuto.trainer.batching import MicroBatch
from sostenuto.trainer.model import Policy
from sostenuto.trainer.tensors import as_tensor, recomputed, split

# Logits of one chunk; beyond it they are computed again in the backward pass instead of kept.
_CHUNK_BYTES = 256 << 20


def token_logprobs(policy: Policy, batch: MicroBatch, temperature: float = 1.0) -> Tensor:
    """(M,) float32 log-probabilities of `batch.targets` under softmax(logits / temperature)."""

    def score(features: Tensor, targets: Tensor) -> Tensor:
        return -F.cross_entropy(policy.logits(features) / temperature, targets, reduction="none")

    return _in_chunks(policy, batch, score)


def token_hits(policy: Policy, batch: MicroBatch) -> Tensor:
    """(M,) bool: whether the target is the most likely token."""

    def hit(features: Tensor, targets: Tensor) -> Tensor:
        return policy.logits(features).argmax(dim=-1) == targets

    with torch.no_grad():
        return _in_chunks(policy, batch, hit)


def pairs(
    policy: Policy, other: Policy, batch: MicroBatch, compare: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """(M,) of `compare`, given logits (chunk, vocabulary) of both; those of `other` have no gradient."""
    with torch.no_grad():
        theirs = _features(other, batch)

    def score(features: Tensor, others: Tensor) -> Tensor:
        with torch.no_grad():
            against = other.logits(others)
        return compare(policy.logits(features), against)

    return _by_chunk(policy, score, _features(policy, batch), theirs)


def beside(
    policy: Policy, batch: MicroBatch, given: Tensor, compare: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """(M,) of `compare`, given logits (chunk, vocabulary) and the same rows of `given` (M, ...)."""

    def score(features: Tensor, rows: Tensor) -> Tensor:
        return compare(policy.logits(features), rows)

    return _by_chunk(policy, score, _features(policy, batch), given)


def _in_chunks(policy: Policy, batch: MicroBatch, score: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    return _by_chunk(policy, score, _features(policy, batch), as_tensor(batch.targets))


def _features(policy: Policy, batch: MicroBatch) -> Tensor:
    experts = None if batch.experts is None else as_tensor(batch.experts)
    token_ids, positions = as_tensor(batch.token_ids), as_tensor(batch.positions)
    return policy.features(token_ids, batch.lengths, positions, experts=experts)


def _by_chunk(
    policy: Policy, score: Callable[[Tensor, Tensor], Tensor], features: Tensor, beside: Tensor
) -> Tensor:
    chunk = max(1, _CHUNK_BYTES // (4 * policy.tokenizer_size))
    if len(features) <= chunk:
        return score(features, beside)
    parts = zip(split(features, chunk), split(beside, chunk), strict=True)
    return torch.cat([recomputed(score, *part) for part in parts])
