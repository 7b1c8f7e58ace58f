"""One optimizer step from one batch.  Synchronous, single owner, no I/O.

- One batch is one optimizer step, however many micro-batches it is cut into.
- The denominator of the loss is that of the whole batch, known before the first forward.
- A loss or gradient that is not finite changes nothing and is reported.
- A critic moves in the same steps, with an optimizer of its own, or alone while it warms up.
- `version` names the weights exactly; it is None once they have moved and until they are published.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sostenuto.errors import ConfigError, RecordError
from sostenuto.records import Floats
from sostenuto.trainer.aggregation import token_weights
from sostenuto.trainer.algorithms import SFT, Algorithm
from sostenuto.trainer.batching import MicroBatch, by_teacher, collate, plan
from sostenuto.trainer.critic import Critic
from sostenuto.trainer.logprobs import one_pass, token_hits, token_logprobs
from sostenuto.trainer.losses import supervised
from sostenuto.trainer.model import Policy
from sostenuto.trainer.objective import Losses, PolicyObjective
from sostenuto.trainer.optimizer import Optimizer
from sostenuto.trainer.ranks import ALONE, Ranks
from sostenuto.trainer.reports import Exactness, StepReport
from sostenuto.trainer.samples import Sample
from sostenuto.trainer.settings import LearnerSettings
from sostenuto.trainer.tally import Tally
from sostenuto.trainer.teaching import Teachers
from sostenuto.trainer.tensors import as_array, as_tensor, backpropagate, seed_everything
from sostenuto.trainer.updates import minibatches, together
from sostenuto.types import Version

Objective = Callable[[MicroBatch, Tally], Losses]


class Turn(NamedTuple):
    batch: MicroBatch
    counts: bool
    """Not where a rank only keeps others company."""


def _weighted(objective: Objective, batch: MicroBatch, tally: Tally) -> Tensor:
    with one_pass():
        losses, weights = objective(batch, tally), as_tensor(batch.weights)
    loss = (losses.policy * weights).sum()
    tally.loss += float(loss.detach())
    return loss if losses.value is None else loss + (losses.value * weights).sum()


class Learner:
    """The weights, their optimizer and their name.

    `version` is what the engines know the loaded weights by.
    """

    def __init__(  # noqa: PLR0913 - one keyword for each model and who holds it
        self,
        policy: Policy,
        settings: LearnerSettings,
        *,
        seed: int,
        version: Version | None,
        reference: Policy | None = None,
        teachers: Mapping[str, Policy] | None = None,
        critic: Critic | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """`reference`: what a KL is measured from.  `teachers`: those that are models here, by name.

        `critic`: what says values.  `ranks`: those that hold `policy` together.
        """
        self.ranks = ranks
        self.policy = policy
        self.reference = reference
        self.teachers = Teachers(policy, teachers or {})
        self.critic = critic
        self.settings = settings
        self.seed = seed
        self.version = version
        self.newest = version
        self.step = 0
        if settings.routing_replay and policy.routers is None:
            raise ConfigError(
                f"routing_replay: {policy.architecture} has no routers that weigh experts by a softmax over "
                "their logits; leave it out, or train a mixture-of-experts model that has"
            )
        above = {"auto": settings.microbatch_tokens, "always": 0, "never": math.inf}
        policy.recompute(above[settings.activation_checkpointing])
        seed_everything(seed)
        self.optimizer = Optimizer(policy.module, settings, ranks)

    def fit(self, samples: list[Sample], algorithm: SFT) -> StepReport:
        """One supervised step."""

        def objective(batch: MicroBatch, tally: Tally) -> Losses:
            logprobs = token_logprobs(self.policy, batch)
            unknown = torch.full_like(logprobs, math.nan)
            tally.add_logprobs(logprobs.detach(), unknown, unknown)
            return Losses(supervised(logprobs))

        weights = token_weights(samples, algorithm.aggregation)
        return self._step(samples, weights, objective, [self.optimizer])

    def learn(self, samples: list[Sample], algorithm: Algorithm) -> StepReport:
        """As many optimizer steps as the method makes of a batch."""
        objective = PolicyObjective(
            self.policy, algorithm, reference=self.reference, teachers=self.teachers, critic=self.critic
        )
        for sample in samples:
            sample.check_policy()
            self._refuse_future(sample)
            if objective.critic is not None:
                sample.check_values()
        if self.settings.routing_replay and all(sample.experts is None for sample in samples):
            raise RecordError("routing_replay: no sample has experts; sample with routed_experts")
        if algorithm.teaching is not None:
            self.teachers.check(samples, algorithm.teaching)
        report = self._updates(samples, algorithm, objective)
        if objective.critic is not None and not report.refused:
            objective.critic.batches += 1
        return report

    def _updates(self, samples: list[Sample], algorithm: Algorithm, objective: PolicyObjective) -> StepReport:
        def step(part: list[Sample]) -> StepReport:
            weights = token_weights(part, algorithm.aggregation, algorithm.aggregation_tokens)
            return self._step(part, weights, objective, objective.moves(self.optimizer))

        if algorithm.updates == 1:
            return step(samples)
        cut = minibatches(
            self._as_they_start(samples, algorithm.temperature),
            epochs=algorithm.epochs,
            parts=algorithm.minibatches,
            seed=self.seed + self.step,
        )
        return together([step(part) for part in cut] or [step(samples)])

    def exact(self, samples: list[Sample]) -> Exactness:
        """How many samples are copied without a mistake, teacher forced and greedy."""
        if not samples or not all(sample.masked_tokens for sample in samples):
            raise RecordError("exact: every sample needs a masked token to compare")
        hits = self._scored(samples, lambda batch: token_hits(self.policy, batch))
        return Exactness(
            exact_share=float(np.mean([part.all() for part in hits])),
            token_accuracy=float(np.concatenate(hits).mean()),
            samples=len(samples),
            masked_tokens=sum(len(part) for part in hits),
        )

    def logprobs(
        self, samples: list[Sample], temperature: float, *, of: Literal["policy", "reference"] = "policy"
    ) -> list[Floats]:
        """(T,) for each sample: the masked tokens' log-probabilities, NaN elsewhere."""
        if not temperature > 0:
            raise ConfigError(f"logprobs: temperature {temperature} must be above zero")
        model = self.policy if of == "policy" else self.reference
        if model is None:
            raise ConfigError(f"logprobs: there is no {of}; open the trainer with its folder")
        return self._placed(samples, lambda batch: token_logprobs(model, batch, temperature))

    def values(self, samples: list[Sample]) -> list[Floats]:
        """(T,) for each sample: what the critic says stands before each masked token, NaN elsewhere."""
        critic = self.critic
        if critic is None:
            raise ConfigError("values: there is no critic; open the trainer with one")
        return self._placed(samples, critic.values)

    def check_name(self, version: Version) -> None:
        """Raise ConfigError unless the present weights may be called `version`: none is used twice."""
        if version != self.version and self.newest is not None and version <= self.newest:
            raise ConfigError(f"version {version} is not newer than {self.newest}, which was used already")

    def name(self, version: Version) -> None:
        """Call the present weights `version`."""
        self.check_name(version)
        self.version = self.newest = version

    def _as_they_start(self, samples: list[Sample], temperature: float) -> list[Sample]:
        """With the log-probabilities of now: the weights of now are gone after the first optimizer step."""
        started = self.logprobs(samples, temperature)
        return [
            replace(
                sample,
                extras={**sample.extras, "start": now},
                rollout_logprobs=now
                if sample.rollout_logprobs is None and self._is_fresh(sample)
                else sample.rollout_logprobs,
            )
            for sample, now in zip(samples, started, strict=True)
        ]

    def _is_fresh(self, sample: Sample) -> bool:
        """Whether exactly the present weights sampled it."""
        return self.version is not None and sample.version == self.version

    def _step(
        self, samples: list[Sample], weights: list[float], objective: Objective, movers: list[Optimizer]
    ) -> StepReport:
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        turns = self._turns(samples, weights)
        rate, tally = self.optimizer.learning_rate, Tally()
        refused = self._backward(turns, objective, tally, movers)
        norm, refused = (math.nan, refused) if refused else self._move(movers)
        if not refused:
            self.step += 1
            self.version = None if self.optimizer in movers else self.version
        return self._summed(tally).report(
            step=self.step,
            grad_norm=norm,
            learning_rate=rate,
            samples=len(samples),
            micro_batches=sum(self.ranks.gather(sum(counts for _, counts in turns))),
            tokens=sum(len(sample) for sample in samples),
            masked_tokens=sum(sample.masked_tokens for sample in samples),
            elapsed_s=time.perf_counter() - started_s,
            cpu_s=self.ranks.total(time.process_time() - started_cpu_s),
            refused=refused,
        )

    def _backward(
        self, turns: list[Turn], objective: Objective, tally: Tally, movers: list[Optimizer]
    ) -> str:
        """Sum up the gradient; why there is none, if so."""
        for batch, counts in turns:
            loss = self.policy.inside(partial(_weighted, objective, batch, tally if counts else Tally()))
            total = float(loss.detach())
            if not self.ranks.every(math.isfinite(total)):
                self.policy.give_up()
                _discard(movers)
                return f"the loss is {self.ranks.total(total)}"
            # FSDP averages over ranks, and the loss is a sum.
            backpropagate(loss * self.ranks.count)
            for optimizer in movers:
                optimizer.accumulate()
        return ""

    def _move(self, movers: list[Optimizer]) -> tuple[float, str]:
        """Gradient norm of the policy, and why nothing has moved, if so."""
        for optimizer in movers:
            optimizer.meet()
        others = [optimizer for optimizer in movers if optimizer is not self.optimizer]
        if not all(other.is_finite for other in others):
            _discard(movers)
            return math.nan, "the gradient of the critic is not finite"
        norm, moved = self.optimizer.step() if self.optimizer in movers else (0.0, True)
        if not moved:
            _discard(others)
            return norm, f"the gradient norm is {norm}"
        for other in others:
            other.step()
        return norm, ""

    def _summed(self, tally: Tally) -> Tally:
        """Over all ranks."""
        whole = Tally()
        for part in self.ranks.gather(tally):
            whole.add_tally(part)
        return whole

    def _turns(self, samples: list[Sample], weights: list[float]) -> list[Turn]:
        """This rank's share; where another has more to do, a micro-batch again that counts nothing."""
        self._refuse_unknown_ids(samples)
        trained = [index for index, sample in enumerate(samples) if sample.masked_tokens]
        fresh = [self._is_fresh(sample) for sample in samples]
        groups = [
            self._groups(samples, [trained[i] for i in share])
            for share in self.ranks.shares([len(samples[index]) for index in trained])
        ]
        own = groups[self.ranks.index]
        idle = max(map(len, groups)) - len(own)
        turns = [Turn(collate(samples, group, weights, fresh), True) for group in own]
        if idle:
            again = next(group for share in groups for group in share)
            batch = collate(samples, again, [0.0] * len(samples), fresh)
            turns += [Turn(batch, False)] * idle
        if self.settings.routing_replay:
            return turns
        return [Turn(replace(batch, experts=None), counts) for batch, counts in turns]

    def _groups(self, samples: list[Sample], indices: list[int]) -> list[list[int]]:
        """Which of `indices` run together."""
        budget, padded = self.settings.microbatch_tokens, not self.policy.packs
        return [
            [same[i] for i in group]
            for same in by_teacher(samples, indices)
            for group in plan([len(samples[index]) for index in same], budget, padded=padded)
        ]

    def _placed(self, samples: list[Sample], score: Callable[[MicroBatch], Tensor]) -> list[Floats]:
        """(T,) for each sample: `score` of the masked tokens, NaN elsewhere."""
        out = [np.full(len(sample), np.nan, dtype=np.float32) for sample in samples]
        for sample, whole, masked in zip(samples, out, self._scored(samples, score), strict=True):
            whole[sample.mask] = masked
        return out

    def _scored(self, samples: list[Sample], score: Callable[[MicroBatch], Tensor]) -> list[NDArray[Any]]:
        """What `score` finds for the masked tokens of each sample, in the order of the samples."""
        mine: dict[int, NDArray[Any]] = {}
        with torch.no_grad():
            for batch, _ in self._turns(samples, [0.0] * len(samples)):
                ends = np.cumsum([samples[index].masked_tokens for index in batch.indices])
                found = as_array(self.policy.inside(partial(score, batch)))
                mine |= dict(zip(batch.indices, np.split(found, ends[:-1]), strict=True))
        known = {index: part for share in self.ranks.gather(mine) for index, part in share.items()}
        return [known.get(index, np.zeros(0)) for index in range(len(samples))]

    def _refuse_unknown_ids(self, samples: list[Sample]) -> None:
        size = self.policy.tokenizer_size
        for sample in samples:
            chosen = sample.token_ids[sample.mask]
            if len(sample) and int(sample.token_ids.max()) >= self.policy.vocabulary_size:
                raise RecordError(f"sample {sample.origin}: a token id is beyond the model's vocabulary")
            if len(chosen) and int(chosen.max()) >= size:
                raise RecordError(f"sample {sample.origin}: a trained id has no text (tokenizer size {size})")

    def _refuse_future(self, sample: Sample) -> None:
        if sample.version is not None and self.newest is not None and sample.version > self.newest:
            raise RecordError(
                f"sample {sample.origin}: sampled under {sample.version}, the newest version is {self.newest}"
            )


def _discard(optimizers: list[Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.discard()
