"""The distance to a reference model, per masked token.  Suffix M: masked tokens."""

import torch
from torch import Tensor

from sostenuto.trainer.batching import MicroBatch
from sostenuto.trainer.corrections import divergence, ratio
from sostenuto.trainer.logprobs import pairs, token_logprobs
from sostenuto.trainer.model import Policy
from sostenuto.trainer.parts import KL


def kl_loss(
    part: KL,
    policy: Policy,
    reference: Policy,
    batch: MicroBatch,
    *,
    current: Tensor,
    proximal: Tensor,
    temperature: float,
) -> Tensor:
    """(M,) whose gradient, on samples of `proximal`, is that of KL(policy || reference).

    k2: d^2 / 2 with d = log p policy - log p reference.  k1: r d with r the ratio to `proximal`, since
    E[r d] is the KL itself.  exact: the sum over the vocabulary.
    """
    if part.estimator == "exact":
        return exact_kl(policy, reference, batch, temperature=temperature, top_k=part.top_k)
    with torch.no_grad():
        against = token_logprobs(reference, batch, temperature)
    difference = current - against
    if part.estimator == "k1":
        return ratio(current, proximal) * difference
    return divergence(part.estimator, difference)


def exact_kl(
    policy: Policy, reference: Policy, batch: MicroBatch, *, temperature: float, top_k: int | None
) -> Tensor:
    """(M,) KL of the two next-token distributions at each masked position, in nats.

    With `top_k` over the policy's k likeliest tokens and all others together as one more.
    """

    def compare(logits: Tensor, others: Tensor) -> Tensor:
        ours = (logits / temperature).log_softmax(-1)
        theirs = (others / temperature).log_softmax(-1)
        if top_k is not None and top_k < ours.shape[-1]:
            kept = ours.detach().topk(top_k, dim=-1).indices
            ours, theirs = with_rest(ours.gather(-1, kept)), with_rest(theirs.gather(-1, kept))
        return kl_of(ours, theirs)

    return pairs(policy, reference, batch, compare)


def kl_of(ours: Tensor, theirs: Tensor) -> Tensor:
    """KL of two distributions, given as log-probabilities over the last dimension."""
    return (ours.exp() * (ours - theirs)).sum(-1)


def with_rest(logprobs: Tensor) -> Tensor:
    """One more outcome for what the others leave of 1."""
    rest = torch.log1p(-logprobs.exp().sum(-1, keepdim=True).clamp(max=1.0 - 1e-7))
    return torch.cat([logprobs, rest], dim=-1)
