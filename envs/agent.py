"""Agents from elsewhere: a function that runs its own loop, and reaches its model by a URL.

    @so.agent
    async def solve(task: Riddle, *, base_url: str, api_key: str) -> float:
        client = AsyncOpenAI(base_url=base_url, api_key=api_key)
        ...

What `agent` makes of it is an environment class: it travels, is hosted and ends as those do.
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from random import Random
from types import FunctionType, new_class
from typing import Any, TypeVar, cast, overload

from pydantic import BaseModel

from sostenuto.envs.declaration import AUTHOR_FILE
from sostenuto.envs.environment import Environment, Score, TaskT
from sostenuto.envs.workspace import SandboxSpec
from sostenuto.errors import ConfigError
from sostenuto.tools.schema import resolve_hints
from sostenuto.types import Episode, Message

GivenT = TypeVar("GivenT", bound=BaseModel)

Run = Callable[..., Score | Awaitable[Score]]
"""`(task, *, base_url, api_key)`, `sandbox` where it declares one, `wall_s` where it takes it.

A plain function runs in a thread.
"""
Demonstrate = Callable[[Any, Random], list[Message]]

_GIVEN = ("base_url", "api_key")
_SANDBOX = "sandbox"
_WALL = "wall_s"


class Agent(Environment[TaskT]):
    """What `agent` makes; its whole run is asked for where other environments are asked for their reward."""

    run: Run
    """A static method."""

    async def reset(self, task: TaskT) -> str:
        """Nothing: the agent itself says how its conversation starts."""
        del task
        return ""

    def arguments(self, episode: Episode) -> dict[str, object]:
        """What `run` is given beside its task."""
        model = episode.model
        if model is None:
            raise ConfigError(f"agent {type(self).__name__} was given no model; run it as the env of a job")
        spec: object = inspect.getattr_static(type(self), _SANDBOX, None)
        lent = {_SANDBOX: spec.__get__(self, type(self))} if isinstance(spec, SandboxSpec) else {}
        timed = {_WALL: model.wall_s} if _WALL in inspect.signature(self.run).parameters else {}
        return {"base_url": model.base_url, "api_key": model.api_key, **lent, **timed}


class _AsyncAgent(Agent[TaskT]):
    async def reward(self, episode: Episode) -> Score:
        return await cast("Awaitable[Score]", self.run(self.task, **self.arguments(episode)))


class _ThreadAgent(Agent[TaskT]):
    def reward(self, episode: Episode) -> Score:
        return cast("Score", self.run(self.task, **self.arguments(episode)))


@overload
def agent(
    run: Run,
    /,
    *,
    sandbox: SandboxSpec | None = None,
    requirements: Sequence[str] = (),
    interpreter: str | None = None,
    demonstrate: Demonstrate | None = None,
) -> type[Agent[Any]]: ...


@overload
def agent(
    *,
    sandbox: SandboxSpec | None = None,
    requirements: Sequence[str] = (),
    interpreter: str | None = None,
    demonstrate: Demonstrate | None = None,
) -> Callable[[Run], type[Agent[Any]]]: ...


def agent(
    run: Run | None = None,
    /,
    *,
    sandbox: SandboxSpec | None = None,
    requirements: Sequence[str] = (),
    interpreter: str | None = None,
    demonstrate: Demonstrate | None = None,
) -> type[Agent[Any]] | Callable[[Run], type[Agent[Any]]]:
    """Make of `run` what a job takes as its `env`; also as a decorator, with arguments or without.

    `run(task, *, base_url, api_key)` returns the reward, or a mapping of metrics with "reward".  With a
    `sandbox` declared it is also given `sandbox`, and where it takes `wall_s`, its deadline in seconds.
    Requirements and interpreter are those of Environment; `demonstrate(task, rng)` is a scripted
    conversation for a warm start.  ConfigError for another signature.
    """
    declared: dict[str, object] = {
        "requirements": requirements,
        "interpreter": interpreter,
        **({_SANDBOX: sandbox} if sandbox else {}),
        **({"demonstrate": staticmethod(demonstrate)} if demonstrate else {}),
    }
    if run is None:
        return lambda given: _made(given, declared)
    return _made(run, declared)


def _made(run: Run, declared: Mapping[str, object]) -> type[Agent[Any]]:
    if not isinstance(run, FunctionType):
        raise ConfigError(f"agent: {run!r:.80} is no function; give one made with `def` or `async def`")
    task_type = task_type_of(run, "agent", _remedy(run))
    _check_keywords(run, has_sandbox=_SANDBOX in declared)
    body = {
        **declared,
        "run": staticmethod(run),
        "__doc__": run.__doc__,
        "__module__": run.__module__,
        "__qualname__": run.__qualname__,
        AUTHOR_FILE: run.__code__.co_filename,
    }
    base: Any = _AsyncAgent if inspect.iscoroutinefunction(run) else _ThreadAgent
    made = new_class(run.__name__, (base[task_type],), exec_body=lambda space: space.update(body))
    return cast("type[Agent[Any]]", made)


def task_type_of(function: FunctionType, what: str, remedy: str) -> type[BaseModel]:
    """The annotation of its first parameter; ConfigError when that is no task type."""
    parameters = list(inspect.signature(function).parameters.values())
    what = f"{what} {function.__name__}"
    if not parameters or parameters[0].kind is inspect.Parameter.KEYWORD_ONLY:
        raise ConfigError(f"{what} takes no task; {remedy}")
    found = resolve_hints(function, what).get(parameters[0].name)
    if isinstance(found, type) and issubclass(cast("type[object]", found), BaseModel):
        return cast("type[BaseModel]", found)
    said = "nothing" if found is None else repr(found)
    raise ConfigError(f"{what}: its task type is {said}; make it a pydantic model, and {remedy}")


def _check_keywords(run: FunctionType, *, has_sandbox: bool) -> None:
    taken = {
        parameter.name: parameter
        for parameter in list(inspect.signature(run).parameters.values())[1:]
        if parameter.kind in {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    }
    for name in _GIVEN:
        if name not in taken:
            raise ConfigError(f"agent {run.__name__} takes no {name!r}; {_remedy(run)}")
    if has_sandbox != (_SANDBOX in taken):
        raise ConfigError(
            f"agent {run.__name__}: it declares a sandbox and takes one, both or neither; write "
            "`@agent(sandbox=SandboxSpec(...))` and `*, base_url, api_key, sandbox`"
        )
    for name, parameter in taken.items():
        if name not in {*_GIVEN, _SANDBOX, _WALL} and parameter.default is inspect.Parameter.empty:
            raise ConfigError(f"agent {run.__name__}: nobody gives it {name!r}; {_remedy(run)}")


def _remedy(run: FunctionType) -> str:
    kind = "async def" if inspect.iscoroutinefunction(run) else "def"
    return f"write `{kind} {run.__name__}(task: YourTask, *, base_url: str, api_key: str) -> float`"
