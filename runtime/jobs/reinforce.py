"""Reinforcement learning: the recipe.  Read `_train` first.

Generation and learning run side by side; with `max_staleness = 0` the same code is synchronous, since
no group may start while one is open, ready or being learnt from.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import anyio

from sostenuto.errors import lone_error
from sostenuto.runtime.jobs.alarms import Alarms
from sostenuto.runtime.jobs.continuing import open_continuations
from sostenuto.runtime.jobs.crediting import credited
from sostenuto.runtime.jobs.diary import Diary, StepClock, step_trained
from sostenuto.runtime.jobs.evaluate import Evaluation
from sostenuto.runtime.jobs.events import JobResult, JobStarted, Resumed, Saved
from sostenuto.runtime.jobs.group_rewards import judge_of
from sostenuto.runtime.jobs.job import RLJob
from sostenuto.runtime.jobs.past import JOB_OVER, Notes, Past, environments_of
from sostenuto.runtime.jobs.plan import plan_of
from sostenuto.runtime.jobs.receiving import with_receivers
from sostenuto.runtime.jobs.supply import GroupSupply
from sostenuto.runtime.jobs.warm_start import warm_start
from sostenuto.runtime.jobs.watching import flow_seen
from sostenuto.runtime.jobs.workshop import Premises, Say, Workshop, open_workshop
from sostenuto.runtime.reward_models import open_reward_models
from sostenuto.runtime.teaching import models_beside, open_lessons
from sostenuto.trainer.client import TrainerClient
from sostenuto.trainer.retention import JOB_NOTES, held
from sostenuto.types import Version

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Course:
    """One job under way."""

    job: RLJob
    past: Past
    shop: Workshop
    trainer: TrainerClient
    supply: GroupSupply
    diary: Diary
    say: Say
    checkpoints: Path

    async def publish(self, *, step: int) -> float:
        manifest = await self.trainer.publish(self.shop.premises.new_version())
        return (await self.shop.publish(manifest, step=step)).pause_s


async def reinforce(job: RLJob, premises: Premises, say: Say, past: Past) -> JobResult:
    """Run the whole job: warm start, evaluation, steps, evaluation, checkpoint.  `past`: go on from there."""
    folder, diary = job.model_folder(), Diary(anyio.current_time(), Alarms(job.alarms))
    continuations = await open_continuations(job)
    process = premises.config.trainer
    with lone_error(), held(premises.run.checkpoints_of(past.root)) as checkpoints:
        async with (
            TrainerClient(threads=process.threads, processes=process.processes) as trainer,
            open_lessons(job, premises, continuations.histories) as lessons,
            open_reward_models(job, premises) as scored,
            open_workshop(
                scored,
                job,
                at_update=job.update_terms,
                agents=job.agents,
                roles=job.roles,
                around=premises.awaiting(
                    job.late_rewards,
                    say,
                    lambda runner, dispatcher: lessons.around(continuations.around(runner, dispatcher)),
                ),
            ) as shop,
        ):
            version = shop.dispatcher.version
            await _open_trainer(job, premises, trainer, version)
            say(JobStarted(job.name, str(folder), version, premises.isolation))
            plan = replace(plan_of(job, root=past.root), source=continuations.source)
            judge = judge_of({part.called: part.group_rewards for part in job.parts}, shop.renderer)
            supply = GroupSupply(
                plan, shop.rollouts, lambda: shop.dispatcher.version, say,
                judge=judge, inspect=shop.oldest_of,
            )  # fmt: skip
            course = _Course(job, past, shop, trainer, supply, diary, say, checkpoints)
            await _train(course, await _begin(course))
            await _save(course, job.steps)
            return diary.result(
                job.name,
                shop.dispatcher.version,
                premises.ledger.statistics(),
                tuple(shop.rollouts.quarantined),
                ended_s=anyio.current_time(),
            )


async def _open_trainer(job: RLJob, premises: Premises, trainer: TrainerClient, version: Version) -> None:
    await trainer.open(
        job.model_folder(),
        with_receivers(job.learner, premises.config),
        seed=job.seed,
        version=version,
        draft=premises.config.engine.draft_model,
        reference=job.reference_folder(),
        teachers=models_beside(job.teachers),
        critic=job.algorithm.critic,
        critic_directory=job.critic_folder(),
    )


async def _begin(course: _Course) -> int:
    """Warm start, or what was learnt before the job was cut off; the step that its weights have learnt."""
    job, past = course.job, course.past
    if past.checkpoint is not None:
        await course.trainer.restore(past.checkpoint)
        await course.publish(step=past.step)
    elif job.warm_start:
        await warm_start(job, course.trainer, course.shop.renderer, course.say)
        await course.publish(step=0)
    if past.goes_on:
        _go_on(course)
    if past.checkpoint is None and job.warm_start:
        await _save(course, 0)
    else:
        course.shop.premises.journal.write(past.named(course.shop.dispatcher.version))
    for step in _evaluated_until(job, past.step):
        await _evaluate_if_asked(course, step=step)
    return past.step


def _go_on(course: _Course) -> None:
    past, supply, diary = course.past, course.supply, course.diary
    version = course.shop.dispatcher.version
    state = past.notes.supply if past.notes else supply.state_dict()
    kept = supply.go_on(state, past.lineage(version), past.groups)
    if past.notes:
        diary.go_on(past.notes.told, anyio.current_time())
    course.say(
        Resumed(
            course.job.name,
            past.step,
            version,
            checkpoint=str(past.checkpoint or ""),
            kept=kept,
            dropped=len(past.groups) - kept,
            lost_steps=past.lost_steps,
        )
    )


def _evaluated_until(job: RLJob, step: int) -> Iterator[int]:
    """Steps up to this one after which held-out tasks are run, but for the job's last."""
    yield 0
    if job.eval_every:
        yield from range(job.eval_every, min(step, job.steps - 1) + 1, job.eval_every)


