"""Sums over a batch's masked tokens, added micro-batch by micro-batch, in float64."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from sostenuto.trainer.reports import StepReport


@dataclass(slots=True)
class Mean:
    """Sum and count of what was known."""

    total: float = 0.0
    count: int = 0

    def add(self, values: Tensor) -> None:
        """Count the entries that are not NaN."""
        known = values[~values.isnan()]
        self.total += float(known.double().sum())
        self.count += known.numel()

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass(slots=True)
class Spread:
    """Sums for a variance."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, values: Tensor) -> None:
        exact = values.double()
        self.count += exact.numel()
        self.total += float(exact.sum())
        self.squares += float(exact.square().sum())

    @property
    def variance(self) -> float:
        if not self.count:
            return 0.0
        mean = self.total / self.count
        return max(0.0, self.squares / self.count - mean * mean)


class Tally:
    """What a step reports about its tokens.  Reads detached values; NaN means unknown."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.entropy = Mean()
        self.absolute = Mean()
        self.k3 = Mean()
        self.engine = Mean()
        self.update = Mean()
        self.clipped = Mean()
        self.truncated = Mean()
        self.rejected = Mean()
        self.kl = Mean()
        self.teacher = Mean()
        self.value_loss = Mean()
        self.value_clipped = Mean()
        self.returns = Spread()
        self.errors = Spread()
        self.largest: float | None = None

    def add_logprobs(self, current: Tensor, behaviour: Tensor, rollout: Tensor) -> None:
        """Compare the trainer's log-probabilities (M,) with the recorded ones."""
        difference = (current - behaviour).double()
        self.entropy.add(-current)
        self.absolute.add(difference.abs())
        self.k3.add(difference.clamp(-20.0, 20.0).exp() - 1.0 - difference)
        self.engine.add((rollout - behaviour).abs())
        self.update.add(torch.where(behaviour.isnan(), behaviour, (current - rollout).abs()))
        known = difference[~difference.isnan()]
        if known.numel():
            self.largest = max(self.largest or 0.0, float(known.abs().max()))

    def add_flags(self, clipped: Tensor, truncated: Tensor, rejected: Tensor) -> None:
        self.clipped.add(clipped.double())
        self.truncated.add(truncated.double())
        self.rejected.add(rejected.double())

    def add_values(self, values: Tensor, returns: Tensor, loss: Tensor, clipped: Tensor) -> None:
        """What a critic says (M,) beside what came of it."""
        self.value_loss.add(loss)
        self.value_clipped.add(clipped.double())
        self.returns.add(returns)
        self.errors.add(returns - values)

    @property
    def explained_variance(self) -> float | None:
        spread = self.returns.variance
        return 1.0 - self.errors.variance / spread if spread > 0 else None

    def add_tally(self, other: "Tally") -> None:
        """What another rank has summed."""
        for name, value in vars(other).items():
            mine = getattr(self, name)
            if isinstance(mine, Mean | Spread):
                for part in fields(mine):
                    setattr(mine, part.name, getattr(mine, part.name) + getattr(value, part.name))
        self.loss += other.loss
        if other.largest is not None:
            self.largest = max(self.largest or 0.0, other.largest)

    def report(  # noqa: PLR0913 - one keyword for each fact that is not summed here
        self,
        *,
        step: int,
        grad_norm: float,
        learning_rate: float,
        samples: int,
        micro_batches: int,
        tokens: int,
        masked_tokens: int,
        elapsed_s: float,
        cpu_s: float,
        refused: str,
    ) -> StepReport:
        return StepReport(
            step=step,
            loss=self.loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            entropy=self.entropy.value or 0.0,
            mean_abs_dlogp=self.absolute.value,
            max_abs_dlogp=self.largest,
            mismatch_k3=self.k3.value,
            engine_difference=self.engine.value,
            update_difference=self.update.value,
            clip_share=self.clipped.value or 0.0,
            truncated_share=self.truncated.value or 0.0,
            rejected_share=self.rejected.value or 0.0,
            kl=self.kl.value,
            teacher_kl=self.teacher.value,
            value_loss=self.value_loss.value,
            value_clip_share=self.value_clipped.value,
            explained_variance=self.explained_variance,
            samples=samples,
            micro_batches=micro_batches,
            tokens=tokens,
            masked_tokens=masked_tokens,
            elapsed_s=elapsed_s,
            cpu_s=cpu_s,
            refused=refused,
        )
