"""What an environment's author writes: a class with typed tools and a reward.

One instance serves one program.  `task`, `seed`, `secrets` and `sandbox` are there from `reset` on.
Any method may be sync or async: a sync one runs in a thread, where blocking blocks nobody else.
"""

import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Generic

from pydantic import BaseModel, JsonValue
from typing_extensions import TypeVar

from sostenuto.envs.later import Later
from sostenuto.envs.workspace import SANDBOX, lend
from sostenuto.errors import ConfigError, Unsupported, nearest
from sostenuto.sandbox.protocol import Sandbox
from sostenuto.tools.decorator import options_of, place_of
from sostenuto.tools.remote.declared import Remote
from sostenuto.types import Episode, Message

TaskT = TypeVar("TaskT", bound=BaseModel, default=Any)

Opening = str | Sequence[Message]
"""The first user message, or the messages that the conversation starts with."""
Score = float | Mapping[str, float | Sequence[float]] | Later
"""A reward, or metrics with one of that name, or with "turns": what each turn earned, which add up to it;
or `later()`, when it comes after the end."""


_BOUND = frozenset({"task", "seed", "secrets", SANDBOX})


class GivenSecrets(Mapping[str, str]):
    """Secrets by name; shows their names alone."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> str:
        try:
            return self._values[name]
        except KeyError:
            hint = nearest(name, list(self._values))
            raise ConfigError(f"secret {name!r} was not given to the tool server; {hint}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"<secrets {', '.join(sorted(self._values)) or 'none'}>"


class Environment(Generic[TaskT]):
    """Base of every environment.  `reset`, `reward` and a task type are needed; the rest is optional."""

    system: str = ""
    """System message that the conversation starts with; empty: none."""
    tools: Sequence[Callable[..., Any]] = ()
    """Plain functions under `@tool`, besides the class's own methods."""
    remote: Sequence[Remote] = ()
    """Tools that other services offer: HttpTool, McpServer."""

    requirements: Sequence[str] = ()
    """As pip has them, such as "numpy==2.1.0": its workers then run in a virtual environment that has these.

    What only that has is imported inside methods, since the class itself is read elsewhere, too.
    """
    interpreter: str | None = None
    """Instead of requirements: the python of a virtual environment that has sostenuto and all else.

    An absolute path, or one relative to the file of the class.
    """

    task: TaskT
    seed: int
    """Of this program; programs of one group differ in it."""
    secrets: Mapping[str, str]

    finished: bool = False

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        tool_functions(cls)

    def reset(self, task: TaskT) -> Opening | Awaitable[Opening]:
        """Make the world of this task and return how the conversation starts."""
        raise NotImplementedError

    def reward(self, episode: Episode) -> Score | Awaitable[Score]:
        """Score the finished episode: a finite number, or a mapping of metrics with "reward".

        In place of "reward" it may have "turns", one number for each of `episode.turns`: the reward is
        their sum.
        """
        raise NotImplementedError

    def close(self) -> Awaitable[None] | None:
        """Give back what the environment itself opened; the sandbox is not its concern."""

    def save(self) -> JsonValue | Awaitable[JsonValue]:
        """What `resume` needs to go on elsewhere, should this process die, besides the sandbox as it is now.

        Asked for between calls, while the sandbox rests in a snapshot.  As it stands here it is for
        environments that have all their state in the sandbox: one that has attributes of its own is not
        resumed.  Raise Unsupported, with the reason, for a state that cannot be saved.
        """
        if own := sorted(vars(self).keys() - _BOUND):
            raise Unsupported(
                f"{type(self).__name__} keeps {', '.join(own)} outside of its sandbox; write `save` and "
                "`resume` for that"
            )
        return None

    def resume(self, state: JsonValue) -> Awaitable[None] | None:
        """Go on from what `save` returned, in place of `reset`: a new instance, with task and sandbox."""

    def finish(self) -> None:
        """Say, within a tool, that the task is over after it."""
        self.finished = True

    @classmethod
    def demonstrate(cls, task: TaskT, rng: random.Random) -> list[Message]:
        """A scripted expert's whole conversation on this task, for a warm start.  Optional."""
        raise ConfigError(f"{cls.__name__} has no `demonstrate`; a warm start on demonstrations needs it")


def bind(
    environment: Environment[Any],
    task: BaseModel,
    seed: int,
    secrets: Mapping[str, str],
    sandbox: Sandbox | None,
) -> None:
    """Give a new instance what it has from `reset` on."""
    environment.task = task
    environment.seed = seed
    environment.secrets = secrets
    if sandbox is not None:
        lend(environment, sandbox)


def tool_functions(cls: type[Environment[Any]]) -> dict[str, tuple[str | None, Callable[..., Any]]]:
    """By tool name: the attribute it is reached by (None for a plain function) and the function.

    ConfigError when two tools have one name.
    """
    found: dict[str, tuple[str | None, Callable[..., Any]]] = {}
    attributes = dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base))
    methods = [(name, getattr(cls, name, None)) for name in attributes]
    for attribute, function in [*methods, *((None, function) for function in cls.tools)]:
        options = options_of(function)
        if options is None or function is None:
            continue
        if options.name in found:
            first = found[options.name][0] or "a plain function"
            raise ConfigError(
                f"{cls.__name__}: two tools are called {options.name!r}: {first} and "
                f"{attribute or 'a plain function'}; rename one with @tool(name=...)"
            )
        found[options.name] = (attribute, function)
    # The order of definition: a class that travelled by value has its attributes in another one.
    return dict(sorted(found.items(), key=lambda item: place_of(item[1][1])))
