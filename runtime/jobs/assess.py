"""Evaluation as a job of its own: a model on every task of an environment."""

import anyio

from sostenuto.errors import lone_error
from sostenuto.runtime.jobs.diary import Diary
from sostenuto.runtime.jobs.evaluate import Evaluation
from sostenuto.runtime.jobs.events import JobResult, JobStarted
from sostenuto.runtime.jobs.job import EvalJob
from sostenuto.runtime.jobs.workshop import Premises, Say, open_workshop
from sostenuto.runtime.reward_models import open_reward_models


async def assess(job: EvalJob, premises: Premises, say: Say) -> JobResult:
    """Run every task at each temperature."""
    folder, diary = job.model_folder(), Diary(anyio.current_time())
    with lone_error():
        async with (
            open_reward_models(job, premises) as scored,
            open_workshop(
                scored,
                job,
                agents=job.agents,
                roles=job.roles,
                around=premises.awaiting(job.late_rewards, say),
            ) as shop,
        ):
            say(JobStarted(job.name, str(folder), shop.dispatcher.version, premises.isolation))
            evaluation = Evaluation(
                job.tasks, job.environment(), job.limits,
                seed=job.seed, name=job.name, truncation=job.truncation, sampling=job.sampling,
            )  # fmt: skip
            for temperature in job.temperatures:
                told, _ = await evaluation.run(
                    shop.rollouts, temperature=temperature, step=0, version=shop.dispatcher.version
                )
                diary.evaluations.append(told)
                say(told)
            return diary.result(
                job.name,
                shop.dispatcher.version,
                premises.ledger.statistics(),
                tuple(shop.rollouts.quarantined),
                ended_s=anyio.current_time(),
            )
