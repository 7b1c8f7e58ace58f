"""Which experts of a mixture run for each token: seen while it generates, given while it trains.

- The one hook is on each layer's router, which turns hidden states into (logits, weights, experts).  What it
  returns is seen, or its experts are replaced; everything around it stays as transformers has it.
- Replayed experts are weighted by the router's own logits over them, so the gradient reaches the router.
- A router is taken only where these weights, for its own experts, are the ones that it returns itself.

Suffixes: T = tokens of one forward pass in row order, L = layers with a router, E = experts of a token.
"""

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

UNKNOWN = -1
"""In place of an expert number: the router chooses for itself."""

Routed = tuple[Tensor, Tensor, Tensor]
"""Logits over all experts, weights (T, E), experts (T, E)."""

_PROBE_TOKENS = 5


class Routers:
    """The routers of one model, first layer first.  For one thread at a time."""

    def __init__(self, routers: list[nn.Module]) -> None:
        self.layers = len(routers)
        self.top_k = int(cast("Any", routers[0]).top_k)
        self.experts = int(cast("Any", routers[0]).num_experts)
        self._seen: list[Tensor] | None = None
        self._given: Tensor | None = None
        for layer, router in enumerate(routers):
            cast("Any", router).register_forward_hook(partial(self._route, layer))

    @contextmanager
    def recording(self) -> Generator[list[Tensor]]:
        """The list fills with the experts (T, E) of each layer, in order, as one forward pass goes."""
        self._seen = []
        try:
            yield self._seen
        finally:
            self._seen = None

    @contextmanager
    def replaying(self, experts: Tensor | None) -> Generator[None]:
        """Forward passes inside run the given experts (T, L, E); None: their own choice.

        A backward pass that computes a forward pass again belongs inside, too.
        """
        self._given = experts
        try:
            yield
        finally:
            self._given = None

    def _route(self, layer: int, router: nn.Module, _inputs: tuple[Tensor, ...], output: Routed) -> Routed:
        logits, weights, experts = output
        if self._given is not None:
            given = self._given[:, layer].to(experts.dtype)
            experts = torch.where(given == UNKNOWN, experts, given)
            weights = _weights(router, logits, experts)
        if self._seen is not None:
            self._seen.append(experts)
        return logits, weights, experts


def find_routers(module: nn.Module) -> Routers | None:
    """The routers of `module`; None where it has none, or weighs experts by a rule that is not known here."""
    found = [part for part in module.modules() if looks_like_router(part)]
    if not found or not all(map(_follows_the_rule, found)):
        return None
    alike = {(cast("Any", router).top_k, cast("Any", router).num_experts) for router in found}
    return Routers(found) if len(alike) == 1 else None


def looks_like_router(part: nn.Module) -> bool:
    """Whether it chooses experts."""
    weight = getattr(part, "weight", None)
    return (
        isinstance(getattr(part, "top_k", None), int)
        and isinstance(weight, Tensor)
        and weight.ndim == 2
        and getattr(part, "num_experts", None) == weight.shape[0]
    )


@torch.no_grad()
def _follows_the_rule(router: nn.Module) -> bool:
    weight = cast("Any", router).weight
    noise = torch.Generator().manual_seed(0)
    states = torch.randn(_PROBE_TOKENS, weight.shape[1], generator=noise).to(weight)
    output: object = router(states)
    if not (isinstance(output, tuple) and len(cast("tuple[object, ...]", output)) == 3):
        return False
    logits, weights, experts = cast("Routed", output)
    return torch.allclose(_weights(router, logits, experts), weights)


def _weights(router: nn.Module, logits: Tensor, experts: Tensor) -> Tensor:
    """Of the given experts (T, E) under the router's own logits (T, all experts).

    Softmax in float32 over all experts, then a sum of one over the chosen ones, where the model says so.
    """
    weights = logits.softmax(-1, dtype=torch.float32).gather(-1, experts)
    if getattr(router, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype)
