"""The critic: what stands before each trained token is worth, and the optimizer that moves it.

- It is no part of the policy's module, so nothing of it is ever published.
- It begins at zero everywhere, whatever the states are like; nothing is drawn at random for it.

Suffix M: masked tokens.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from sostenuto.errors import ConfigError, RecordError
from sostenuto.trainer.batching import MicroBatch
from sostenuto.trainer.logprobs import features_of
from sostenuto.trainer.losses import clipped_value
from sostenuto.trainer.model import Policy, load_beside, shared_decoder
from sostenuto.trainer.optimizer import Optimizer
from sostenuto.trainer.parts import Critic as CriticPart
from sostenuto.trainer.parts import CriticHead
from sostenuto.trainer.ranks import ALONE, Ranks, as_shared, reshard, whole
from sostenuto.trainer.settings import LearnerSettings
from sostenuto.trainer.tally import Tally
from sostenuto.trainer.tensors import as_tensor


class ValueHead(nn.Module):
    """One number of each state (M, width), float32 or better."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, states: Tensor) -> Tensor:
        return states.to(self.weight.dtype) @ self.weight + self.bias


class Critic:
    """A value head on the policy's states or on those of a model of its own, and what learns it.

    `batches`: how many it has learnt from.
    """

    def __init__(
        self,
        part: CriticPart,
        policy: Policy,
        settings: LearnerSettings,
        own: Policy | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """ConfigError for a model that has no hidden states to read.

        `ranks`: each has the whole head, and a share of a model of its own.
        """
        self.part = part
        self.batches = 0
        self._own = own is not None
        trunk = own or policy
        # The value is read where the output layer would read, whatever it does there.
        self._trunk = trunk if trunk.plain_head else replace(trunk, plain_head=True)
        self.head = ValueHead(_width(self._trunk))
        self.module = nn.ModuleDict({"head": self.head, **({"trunk": own.decoder} if own else {})})
        own_settings = settings.model_copy(update={"schedule": part.schedule})
        self.optimizer = Optimizer(self.module, own_settings, ranks)

    @property
    def learns_alone(self) -> bool:
        """Whether the policy waits for it."""
        return self.batches < self.part.warmup_steps

    def values(self, batch: MicroBatch) -> Tensor:
        """(M,) of what stands before each masked token."""
        return self.head(self._states(batch))

    def loss(self, batch: MicroBatch, tally: Tally) -> Tensor:
        """(M,) half the squared error against the batch's returns; RecordError where there are none."""
        before, returns = batch.extra("value"), batch.extra("return")
        if before is None or returns is None:
            raise RecordError('critic: the samples have no "value" and "return"; ask for values first')
        values = self.values(batch)
        loss, held_back = clipped_value(values, as_tensor(before), as_tensor(returns), self.part.clip)
        tally.add_values(values.detach(), as_tensor(returns), loss.detach(), held_back)
        return loss

    def tensors(self) -> dict[str, Tensor]:
        """Weights and what the optimizer keeps, by name; all ranks ask, or none."""
        weights = {f"weights.{name}": whole(value) for name, value in self.module.state_dict().items()}
        return weights | {f"optimizer.{name}": value for name, value in self.optimizer.tensors().items()}

    def counts(self) -> dict[str, int]:
        return {"batches": self.batches, "schedule_steps": self.optimizer.steps}

    def load(self, tensors: dict[str, Tensor], counts: dict[str, int]) -> None:
        """Take over what an equal critic gave; RuntimeError for another shape."""
        kinds: dict[str, dict[str, Tensor]] = {"weights": {}, "optimizer": {}}
        for key, value in tensors.items():
            kind, _, name = key.partition(".")
            kinds[kind][name] = value
        own = cast("dict[str, Tensor]", self.module.state_dict())
        shared = {
            name: as_shared(value, own[name]) if name in own else value
            for name, value in kinds["weights"].items()
        }
        self.module.load_state_dict(shared)
        self.optimizer.load(kinds["optimizer"], self.part.schedule, counts["schedule_steps"])
        self.batches = counts["batches"]

    def _states(self, batch: MicroBatch) -> Tensor:
        if self._own:
            states = features_of(self._trunk, replace(batch, experts=None))
            if self._trunk.shared and not torch.is_grad_enabled():
                reshard(self._trunk.decoder)
            return states
        weight = self.part.coefficient if isinstance(self.part, CriticHead) and not self.learns_alone else 0.0
        states = features_of(self._trunk, batch)
        fixed = states.detach()
        return fixed + weight * (states - fixed) if weight else fixed


def open_critic(
    part: CriticPart,
    policy: Policy,
    settings: LearnerSettings,
    directory: Path | None = None,
    ranks: Ranks = ALONE,
) -> Critic:
    """`directory`: of its own model; None: it begins as the policy did.  ConfigError for an unlike model."""
    if isinstance(part, CriticHead):
        return Critic(part, policy, settings, ranks=ranks)
    own = load_beside("critic", directory or policy.source, policy, settings.dtype)
    if ranks.count > 1:
        own = shared_decoder(own)
    return Critic(part, policy, settings, own, ranks)


def _width(policy: Policy) -> int:
    if policy.decoder is policy.module:
        raise ConfigError(
            f"critic: {policy.architecture} gives no hidden states that a value can be read from; take a "
            "model whose layers stand apart from its output layer"
        )
    return int(cast("Any", policy.module).config.get_text_config().hidden_size)
