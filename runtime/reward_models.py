"""Reward models at work: what they say of a program is added to its reward while that is being scored.

Invariants:
- Each has a deadline of its own; one that does not answer, or not with a number, makes the program
  failed(infrastructure), never a reward of zero.
- A conversation that is longer than the model's context is nobody's score either: failed(environment).
"""

import math
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from string import Template
from typing import Protocol

import anyio
import anyio.to_thread
from pydantic import JsonValue
from tokenizers import Tokenizer

from sostenuto.errors import ConfigError, EnvironmentFailure, JudgeError, boundary, lone_error, nearest
from sostenuto.runtime.engines.protocol import Engine
from sostenuto.runtime.engines.wire import ScoreRequest
from sostenuto.runtime.jobs.job import EvalJob, RLJob, RolloutJob, local_folder
from sostenuto.runtime.jobs.reward_model import RewardModel
from sostenuto.runtime.jobs.workshop import Premises
from sostenuto.runtime.lone_engine import open_lone_engine
from sostenuto.runtime.program import ToolServer
from sostenuto.runtime.rendering.choice import open_renderer
from sostenuto.runtime.rendering.folder import ModelFolder
from sostenuto.runtime.rendering.renderer import Renderer
from sostenuto.tools.wire import EnvironmentRef, Moved, Prepared, Reward
from sostenuto.trainer.client import TrainerClient
from sostenuto.trainer.reports import ScorerFacts
from sostenuto.types import CallId, Episode, Message, ProgramId, SandboxRung, ToolCall, ToolResult

Task = Mapping[str, JsonValue]
_TOGETHER = 32
"""Texts that one engine is asked about at a time, where its entry says nothing."""


class Judged(Protocol):
    """A reward model that can be asked."""

    async def score(self, episode: Episode, task: Task) -> float: ...


class Classifier:
    """A model of sequence classification in a process of its own."""

    def __init__(self, model: RewardModel, process: TrainerClient, facts: ScorerFacts) -> None:
        """ConfigError for a label that it does not have."""
        self._model = model
        self._process = process
        self._facts = facts
        self._label = _label(model, facts.labels)
        self._ids = _reader(model)

    async def score(self, episode: Episode, task: Task) -> float:
        ids = self._ids(episode, task)
        context = self._facts.context_tokens
        if context and len(ids) > context:
            raise EnvironmentFailure(
                f"{self._model.where}: a conversation of {len(ids)} tokens, its context is {context}; lower "
                "limits.total_tokens, or give it a template"
            )
        (outputs,) = await self._process.scores([ids])
        if self._label is None:
            return outputs[0]
        highest = max(outputs)
        weights = [math.exp(output - highest) for output in outputs]
        return weights[self._label] / math.fsum(weights)


class Likelihood:
    """An engine that says how likely a text is after another."""

    def __init__(self, model: RewardModel, engine: Engine) -> None:
        """ConfigError for labels that are no tokens."""
        self._model = model
        self._engine = engine
        folder = ModelFolder.open(local_folder(model.model, f"{model.where}: model"))
        self._tokenizer = Tokenizer.from_str(folder.tokenizer_json)
        self._renderer = open_renderer(folder) if model.chat else None
        self._places = anyio.CapacityLimiter(model.engine.concurrency or _TOGETHER)
        texts = (model.label, *model.against)
        self._labels = [self._encode(text) for text in texts]
        if empty := [text for text, ids in zip(texts, self._labels, strict=True) if not ids]:
            raise ConfigError(f"{model.where}: {empty[0]!r} is no token of the model's; give another text")

    async def score(self, episode: Episode, task: Task) -> float:
        text = _filled(self._model, episode, task)
        if self._renderer is None:
            before = self._tokenizer.encode(text, add_special_tokens=True).ids
        else:
            pieces = self._renderer.start([Message("user", text)], ())
            before = [id_ for piece in pieces for id_ in piece.token_ids]
        found = [await self._logprob(before, label) for label in self._labels]
        if len(found) == 1:
            return found[0]
        highest = max(found)
        return math.exp(found[0] - highest) / math.fsum(math.exp(one - highest) for one in found)

    async def _logprob(self, before: list[int], label: list[int]) -> float:
        request = ScoreRequest(token_ids=[*before, *label], start=len(before))
        async with self._places:
            reply = await self._engine.score(request)
        if len(reply.logprobs) != len(label):
            raise JudgeError(f"{len(label)} tokens were asked for, {len(reply.logprobs)} were scored")
        return math.fsum(reply.logprobs)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


