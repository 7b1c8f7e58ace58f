"""A command line as an agent: it runs in its program's sandbox, and the gateway is its only network.

mini = so.command_agent(
    ["mini", "-t", "{problem}"], reward=tests_pass, sandbox=so.SandboxSpec(image="mini:latest")
)
"""

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from types import FunctionType
from typing import Any, cast

from pydantic import BaseModel

from sostenuto.envs.agent import Agent, agent, task_type_of
from sostenuto.envs.declaration import AUTHOR_FILE
from sostenuto.envs.environment import Score
from sostenuto.envs.occupancy import run_author_code
from sostenuto.envs.workspace import SandboxSpec, Workspace
from sostenuto.errors import ConfigError, EnvironmentFailure
from sostenuto.sandbox.protocol import ShellResult
from sostenuto.tools.wire import GATEWAY

_LONGEST_S = 7 * 24 * 3600.0
"""Its deadline is that of its program, which is kept elsewhere."""
_TAIL = 400
_NOT_RUN = {126, 127}
_FIELD = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
_THROUGH_PROXY = dict.fromkeys(("no_proxy", "NO_PROXY"), "")
"""The gateway's address is often 127.0.0.1, which is the sandbox itself where no proxy is asked."""

_REMEDY = "write `async def reward(task: YourTask, *, sandbox, result) -> float`"

Check = Callable[..., Score | Awaitable[Score]]
"""`(task, *, sandbox, result)`: the Workspace as the command left it, and its ShellResult."""


def command_agent(
    command: Sequence[str],
    *,
    reward: Check,
    sandbox: SandboxSpec | None = None,
    name: str = "",
    output_bytes: int = 1 << 20,
) -> type[Agent[Any]]:
    """Make of a command what a job takes as its `env`.

    `{field}` in a word of `command` stands for that field of the task, whose type is the annotation of
    `reward`'s first parameter.  It finds its model in OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and
    ANTHROPIC_API_KEY.  `name`: in errors; empty: the first word.  ConfigError for what cannot run.
    """
    if isinstance(command, str) or not command:
        raise ConfigError(f"command_agent: command is {command!r:.80}; give a sequence of words")
    name = name or re.sub(r"\W", "_", command[0].rpartition("/")[2])
    if not isinstance(reward, FunctionType):
        raise ConfigError(f"command_agent: reward is {reward!r:.80}; give a function, and {_REMEDY}")
    task_type = task_type_of(reward, "command_agent: reward", _REMEDY)
    _check_fields(command, task_type)
    words = tuple(command)

    async def run(task: BaseModel, *, base_url: str, api_key: str, sandbox: Workspace) -> Score:
        result = await sandbox.exec(
            ["env", *_variables(base_url, api_key), *(_filled(word, task) for word in words)],
            timeout_s=_LONGEST_S,
            output_bytes=output_bytes,
        )
        _check_that_it_ran(words[0], result)
        return cast("Score", await run_author_code(partial(reward, task, sandbox=sandbox, result=result)))

    run.__name__ = name
    run.__annotations__["task"] = task_type
    made = agent(run, sandbox=_with_gateway(sandbox or SandboxSpec()))
    setattr(made, AUTHOR_FILE, reward.__code__.co_filename)
    return made


def _with_gateway(spec: SandboxSpec) -> SandboxSpec:
    return replace(spec, network=(*spec.network, GATEWAY), environment={**_THROUGH_PROXY, **spec.environment})


def _check_fields(command: Sequence[str], task_type: type[BaseModel]) -> None:
    known = task_type.model_fields
    for word in command:
        for field in _FIELD.findall(word):
            if field not in known:
                raise ConfigError(
                    f"command_agent: {word!r} names {field!r}; the fields of {task_type.__name__} are "
                    f"{', '.join(known)}"
                )


def _filled(word: str, task: BaseModel) -> str:
    return _FIELD.sub(lambda field: str(getattr(task, field[1])), word)


def _variables(base_url: str, api_key: str) -> list[str]:
    values = {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_BASE": base_url,
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": api_key,
    }
    return [f"{variable}={value}" for variable, value in values.items()]


def _check_that_it_ran(word: str, result: ShellResult) -> None:
    if result.exit_code in _NOT_RUN:
        raise EnvironmentFailure(f"{word} cannot be run in the sandbox: {result.output[-_TAIL:].strip()}")
