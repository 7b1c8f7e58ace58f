"""Activation checkpointing: a layer keeps what it was given and computes the rest again in the backward pass.

Only of layers that transformers marks as such, and only where a pass is longer than `above_tokens`.  Results
are the same bits: dropout is off, and experts that were replayed are replayed again.
"""

import math
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.utils.checkpoint
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from sostenuto.trainer.heap import give_back_large_memory

_checkpointing = cast("Any", torch.utils.checkpoint)

Around = Callable[[], AbstractContextManager[None]]


class Recomputation:
    """Of the layers of one model, from now on.  For one thread at a time."""

    def __init__(self, module: nn.Module) -> None:
        layers = [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]
        self.layers: tuple[nn.Module, ...] = tuple(layers)
        self.above_tokens: float = math.inf
        self._around: Around | None = None
        self._on_cpu = all(weight.device.type == "cpu" for weight in module.parameters())
        for layer in layers:
            # The instance's own comes before its class's; module hooks stay outside, as FSDP needs them.
            vars(layer)["forward"] = partial(self._run, layer.forward)

    @contextmanager
    def of_pass(self, tokens: int, around: Around = nullcontext) -> Generator[None]:
        """A forward pass inside is of `tokens`; where it is computed again, that happens in `around`."""
        self._around = around if tokens > self.above_tokens else None
        if self._around is not None and self._on_cpu:
            give_back_large_memory()
        try:
            yield
        finally:
            self._around = None

    def _run(self, forward: Callable[..., Any], *inputs: object, **options: object) -> Any:  # noqa: ANN401
        around = self._around
        if around is None or not torch.is_grad_enabled():
            return forward(*inputs, **options)
        return _checkpointing.checkpoint(
            partial(forward, **options),
            *inputs,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), around()),
        )
