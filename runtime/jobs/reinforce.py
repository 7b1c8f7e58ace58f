"""Reinforcement learning: the recipe.  Read `_train` first.

Generation and learning run side by side; with `max_staleness = 0` the same code is synchronous, since
no group may start while one is open, ready or being learnt from.
"""

import random
from dataclasses import replace

import anyio

from sostenuto.errors import lone_error
from sostenuto.records import Trajectory
from sostenuto.runtime.jobs.diary import Diary, StepClock, step_trained
from sostenuto.runtime.jobs.evaluate import Evaluation
from sostenuto.runtime.jobs.events import JobResult, JobStarted, Saved
from sostenuto.runtime.jobs.job import RLJob
from sostenuto.runtime.jobs.seeds import seed_of
from sostenuto.runtime.jobs.supply import Batch, GroupSupply
from sostenuto.runtime.jobs.warm_start import warm_start
from sostenuto.runtime.jobs.workshop import Premises, Say, Workshop, open_workshop
from sostenuto.trainer.client import TrainerClient
from sostenuto.trainer.credit import credit_group
from sostenuto.trainer.samples import Sample
from sostenuto.types import Version

JOB_OVER = "job_over"


async def reinforce(job: RLJob, premises: Premises, say: Say) -> JobResult:
    """Run the whole job: warm start, evaluation, steps, evaluation, checkpoint."""
    folder, diary = job.model_folder(), Diary(anyio.current_time())
    with lone_error():
        async with (
            TrainerClient(threads=premises.config.trainer.threads) as trainer,
            open_workshop(premises, job, keep_kv=job.kv_at_update == "keep", of_agents=job.is_agent) as shop,
        ):
            version = shop.dispatcher.version
            draft = premises.config.engine.draft_model
            await trainer.open(folder, job.learner, seed=job.seed, version=version, draft=draft)
            say(JobStarted(job.name, str(folder), version, premises.isolation))
            if job.warm_start:
                await warm_start(job, trainer, shop.renderer, say)
                await _publish(shop, trainer, step=0)
            await _evaluate_if_asked(job, shop, diary, say, step=0)
            await _train(job, shop, trainer, diary, say)
            await _save(premises, trainer, diary, say, job.steps, shop.dispatcher.version)
            return diary.result(
                job.name,
                shop.dispatcher.version,
                premises.ledger.statistics(),
                tuple(shop.rollouts.quarantined),
                ended_s=anyio.current_time(),
            )


async def _train(job: RLJob, shop: Workshop, trainer: TrainerClient, diary: Diary, say: Say) -> None:
    supply = GroupSupply(job, shop.rollouts, lambda: shop.dispatcher.version, say)
    try:
        async with anyio.create_task_group() as generation:
            generation.start_soon(supply.generate)
            with shop.rollouts.ended_by_errors():
                for step in range(1, job.steps + 1):
                    await _step(job, shop, trainer, supply, diary, say, step)
                    if job.eval_every and step % job.eval_every == 0 and step < job.steps:
                        await _evaluate_if_asked(job, shop, diary, say, step=step)
                    if job.save_every and step % job.save_every == 0 and step < job.steps:
                        await _save(shop.premises, trainer, diary, say, step, shop.dispatcher.version)
            shop.rollouts.cancelled_by = JOB_OVER
            generation.cancel_scope.cancel()
    finally:
        supply.close(JOB_OVER)
    await _evaluate_if_asked(job, shop, diary, say, step=job.steps)


async def _step(
    job: RLJob,
    shop: Workshop,
    trainer: TrainerClient,
    supply: GroupSupply,
    diary: Diary,
    say: Say,
    step: int,
) -> None:
    """Take a batch, learn from it, publish."""
    clock = StepClock(anyio.current_time())
    batch = await supply.take()
    deployed = shop.dispatcher.version
    clock.taken(anyio.current_time())
    report = await trainer.learn(_credit(job, batch, step), job.algorithm)
    supply.trained(batch, refused=report.refused)
    clock.learnt(anyio.current_time())
    clock.pause_s = await _publish(shop, trainer, step=step)
    supply.deployed()
    clock.published(anyio.current_time())
    told = step_trained(batch, report, clock, deployed, shop.dispatcher.version, step, job.steps)
    diary.step(told)
    say(told)


def _credit(job: RLJob, batch: Batch, step: int) -> list[Sample]:
    groups = [group.members for group in batch.groups]
    if job.shuffle_rewards:
        groups = _with_rewards_shuffled(groups, seed_of("shuffle", job.seed, step))
    return [sample for members in groups for sample in credit_group(members, job.algorithm)]


def _with_rewards_shuffled(groups: list[tuple[Trajectory, ...]], seed: int) -> list[tuple[Trajectory, ...]]:
    rewards = [member.reward for members in groups for member in members]
    random.Random(seed).shuffle(rewards)
    drawn = iter(rewards)
    return [tuple(replace(member, reward=next(drawn)) for member in members) for members in groups]


async def _publish(shop: Workshop, trainer: TrainerClient, *, step: int) -> float:
    manifest = await trainer.publish(shop.premises.new_version())
    return (await shop.publish(manifest, step=step)).pause_s


async def _evaluate_if_asked(job: RLJob, shop: Workshop, diary: Diary, say: Say, *, step: int) -> None:
    if not len(job.eval_tasks):
        return
    evaluation = Evaluation(
        job.eval_tasks, job.environment(), job.limits, seed=job.seed, name=f"{job.name}-{step}"
    )
    for temperature in (job.algorithm.temperature, 0.0):
        told, _ = await evaluation.run(
            shop.rollouts, temperature=temperature, step=step, version=shop.dispatcher.version
        )
        diary.evaluations.append(told)
        say(told)


async def _save(
    premises: Premises, trainer: TrainerClient, diary: Diary, say: Say, step: int, version: Version
) -> None:
    diary.checkpoint = await trainer.save(premises.run.checkpoints, version)
    say(Saved(step, str(diary.checkpoint)))
