"""The loss of a micro-batch, put together from the parts of a method."""

from dataclasses import dataclass

import torch

from sostenuto.errors import ConfigError
from sostenuto.trainer.algorithms import Algorithm
from sostenuto.trainer.batching import MicroBatch
from sostenuto.trainer.corrections import Corrected, correct, known_rollout
from sostenuto.trainer.critic import Critic
from sostenuto.trainer.kl import kl_loss
from sostenuto.trainer.logprobs import token_logprobs
from sostenuto.trainer.losses import Terms, policy_loss
from sostenuto.trainer.model import Policy
from sostenuto.trainer.optimizer import Optimizer
from sostenuto.trainer.tally import Tally
from sostenuto.trainer.teaching import Teachers
from sostenuto.trainer.tensors import Tensor, as_tensor


@dataclass(frozen=True, slots=True, eq=False)
class Losses:
    """(M,) of each masked token."""

    policy: Tensor
    value: Tensor | None = None


class PolicyObjective:
    """Losses of a micro-batch."""

    def __init__(
        self,
        policy: Policy,
        algorithm: Algorithm,
        *,
        reference: Policy | None,
        teachers: Teachers,
        critic: Critic | None,
    ) -> None:
        """ConfigError when the method needs a reference or a critic that is not there."""
        if algorithm.kl is not None and reference is None:
            raise ConfigError("kl: the trainer has no reference model; open it with the reference's folder")
        if algorithm.critic is not None and algorithm.critic != (critic and critic.part):
            raise ConfigError(
                f"critic: the method has {algorithm.critic!r}, the trainer was opened with "
                f"{critic and critic.part!r}; open it with the method's"
            )
        self._policy = policy
        self._algorithm = algorithm
        self._reference = reference
        self._teachers = teachers
        self.critic = critic if algorithm.critic is not None else None
        # All steps of one batch are of one kind.
        self._critic_alone = self.critic is not None and self.critic.learns_alone

    def moves(self, policy: Optimizer) -> list[Optimizer]:
        """What the losses have a gradient for."""
        if self.critic is None:
            return [policy]
        return [self.critic.optimizer] if self._critic_alone else [policy, self.critic.optimizer]

    def __call__(self, batch: MicroBatch, tally: Tally) -> Losses:
        with torch.set_grad_enabled(not self._critic_alone):
            loss = self._loss(batch, tally)
        return Losses(loss, None if self.critic is None else self.critic.loss(batch, tally))

    def _loss(self, batch: MicroBatch, tally: Tally) -> Tensor:
        algorithm = self._algorithm
        current = token_logprobs(self._policy, batch, algorithm.temperature)
        sequences = as_tensor(batch.sequences)
        corrected = self._corrected(batch, current, sequences, tally)
        advantages = as_tensor(batch.advantages) + self._signal(batch, current, tally)
        terms = Terms(current, corrected.proximal, advantages, sequences)
        loss, held_back = policy_loss(algorithm.loss, terms)
        tally.add_flags(held_back, corrected.truncated, corrected.rejected)
        added = self._distance(batch, current, corrected, tally) + self._lesson(batch, tally)
        return corrected.weights * (loss + added)

    def _signal(self, batch: MicroBatch, current: Tensor, tally: Tally) -> Tensor | float:
        """What a teacher adds to the advantages: fixed for the whole batch."""
        teaching = self._algorithm.teaching
        if teaching is None or teaching.signal != "sampled":
            return 0.0
        started = batch.extra("start")
        student = current.detach() if started is None else as_tensor(started)
        signal = self._teachers.signal(teaching, batch, student, self._algorithm.temperature)
        tally.teacher.add(-signal)
        return teaching.coefficient * signal

    def _lesson(self, batch: MicroBatch, tally: Tally) -> Tensor | float:
        """What a teacher adds to the loss."""
        teaching = self._algorithm.teaching
        if teaching is None or teaching.signal != "distribution":
            return 0.0
        distance = self._teachers.distance(teaching, batch, self._algorithm.temperature)
        tally.teacher.add(distance.detach())
        return teaching.coefficient * distance

    def _corrected(self, batch: MicroBatch, current: Tensor, sequences: Tensor, tally: Tally) -> Corrected:
        behaviour = as_tensor(batch.behaviour)
        rollout = known_rollout(current, as_tensor(batch.rollout), as_tensor(batch.fresh))
        tally.add_logprobs(current.detach(), behaviour, rollout)
        proximal = rollout
        if self._algorithm.proximal == "current":
            started = batch.extra("start")
            # One optimizer step to a batch: the weights of its beginning are those of now.
            proximal = current.detach() if started is None else as_tensor(started)
        return correct(
            self._algorithm.correction,
            behaviour,
            proximal,
            sequences=sequences,
            rejection=self._algorithm.rejection,
        )

    def _distance(
        self, batch: MicroBatch, current: Tensor, corrected: Corrected, tally: Tally
    ) -> Tensor | float:
        kl, reference = self._algorithm.kl, self._reference
        if kl is None or reference is None or kl.place == "reward":
            return 0.0
        distance = kl_loss(
            kl,
            self._policy,
            reference,
            batch,
            current=current,
            proximal=corrected.proximal,
            temperature=self._algorithm.temperature,
        )
        tally.kl.add(distance.detach())
        return kl.coefficient * distance