class Scored:
    """A ToolServer whose rewards have the scores of `judges` in them."""

    def __init__(self, inner: ToolServer, judges: Sequence[tuple[RewardModel, Judged]]) -> None:
        self._inner = inner
        self._judges = judges
        self._tasks: dict[ProgramId, Task] = {}
        """Of programs that are prepared."""

    async def prepare(
        self,
        program_id: ProgramId,
        environment: EnvironmentRef,
        task: dict[str, JsonValue],
        *,
        seed: int,
        timeout_s: float,
    ) -> Prepared:
        self._tasks[program_id] = task
        return await self._inner.prepare(program_id, environment, task, seed=seed, timeout_s=timeout_s)

    async def call(
        self, program_id: ProgramId, call_id: CallId, call: ToolCall, *, timeout_s: float, priority: int = 0
    ) -> ToolResult:
        return await self._inner.call(program_id, call_id, call, timeout_s=timeout_s, priority=priority)

    async def reward(
        self, program_id: ProgramId, call_id: CallId, episode: Episode, *, timeout_s: float
    ) -> Reward:
        """The environment's own, plus each model's by its weight; all of them among the metrics."""
        told = await self._inner.reward(program_id, call_id, episode, timeout_s=timeout_s)
        own, task = told.value, self._tasks.get(program_id, {})
        if own is None:
            return told
        scores: dict[str, float] = {}

        async def ask(model: RewardModel, judge: Judged) -> None:
            scores[model.name] = await _in_time(model, judge, episode, task)

        with lone_error():
            async with anyio.create_task_group() as group:
                for model, judge in self._judges:
                    group.start_soon(ask, model, judge)
        added = math.fsum(model.weight * scores[model.name] for model, _ in self._judges)
        metrics = {**told.metrics, **scores, "environment_reward": own}
        return told.model_copy(update={"value": own + added, "metrics": metrics})

    async def move(self, program_id: ProgramId, rung: SandboxRung) -> Moved:
        return await self._inner.move(program_id, rung)

    async def release(self, program_id: ProgramId) -> None:
        self._tasks.pop(program_id, None)
        await self._inner.release(program_id)


async def _in_time(model: RewardModel, judge: Judged, episode: Episode, task: Task) -> float:
    with boundary(JudgeError, model.where), anyio.move_on_after(model.deadline_s):
        score = await judge.score(episode, task)
        if not math.isfinite(score):
            raise JudgeError(f"{model.where}: its score is {score}")
        return score
    raise JudgeError(f"{model.where}: no score within {model.deadline_s:g} s")


@asynccontextmanager
async def open_reward_models(
    job: RLJob | EvalJob | RolloutJob, premises: Premises
) -> AsyncGenerator[Premises]:
    """`premises`, where the job's reward models score.  ConfigError for one that cannot."""
    if not job.reward_models:
        yield premises
        return
    async with AsyncExitStack() as stack:
        judges = [
            (model, await stack.enter_async_context(_opened(model, job.name, premises)))
            for model in job.reward_models
        ]
        yield replace(premises, tools=Scored(premises.tools, judges))


@asynccontextmanager
async def _opened(model: RewardModel, job: str, premises: Premises) -> AsyncGenerator[Judged]:
    directory = local_folder(model.model, f"{model.where}: model")
    if model.kind == "likelihood":
        name = f"reward-{model.name}"
        async with open_lone_engine(directory, model.engine, premises, job=job, name=name) as engine:
            yield await anyio.to_thread.run_sync(Likelihood, model, engine)
        return
    async with TrainerClient(threads=model.threads) as process:
        with _named(model):
            facts = await process.open_scorer(directory, dtype=model.dtype, device=model.device)
        yield await anyio.to_thread.run_sync(partial(Classifier, model, process, facts))


@contextmanager
def _named(model: RewardModel) -> Generator[None]:
    """What the process refuses, under the name of the entry."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{model.where}: {error}") from error


def _label(model: RewardModel, labels: list[str]) -> int | None:
    """Which output is asked for; None: the only one."""
    if len(labels) == 1 and not model.label:
        return None
    if model.label in labels and len(labels) > 1:
        return labels.index(model.label)
    remedy = "leave label out" if len(labels) == 1 else f"give label; {nearest(model.label, labels)}"
    raise ConfigError(f"{model.where}: label is {model.label!r}, the model has {len(labels)}; {remedy}")


def _reader(model: RewardModel) -> Callable[[Episode, Task], list[int]]:
    """From an episode to the tokens that a classifier is given."""
    directory = local_folder(model.model, f"{model.where}: model")
    if not model.template:
        renderer = open_renderer(ModelFolder.open(directory))
        return lambda episode, _: _rendered(renderer, episode)
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{model.where}: {path} is missing; save the model's tokenizer there")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda episode, task: tokenizer.encode(_filled(model, episode, task)).ids


def _rendered(renderer: Renderer, episode: Episode) -> list[int]:
    """The conversation up to the policy's last message, that included."""
    turns = [index for index, message in enumerate(episode.messages) if message.role == "assistant"]
    if not turns:
        raise EnvironmentFailure("a reward model was asked of a conversation without a turn of the policy")
    before, last = episode.messages[: turns[-1]], episode.messages[turns[-1]]
    pieces = renderer.start(before, ())
    return [*(id_ for piece in pieces for id_ in piece.token_ids), *renderer.write(before, last, ())]


def _filled(model: RewardModel, episode: Episode, task: Task) -> str:
    asked = [message.content for message in episode.messages if message.role == "user"]
    known = {
        "prompt": asked[0] if asked else "",
        "answer": episode.answer,
        "conversation": "\n".join(f"{message.role}: {message.content}" for message in episode.messages),
        **{f"task_{name}": str(value) for name, value in task.items()},
    }
    try:
        return Template(model.template).substitute(known)
    except KeyError as error:
        raise EnvironmentFailure(f"{model.where}: the task has nothing for ${error.args[0]}") from error