async def _train(course: _Course, learnt: int) -> None:
    job, supply, rollouts = course.job, course.supply, course.shop.rollouts
    try:
        async with anyio.create_task_group() as beside, anyio.create_task_group() as generation:
            generation.start_soon(supply.generate)
            generation.start_soon(_watch_trainer, course)
            with rollouts.ended_by_errors():
                for step in range(learnt + 1, job.steps + 1):
                    await _step(course, step)
                    if job.eval_every and step % job.eval_every == 0 and step < job.steps:
                        evaluate = partial(_evaluate_if_asked, course, step=step)
                        if job.eval_beside:
                            beside.start_soon(evaluate)
                        else:
                            await evaluate()
                    if job.save_every and step % job.save_every == 0 and step < job.steps:
                        await _save(course, step)
            rollouts.cancelled_by = JOB_OVER
            generation.cancel_scope.cancel()
    finally:
        supply.close(JOB_OVER)
    await _evaluate_if_asked(course, step=job.steps)


async def _watch_trainer(course: _Course) -> None:
    """Its death is noticed at once, also while nobody asks it for anything."""
    with course.shop.rollouts.ended_by_errors():
        await course.trainer.until_lost()


async def _step(course: _Course, step: int) -> None:
    """Take a batch, learn from it, publish."""
    job, shop, trainer, supply = course.job, course.shop, course.trainer, course.supply
    clock = StepClock(anyio.current_time())
    batch = await supply.take()
    deployed = shop.dispatcher.version
    clock.taken(anyio.current_time())
    flow = flow_seen((*batch.groups, *batch.skipped), supply.standing, job.eval_sampling.success)
    samples = await credited(job, [group.members for group in batch.groups], trainer, step)
    report = await trainer.learn(samples, job.algorithm_at(step))
    supply.trained(batch.groups, refused=report.refused, step=step)
    clock.learnt(anyio.current_time())
    clock.pause_s = await course.publish(step=step)
    supply.deployed()
    clock.published(anyio.current_time())
    told = step_trained(batch, report, clock, deployed, shop.dispatcher.version, step, job.steps)
    told = replace(told, flow=flow, environments=supply.rewards_of(batch) if job.mixed else {})
    course.diary.step(told)
    course.say(told)
    for alarm in course.diary.alarms.look(told):
        _log.warning("%s: %s", job.name, alarm)
        course.say(alarm)


async def _evaluate_if_asked(course: _Course, *, step: int) -> None:
    """Run held-out tasks, each environment's apart, unless that was done before the job was cut off."""
    job, shop, diary = course.job, course.shop, course.diary
    for number, part in enumerate(job.parts):
        if not len(part.eval_tasks):
            continue
        called = part.called if job.mixed else ""
        evaluation = Evaluation(
            part.eval_tasks, part.environment(), part.limits or job.limits,
            seed=job.seed, name=f"{job.name}-{step}" + (f"-{called}" if number else ""),
            sampling=job.eval_sampling,
        )  # fmt: skip
        for temperature in (job.algorithm.temperature, 0.0):
            if diary.has_evaluated(step, temperature, called):
                continue
            told, _ = await evaluation.run(
                shop.rollouts, temperature=temperature, step=step, version=shop.dispatcher.version
            )
            told = replace(told, environment=called)
            diary.evaluations.append(told)
            course.say(told)


async def _save(course: _Course, step: int) -> None:
    """A checkpoint of the whole job.  What it has learnt from is in the journal before."""
    job, version = course.job, course.shop.dispatcher.version
    await course.shop.premises.journal.flush()
    notes = Notes(
        job=course.past.root,
        seed=job.seed,
        environment=environments_of(job),
        step=step,
        version=version,
        lineage=course.supply.lineage,
        supply=course.supply.state_dict(),
        told=course.diary.told(anyio.current_time()),
    )
    path = await course.trainer.save(course.checkpoints, version, notes={JOB_NOTES: notes.to_json()})
    course.diary.checkpoint = path
    course.say(Saved(step, str(path)))
