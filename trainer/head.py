"""The output layer and the softmax over it, a chunk of positions at a time.

What leaves is a number or two for each position.  Logits live for one chunk: what the backward pass needs of
them it computes again, unless one chunk was all there is.

Suffixes: M = positions, V = vocabulary, H = width of the hidden states.
"""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import linear

CHUNK_BYTES = 128 << 20
"""Of float32 logits."""


class Head(NamedTuple):
    """An output layer that is a matrix and nothing more; `size` rows of it have a text."""

    weight: Tensor
    """(rows, H)"""
    bias: Tensor | None
    size: int


class Scores(NamedTuple):
    """(M,) each, in float32 or better."""

    logprobs: Tensor
    entropy: Tensor
    """Of the whole distribution, in nats; zeros where it was not asked for."""


def chunk_rows(vocabulary: int) -> int:
    """Positions of one chunk."""
    return max(1, CHUNK_BYTES // (4 * vocabulary))


def scores(features: Tensor, head: Head, targets: Tensor, temperature: float, *, entropy: bool) -> Scores:
    """Of `targets` (M,) under softmax(logits / temperature) of `features` (M, H); both have gradients."""
    how = _How(head.size, temperature, entropy)
    return Scores(*cast("Any", _Scores).apply(features, head.weight, head.bias, targets, how))


class _How(NamedTuple):
    size: int
    temperature: float
    entropy: bool


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        how: _How,
    ) -> tuple[Tensor, Tensor]:
        head = Head(weight, bias, how.size)
        chosen: list[Tensor] = []
        normalizers: list[Tensor] = []
        entropies: list[Tensor] = []
        logits = None
        for states, wanted in _chunks(chunk_rows(how.size), features, targets):
            logits = _logits(states, head, how.temperature)
            normalizer = torch.logsumexp(logits, -1)
            chosen.append(logits.gather(1, wanted[:, None])[:, 0] - normalizer)
            normalizers.append(normalizer)
            entropies.append(_entropy(logits, normalizer) if how.entropy else torch.zeros_like(normalizer))
        found = torch.cat(chosen), torch.cat(entropies)
        ctx.save_for_backward(features, weight, bias, targets, torch.cat(normalizers), found[1])
        ctx.how = how
        ctx.logits = logits if len(chosen) == 1 else None
        return found

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # noqa: ANN401
        features, weight, bias, targets, normalizers, entropies = ctx.saved_tensors
        how: _How = ctx.how
        head, kept = Head(weight, bias, how.size), ctx.logits
        ctx.logits = None
        sums = _Sums(features, head, ctx.needs_input_grad)
        parts = _chunks(chunk_rows(how.size), features, targets, normalizers, entropies, *grad_outputs)
        for states, wanted, normalizer, entropy, by_chosen, by_entropy in parts:
            logits = _logits(states, head, how.temperature) if kept is None else kept
            gradient = logits.sub_(normalizer[:, None])
            if how.entropy:
                factor = (gradient + entropy[:, None]).mul_(by_entropy[:, None]).add_(by_chosen[:, None])
                gradient.exp_().mul_(factor).neg_()
            else:
                gradient.exp_().mul_(-by_chosen[:, None])
            gradient[torch.arange(len(wanted), device=wanted.device), wanted] += by_chosen
            sums.add(states, gradient.div_(how.temperature).to(features.dtype))
        return *sums.gradients(), None, None


class _Sums:
    """Gradients of features, weight and bias, chunk by chunk; the last two in float32 or better."""

    def __init__(self, features: Tensor, head: Head, needed: tuple[bool, ...]) -> None:
        exact = torch.promote_types(head.weight.dtype, torch.float32)
        self._head = head
        self._features: list[Tensor] = []
        self._needed = needed
        self._weight = torch.zeros_like(head.weight, dtype=exact) if needed[1] else None
        self._bias = None if head.bias is None or not needed[2] else torch.zeros_like(head.bias, dtype=exact)

    def add(self, states: Tensor, gradient: Tensor) -> None:
        size = self._head.size
        if self._needed[0]:
            self._features.append(gradient @ self._head.weight[:size])
        if self._weight is not None:
            rows = self._weight[:size]
            if rows.dtype == gradient.dtype:
                rows.addmm_(gradient.T, states)
            else:
                rows.add_(gradient.T @ states)
        if self._bias is not None:
            self._bias[:size].add_(gradient.sum(0))

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        features = torch.cat(self._features) if self._needed[0] else None
        weight = None if self._weight is None else self._weight.to(self._head.weight.dtype)
        bias = self._bias
        return features, weight, bias if bias is None else bias.to(self._head.weight.dtype)


def _chunks(rows: int, *tensors: Tensor) -> Any:  # noqa: ANN401 - the types of split are incomplete
    """The tensors, `rows` of each at a time; once, empty, where there is nothing."""
    return zip(*(cast("Any", tensor).split(rows) for tensor in tensors), strict=True)


def _logits(states: Tensor, head: Head, temperature: float) -> Tensor:
    """(M, V) that nobody else holds."""
    bias = None if head.bias is None else head.bias[: head.size]
    logits = linear(states, head.weight[: head.size], bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if temperature == 1.0 else logits.div_(temperature)


def _entropy(logits: Tensor, normalizer: Tensor) -> Tensor:
    shares = (logits - normalizer[:, None]).exp_()
    return normalizer - torch.bmm(shares[:, None], logits[:, :, None])[:, 0, 0]
