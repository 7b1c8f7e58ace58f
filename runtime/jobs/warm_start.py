"""Supervised steps on the environment's own demonstrations."""

from collections.abc import Iterator
from random import Random
from typing import Any

from sostenuto.envs.declaration import declaration
from sostenuto.envs.environment import Environment
from sostenuto.errors import ConfigError
from sostenuto.runtime.jobs.events import WarmStartStep
from sostenuto.runtime.jobs.job import RLJob
from sostenuto.runtime.jobs.seeds import seed_of
from sostenuto.runtime.jobs.workshop import Say
from sostenuto.runtime.rendering.demonstration import demonstrate
from sostenuto.runtime.rendering.renderer import Renderer
from sostenuto.trainer.client import TrainerClient
from sostenuto.trainer.samples import Sample
from sostenuto.trainer.samples import demonstration as as_sample
from sostenuto.types import Message


async def warm_start(job: RLJob, trainer: TrainerClient, renderer: Renderer, say: Say) -> None:
    """Fit the trainer's weights to demonstrations; its optimizer then starts afresh for the job."""
    plan = job.warm_start
    if plan is None:
        return
    samples = _samples(job, renderer)
    await trainer.reset_optimizer(plan.schedule)
    for step in range(1, plan.steps + 1):
        report = await trainer.fit([next(samples) for _ in range(plan.batch)])
        say(WarmStartStep("demonstrations", step, plan.steps, report))
    await trainer.reset_optimizer(job.learner.schedule)


def _samples(job: RLJob, renderer: Renderer) -> Iterator[Sample]:
    """Demonstrations of the job's tasks, in the order in which they are drawn, again and again."""
    parts = job.parts
    tools = [tuple(d.tool.schema for d in declaration(part.env).tools.values()) for part in parts]
    source, ordinal = job.task_source(), 0
    while True:
        draw = source.at(ordinal)
        ordinal += 1
        env = parts[draw.part].env
        messages = env.demonstrate(draw.task, Random(seed_of("demonstration", job.seed, ordinal)))
        if not messages:
            raise ConfigError(f"warm_start: {env.__name__}.demonstrate gave no conversation")
        for shown in demonstrate(renderer, _with_system(env, messages), tools[draw.part]):
            yield as_sample(shown.token_ids, shown.mask, origin=f"demonstration {ordinal}")


def _with_system(env: type[Environment[Any]], messages: list[Message]) -> list[Message]:
    """As a rollout begins: with the environment's system message, if it has one."""
    if not env.system or messages[0].role == "system":
        return messages
    return [Message("system", env.system), *messages]
