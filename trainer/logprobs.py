"""Log-probabilities of recorded tokens under the present weights.  Nothing is sampled.

Token t is predicted from position t - 1, from one causal forward over the whole sequence.  Only masked
positions reach the output layer, in chunks, in float32.  Suffix M: masked tokens.
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


def _in_chunks(policy: Policy, batch: MicroBatch, score: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    rows, columns = as_tensor(batch.rows), as_tensor(batch.columns)
    targets = as_tensor(batch.targets)
    # The last column predicts nothing that was recorded.
    experts = None if batch.experts is None else as_tensor(batch.experts[:, :-1])
    features = policy.features(as_tensor(batch.token_ids[:, :-1]), rows, columns, experts=experts)
    chunk = max(1, _CHUNK_BYTES // (4 * policy.tokenizer_size))
    if len(targets) <= chunk:
        return score(features, targets)
    parts = zip(split(features, chunk), split(targets, chunk), strict=True)
    return torch.cat([recomputed(score, *part) for part in parts])
