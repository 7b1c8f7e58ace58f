"""Reinforcement learning: the recipe.  Read `_train` first.

Generation and learning run side by side; with `max_staleness = 0` the same code is synchronous, since
no group may start while one is open, ready or being learnt from.
"""

import logging
from dataclasses import replace
from functools import partial

import anyio

from sostenuto.errors import lone_error
from sostenuto.runtime.jobs.alarms import Alarms
from sostenuto.runtime.jobs.continuing import open_continuations
from sostenuto.runtime.jobs.crediting import credited
from sostenuto.runtime.jobs.diary import Diary, StepClock, step_trained
from sostenuto.runtime.jobs.evaluate import Evaluation
from sostenuto.runtime.jobs.events import JobResult, JobStarted, Saved
from sostenuto.runtime.jobs.group_rewards import judge_of
from sostenuto.runtime.jobs.job import RLJob, TaskSource
from sostenuto.runtime.jobs.plan import plan_of
from sostenuto.runtime.jobs.supply import GroupSupply
from sostenuto.runtime.jobs.warm_start import warm_start
from sostenuto.runtime.jobs.watching import flow_seen
from sostenuto.runtime.jobs.workshop import Premises, Say, Workshop, open_workshop
from sostenuto.runtime.reward_models import open_reward_models
from sostenuto.runtime.teaching import models_beside, open_lessons
from sostenuto.trainer.client import TrainerClient
from sostenuto.types import Version

JOB_OVER = "job_over"

_log = logging.getLogger(__name__)


async def reinforce(job: RLJob, premises: Premises, say: Say) -> JobResult:
    """Run the whole job: warm start, evaluation, steps, evaluation, checkpoint."""
    folder, diary = job.model_folder(), Diary(anyio.current_time(), Alarms(job.alarms))
    continuations = await open_continuations(job)
    with lone_error():
        async with (
            TrainerClient(**premises.config.trainer.model_dump()) as trainer,
            open_lessons(job, premises, continuations.histories) as lessons,
            open_reward_models(job, premises) as scored,
            open_workshop(
                scored,
                job,
                keep_kv=job.kv_at_update == "keep",
                of_agents=job.is_agent,
                around=premises.awaiting(
                    job.late_rewards,
                    say,
                    lambda runner, dispatcher: lessons.around(continuations.around(runner, dispatcher)),
                ),
            ) as shop,
        ):
            version = shop.dispatcher.version
            draft = premises.config.engine.draft_model
            await trainer.open(
                folder,
                job.learner,
                seed=job.seed,
                version=version,
                draft=draft,
                reference=job.reference_folder(),
                teachers=models_beside(job.teachers),
                critic=job.algorithm.critic,
                critic_directory=job.critic_folder(),
            )
            say(JobStarted(job.name, str(folder), version, premises.isolation))
            if job.warm_start:
                await warm_start(job, trainer, shop.renderer, say)
                await _publish(shop, trainer, step=0)
            await _evaluate_if_asked(job, shop, diary, say, step=0)
            await _train(job, continuations.source, shop, trainer, diary, say)
            await _save(premises, trainer, diary, say, job.steps, shop.dispatcher.version)
            return diary.result(
                job.name,
                shop.dispatcher.version,
                premises.ledger.statistics(),
                tuple(shop.rollouts.quarantined),
                ended_s=anyio.current_time(),
            )


async def _train(
    job: RLJob, source: TaskSource, shop: Workshop, trainer: TrainerClient, diary: Diary, say: Say
) -> None:
    supply = GroupSupply(
        replace(plan_of(job), source=source), shop.rollouts, lambda: shop.dispatcher.version, say,
        judge=judge_of(job.group_rewards, shop.renderer),
    )  # fmt: skip
    try:
        async with anyio.create_task_group() as beside, anyio.create_task_group() as generation:
            generation.start_soon(supply.generate)
            with shop.rollouts.ended_by_errors():
                for step in range(1, job.steps + 1):
                    await _step(job, shop, trainer, supply, diary, say, step)
                    if job.eval_every and step % job.eval_every == 0 and step < job.steps:
                        evaluate = partial(_evaluate_if_asked, job, shop, diary, say, step=step)
                        if job.eval_beside:
                            beside.start_soon(evaluate)
                        else:
                            await evaluate()
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
    flow = flow_seen((*batch.groups, *batch.skipped), supply.standing, job.eval_sampling.success)
    samples = await credited(job, [group.members for group in batch.groups], trainer, step)
    report = await trainer.learn(samples, job.algorithm_at(step))
    supply.trained(batch.groups, refused=report.refused)
    clock.learnt(anyio.current_time())
    clock.pause_s = await _publish(shop, trainer, step=step)
    supply.deployed()
    clock.published(anyio.current_time())
    told = step_trained(batch, report, clock, deployed, shop.dispatcher.version, step, job.steps)
    told = replace(told, flow=flow)
    diary.step(told)
    say(told)
    for alarm in diary.alarms.look(told):
        _log.warning("%s: %s", job.name, alarm)
        say(alarm)


async def _publish(shop: Workshop, trainer: TrainerClient, *, step: int) -> float:
    manifest = await trainer.publish(shop.premises.new_version())
    return (await shop.publish(manifest, step=step)).pause_s


async def _evaluate_if_asked(job: RLJob, shop: Workshop, diary: Diary, say: Say, *, step: int) -> None:
    if not len(job.eval_tasks):
        return
    evaluation = Evaluation(
        job.eval_tasks, job.environment(), job.limits,
        seed=job.seed, name=f"{job.name}-{step}", sampling=job.eval_sampling,
    )  # fmt: skip
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
