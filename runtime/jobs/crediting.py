"""From a batch's records to what the trainer learns from: rewards, what is taken off them, advantages."""

import random
from dataclasses import replace

from sostenuto.records import Trajectory
from sostenuto.runtime.jobs.job import RLJob
from sostenuto.runtime.jobs.seeds import seed_of
from sostenuto.trainer.client import TrainerClient
from sostenuto.trainer.credit import credit
from sostenuto.trainer.parts import KL
from sostenuto.trainer.penalties import distances
from sostenuto.trainer.samples import Sample, trajectory_samples

Groups = list[tuple[Trajectory, ...]]


async def credited(job: RLJob, groups: Groups, trainer: TrainerClient, step: int) -> list[Sample]:
    """The samples of a batch, each trained token with its advantage."""
    if job.shuffle_rewards:
        groups = _with_rewards_shuffled(groups, seed_of("shuffle", job.seed, step))
    kl = job.algorithm.kl
    if kl is not None and kl.place == "reward":
        groups = await _less_distance(groups, kl, trainer, job.algorithm.temperature)
    return credit(groups, job.algorithm)


async def _less_distance(groups: Groups, kl: KL, trainer: TrainerClient, temperature: float) -> Groups:
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
    return [tuple(replace(member, reward=next(drawn)) for member in members) for members in groups]
