"""Log-probabilities of recorded tokens under the present weights.  Nothing is sampled.

Token t is predicted from position t - 1, from one causal forward over the whole sequence.  Only masked
positions reach the output layer, and their logits exist for one chunk at a time, in float32 (`head`).
Suffix M: masked tokens.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from sostenuto.trainer.batching import MicroBatch
from sostenuto.trainer.head import Scores, chunk_rows, scores
from sostenuto.trainer.model import Policy
from sostenuto.trainer.tensors import as_tensor, recomputed, split

_passes: ContextVar[list[tuple[Policy, MicroBatch, Tensor]] | None] = ContextVar("passes", default=None)


@contextmanager
def one_pass() -> Generator[None]:
    """Inside, a policy runs each micro-batch once, however many functions of this module ask for it.

    For one loss: weights must not move inside.
    """
    token = _passes.set([])
    try:
        yield
    finally:
        _passes.reset(token)


def token_logprobs(policy: Policy, batch: MicroBatch, temperature: float = 1.0) -> Tensor:
    """(M,) float32 log-probabilities of `batch.targets` under softmax(logits / temperature)."""
    return _scores(policy, batch, temperature, entropy=False).logprobs


def token_scores(policy: Policy, batch: MicroBatch, temperature: float = 1.0) -> Scores:
    """(M,) of `token_logprobs`, and the entropy of the distribution at each; both with gradients."""
    return _scores(policy, batch, temperature, entropy=True)


def token_hits(policy: Policy, batch: MicroBatch) -> Tensor:
    """(M,) bool: whether the target is the most likely token."""

    def hit(features: Tensor, targets: Tensor) -> Tensor:
        return policy.logits(features).argmax(dim=-1) == targets

    with torch.no_grad():
        return _by_chunk(policy, hit, features_of(policy, batch), as_tensor(batch.targets))


def pairs(
    policy: Policy, other: Policy, batch: MicroBatch, compare: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """(M,) of `compare`, given logits (chunk, vocabulary) of both; those of `other` have no gradient."""
    with torch.no_grad():
        theirs = features_of(other, batch)

    def score(features: Tensor, others: Tensor) -> Tensor:
        with torch.no_grad():
            against = other.logits(others)
        return compare(policy.logits(features), against)

    return _by_chunk(policy, score, features_of(policy, batch), theirs)


def beside(
    policy: Policy, batch: MicroBatch, given: Tensor, compare: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """(M,) of `compare`, given logits (chunk, vocabulary) and the same rows of `given` (M, ...)."""

    def score(features: Tensor, rows: Tensor) -> Tensor:
        return compare(policy.logits(features), rows)

    return _by_chunk(policy, score, features_of(policy, batch), given)


def _scores(policy: Policy, batch: MicroBatch, temperature: float, *, entropy: bool) -> Scores:
    features, targets = features_of(policy, batch), as_tensor(batch.targets)
    head = policy.head
    if head is not None:
        return scores(features, head, targets, temperature, entropy=entropy)

    def score(features: Tensor, targets: Tensor) -> Tensor:
        logprobs = (policy.logits(features) / temperature).log_softmax(-1)
        spread = -(logprobs.exp() * logprobs).sum(-1) if entropy else torch.zeros_like(logprobs[:, 0])
        return torch.stack([logprobs.gather(1, targets[:, None])[:, 0], spread], dim=1)

    return Scores(*_by_chunk(policy, score, features, targets).unbind(1))


def features_of(policy: Policy, batch: MicroBatch) -> Tensor:
    """(M, ...) what the output layer reads for each masked token."""
    passes = _passes.get()
    for ran, of, features in passes or ():
        if ran is policy and of is batch:
            return features
    experts = None if batch.experts is None else as_tensor(batch.experts)
    token_ids, positions = as_tensor(batch.token_ids), as_tensor(batch.positions)
    found = policy.features(token_ids, batch.lengths, positions, experts=experts)
    # What was found without a gradient is no answer for one who needs it.
    if passes is not None and torch.is_grad_enabled():
        passes.append((policy, batch, found))
    return found


def _by_chunk(
    policy: Policy, score: Callable[[Tensor, Tensor], Tensor], features: Tensor, beside: Tensor
) -> Tensor:
    """Of what `score` finds for each position; what it needs of logits is computed again for the gradient."""
    rows = chunk_rows(policy.tokenizer_size)
    if len(features) <= rows:
        return score(features, beside)
    parts = zip(split(features, rows), split(beside, rows), strict=True)
    return torch.cat([recomputed(score, *part) for part in parts])
