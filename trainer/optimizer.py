"""AdamW with a schedule, gradient clipping and a veto.

- Gradients are summed over micro-batches in float32, whatever the model runs in.
- A step whose gradient is not finite is refused: weights, moments and step number stay as they were.
- For a bfloat16 model the float32 master weights live here; the model gets a rounded copy.
"""

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from sostenuto.errors import ConfigError
from sostenuto.trainer.ranks import ALONE, Ranks, as_shared, is_shared, local, whole
from sostenuto.trainer.settings import LearnerSettings, Schedule


def learning_rate(schedule: Schedule, step: int) -> float:
    """Rate of the step that follows `step` finished ones."""
    peak, warmup = schedule.learning_rate, schedule.warmup_steps
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if schedule.shape == "constant" or schedule.total_steps is None:
        return peak
    # The last of `total_steps` steps runs at the final rate.
    span = max(1, schedule.total_steps - 1 - warmup)
    done = min(1.0, (step - warmup) / span)
    left = 1.0 - done if schedule.shape == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return schedule.final_learning_rate + (peak - schedule.final_learning_rate) * left


class Optimizer:
    """Owns the gradient of one model and moves its weights."""

    def __init__(self, module: nn.Module, settings: LearnerSettings, ranks: Ranks = ALONE) -> None:
        """`ranks`: those that share the module's parameters, or each have all of some."""
        self._settings = settings
        self._ranks = ranks
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._masters = {
            name: p if _is_exact(p) else p.detach().to(torch.float32) for name, p in self._parameters.items()
        }
        self.schedule = settings.schedule
        self.steps = 0
        self._adamw = self._fresh()

    def reset(self, schedule: Schedule) -> None:
        """Forget the moments and start `schedule` at its first step; the weights stay."""
        self.schedule, self.steps = schedule, 0
        self._adamw = self._fresh()

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        return learning_rate(self.schedule, self.steps)

    def discard(self) -> None:
        """Forget the gradient."""
        for tensor in (*self._parameters.values(), *self._masters.values()):
            tensor.grad = None

    def accumulate(self) -> None:
        """Add what the last backward pass left in a half-precision model to the float32 sum."""
        for name, parameter in self._parameters.items():
            master = self._masters[name]
            if master is parameter or parameter.grad is None:
                continue
            gradient = parameter.grad.to(torch.float32)
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

    def meet(self) -> None:
        """Before a step: the gradients of what every rank has a whole copy of become those of the batch."""
        for master in self._masters.values():
            if master.grad is not None and not is_shared(master):
                self._ranks.average(master.grad)

    @property
    def is_finite(self) -> bool:
        """Whether the gradient is, on every rank."""
        return math.isfinite(self._norm())

    def step(self) -> tuple[float, bool]:
        """Clip and apply the gradient; its norm before clipping, and whether the weights moved."""
        norm = self._norm()
        if not math.isfinite(norm):
            self.discard()
            return norm, False
        _scale(self._masters.values(), min(1.0, self._settings.clip_norm / (norm + 1e-6)))
        for group in self._adamw.param_groups:
            group["lr"] = self.learning_rate
        cast("Any", self._adamw).step()
        self.discard()
        self._write_back()
        self.steps += 1
        return norm, True

    def _norm(self) -> float:
        shared = [master for master in self._masters.values() if is_shared(master)]
        own = [master for master in self._masters.values() if not is_shared(master)]
        return math.sqrt(self._ranks.total(_squares(shared)) + _squares(own))

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a resumed run needs, by name."""
        state: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            for key, value in self._adamw.state[master].items():
                state[f"{key}.{name}"] = whole(value)
            if master is not self._parameters[name]:
                state[f"master.{name}"] = whole(master)
        return state

    def load(self, tensors: dict[str, Tensor], schedule: Schedule, steps: int) -> None:
        """Take over what `tensors` of an equal model gave."""
        self.reset(schedule)
        self.steps = steps
        for key, value in tensors.items():
            kind, _, name = key.partition(".")
            if name not in self._masters:
                raise ConfigError(f"checkpoint: optimizer state for {name!r}, which the model does not have")
            master = self._masters[name]
            if kind == "master":
                master.copy_(as_shared(value, master))
            else:
                self._adamw.state[master][kind] = as_shared(value, master).clone()
        self._write_back()

    def _fresh(self) -> torch.optim.AdamW:
        # What ranks share and what each has whole cannot be moved in one call.
        groups: dict[tuple[bool, bool], list[Tensor]] = {}
        for master in self._masters.values():
            groups.setdefault((master.ndim > 1, is_shared(master)), []).append(master)
        decay = self._settings.weight_decay
        return torch.optim.AdamW(
            [
                {"params": masters, "weight_decay": decay if is_matrix else 0.0}
                for (is_matrix, _), masters in groups.items()
            ],
            lr=self.schedule.learning_rate,
            betas=self._settings.betas,
            eps=self._settings.epsilon,
            fused=True,
        )

    def _write_back(self) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if self._masters[name] is not parameter:
                    parameter.copy_(self._masters[name])


def _is_exact(parameter: Tensor) -> bool:
    """Whether small updates are not lost in it."""
    return torch.promote_types(parameter.dtype, torch.float32) == parameter.dtype


def _squares(tensors: Iterable[Tensor]) -> float:
    """Of the gradients of what this rank holds, summed."""
    squares = [local(tensor.grad).square().sum() for tensor in tensors if tensor.grad is not None]
    return float(torch.stack(squares).sum()) if squares else 0.0


def _scale(tensors: Iterable[Tensor], factor: float) -> None:
    if factor == 1.0:
        return
    for tensor in tensors:
        if tensor.grad is not None:
            tensor.grad.mul_(factor)
