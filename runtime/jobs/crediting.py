"""From a batch's records to what the trainer learns from: rewards, what is taken off them, advantages."""

import random
from dataclasses import replace
from itertools import islice
from typing import Literal, Protocol

import numpy as np

from sostenuto.records import Floats, Trajectory
from sostenuto.runtime.jobs.job import RLJob
from sostenuto.runtime.jobs.seeds import seed_of
from sostenuto.trainer.advantages import Doubles
from sostenuto.trainer.algorithms import Algorithm
from sostenuto.trainer.credit import credit, valid_members
from sostenuto.trainer.gae import Valued, credit_by_critic
from sostenuto.trainer.parts import GAE, KL
from sostenuto.trainer.penalties import distances, token_distances
from sostenuto.trainer.samples import Sample, trajectory_samples

Groups = list[tuple[Trajectory, ...]]


class Scorer(Protocol):
    """The trainer, as far as it is asked."""

    async def values(self, samples: list[Sample]) -> list[Floats]: ...

    async def logprobs(
        self,
        samples: list[Sample],
        temperature: float = 1.0,
        *,
        of: Literal["policy", "reference"] = "policy",
    ) -> list[Floats]: ...


async def credited(job: RLJob, groups: Groups, trainer: Scorer, step: int) -> list[Sample]:
    """The samples of a batch, each trained token with its advantage."""
    if job.shuffle_rewards:
        groups = _with_rewards_shuffled(groups, seed_of("shuffle", job.seed, step))
    return await credited_by(job.algorithm_at(step), groups, trainer)


async def credited_by(algorithm: Algorithm, groups: Groups, trainer: Scorer) -> list[Sample]:
    """What the method makes of the rewards."""
    advantage, kl = algorithm.advantage, algorithm.kl
    if isinstance(advantage, GAE):
        return await _by_critic(groups, advantage, algorithm, trainer)
    if kl is not None and kl.place == "reward":
        groups = await _less_distance(groups, kl, trainer, algorithm.temperature)
    return credit(groups, algorithm)


async def _by_critic(groups: Groups, part: GAE, algorithm: Algorithm, trainer: Scorer) -> list[Sample]:
    """By what the critic says of the batch now; the price of the distance is taken off token by token."""
    members = [member for group in groups for member in valid_members(group, algorithm)]
    of_each = [trajectory_samples(member, 0.0) for member in members]
    samples = [sample for own in of_each for sample in own]
    values = iter(await trainer.values(samples))
    prices = iter(await _prices(samples, algorithm, trainer))
    batch = [
        Valued(member, own, list(islice(values, len(own))), list(islice(prices, len(own))))
        for member, own in zip(members, of_each, strict=True)
    ]
    return credit_by_critic(batch, part)


async def _prices(samples: list[Sample], algorithm: Algorithm, trainer: Scorer) -> list[Doubles]:
    """(T,) for each sample, what is added to the rewards of its tokens."""
    kl = algorithm.kl
    if kl is None or kl.place != "reward":
        return [np.zeros(len(sample)) for sample in samples]
    against = await trainer.logprobs(samples, algorithm.temperature, of="reference")
    return [-kl.coefficient * far for far in token_distances(samples, against, kl.estimator)]


async def _less_distance(groups: Groups, kl: KL, trainer: Scorer, temperature: float) -> Groups:
    """With the price of the distance from the reference taken off every reward."""
    members = [member for group in groups for member in group]
    samples = [sample for member in members for sample in trajectory_samples(member, 0.0)]
    against = await trainer.logprobs(samples, temperature, of="reference")
    far = distances(samples, against, kl.estimator)
    return [
        tuple(
            member
            if member.reward is None
            else replace(member, reward=member.reward - kl.coefficient * far.get(member.program_id, 0.0))
            for member in group
        )
        for group in groups
    ]


def _with_rewards_shuffled(groups: Groups, seed: int) -> Groups:
    rewards = [member.reward for members in groups for member in members]
    random.Random(seed).shuffle(rewards)
    drawn = iter(rewards)
    return [
        tuple(replace(member, reward=next(drawn), turn_rewards=()) for member in members)
        for members in groups
    ]
