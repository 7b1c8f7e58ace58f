"""One program's environment, running in this process.

Its author's code raises, blocks and returns what it likes; what leaves here is a result, or a ProgramError
that says in which method and line it came up.  Async code runs in the loop and is cancelled at its
deadline; sync code runs in a thread, which cannot be cancelled: its result is then late, or never comes.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError, from_json, to_json

from sostenuto.envs.agent import Agent
from sostenuto.envs.blame import authored
from sostenuto.envs.declaration import DeclaredTool, author_file, declaration
from sostenuto.envs.environment import Environment, bind
from sostenuto.envs.occupancy import run_author_code, run_in_thread
from sostenuto.envs.opening import encodable, read_opening
from sostenuto.envs.registry import LoadedEnvironment
from sostenuto.envs.verdict import Verdict, read_verdict
from sostenuto.envs.workspace import ShellDeadline, deadline_s
from sostenuto.errors import EnvironmentFailure, ProgramError, ToolError, Unsupported, nearest
from sostenuto.sandbox.protocol import Sandbox
from sostenuto.tools.cut import cut_middle
from sostenuto.tools.schema import InvalidArguments
from sostenuto.types import Episode, Message, ToolResult, ToolStatus

CLOSE_S = 5.0
"""Given to an environment's `close`."""
STATE_BYTES = 1 << 20
"""The largest state that is saved."""
SETTLE_S = 1.0
"""How long a release waits for cancelled calls before it; a thread may go on after it."""


@dataclass(slots=True, eq=False)
class Program:
    """Its calls may run together, save those of serial tools.  `start` makes one."""

    id: str
    environment: Environment[Any]
    task_json: bytes
    _serial: anyio.Lock = field(default_factory=anyio.Lock)

    @property
    def tools(self) -> dict[str, DeclaredTool]:
        return declaration(type(self.environment)).tools

    async def reset(self, timeout_s: float) -> tuple[Message, ...]:
        """Run `reset`; what the conversation starts with."""
        returned = await self._step("reset", timeout_s, self.environment.task)
        return read_opening(returned, self.environment.system, self._doing("reset"))

    async def save(self, timeout_s: float) -> bytes:
        """JSON of what it resumes from; Unsupported, with the reason, when it does not."""
        saved = await self._step("save", timeout_s)
        task_type = declaration(type(self.environment)).task_type
        if self.environment.task != task_type.model_validate_json(self.task_json):
            raise Unsupported(f"{self._doing('save')}: its task was changed; keep that in the sandbox")
        try:
            state = to_json(saved)
        except PydanticSerializationError as error:
            raise Unsupported(f"{self._doing('save')}: no JSON carries what it returned: {error}") from error
        if len(state) > STATE_BYTES:
            raise Unsupported(f"{self._doing('save')}: {len(state)} bytes; {STATE_BYTES} are kept at most")
        return state

    async def resume(self, state_json: bytes, timeout_s: float) -> None:
        """Run `resume` with what was saved."""
        await self._step("resume", timeout_s, from_json(state_json))

    async def call(self, name: str, arguments: str) -> ToolResult:
        """Run one tool; whatever comes of it is in the result."""
        declared = self.tools.get(name)
        if declared is None:
            hint = nearest(name, list(self.tools))
            return ToolResult(ToolStatus.INVALID_ARGUMENTS, encodable(f"there is no tool {name!r}; {hint}"))
        keywords = declared.tool.read_arguments(arguments)
        if isinstance(keywords, InvalidArguments):
            return ToolResult(ToolStatus.INVALID_ARGUMENTS, encodable(keywords.message))
        if not declared.tool.options.serial:
            return await self._timed(declared, keywords)
        async with self._serial:
            return await self._timed(declared, keywords)

    async def score(self, episode: Episode, timeout_s: float) -> Verdict:
        """Run `reward`, or raise the ProgramError of a score that does not come or is no finite number."""
        returned = await self._step("reward", timeout_s, episode)
        turns = None if isinstance(self.environment, Agent) else episode.turns
        return read_verdict(returned, self._doing("reward"), turns=turns)

    async def close(self) -> None:
        """Run `close` within CLOSE_S."""
        await self._step("close", CLOSE_S)

    async def _step(self, name: str, timeout_s: float, *arguments: object) -> object:
        with anyio.move_on_after(timeout_s) as scope, authored(self._doing(name), self._file()):
            returned = await run_author_code(getattr(self.environment, name), *arguments)
            if not scope.cancel_called:
                return returned
        raise EnvironmentFailure(f"{self._doing(name)}: took longer than {timeout_s:g} s")

    async def _timed(self, declared: DeclaredTool, keywords: dict[str, object]) -> ToolResult:
        options = declared.tool.options
        late = f"[{options.name} timed out after {options.timeout_s:g} s]"
        outcome = (ToolStatus.TIMEOUT, late)
        started_s = time.monotonic()
        token = deadline_s.set(started_s + options.timeout_s)
        try:
            with anyio.move_on_after(options.timeout_s) as scope:
                in_time = await self._outcome(declared, keywords, late)
                outcome = outcome if scope.cancel_called else in_time
        finally:
            deadline_s.reset(token)
        cut = cut_middle(encodable(outcome[1]), options.output_bytes)
        elapsed_s = time.monotonic() - started_s
        return ToolResult(outcome[0], cut.text, cut.cut_bytes, elapsed_s, self.environment.finished)

    async def _outcome(
        self, declared: DeclaredTool, keywords: dict[str, object], late: str
    ) -> tuple[ToolStatus, str]:
        doing = self._doing(f"tool {declared.tool.name}")
        try:
            with authored(doing, self._file(), tool=True):
                returned = await run_author_code(partial(declared.bound_to(self.environment), **keywords))
            return ToolStatus.OK, _text(returned, doing)
        except ToolError as error:
            return ToolStatus.TOOL_ERROR, str(error)
        except ShellDeadline as error:
            return ToolStatus.TIMEOUT, f"{error.output.rstrip()}\n{late}" if error.output else late
        except EnvironmentFailure as error:
            return ToolStatus.ENVIRONMENT_FAILURE, str(error)
        except ProgramError as error:
            return ToolStatus.INFRASTRUCTURE_FAILURE, str(error)

    def _doing(self, what: str) -> str:
        if what == "reward" and isinstance(self.environment, Agent):
            what = "run"
        return f"program {self.id}: {what} of {type(self.environment).__name__}"

    def _file(self) -> str:
        return str(author_file(type(self.environment)))


async def start(
    program_id: str,
    loaded: LoadedEnvironment,
    task_json: bytes,
    *,
    seed: int,
    secrets: Mapping[str, str],
    sandbox: Sandbox | None,
) -> Program:
    """Make the environment of one program, or raise the EnvironmentFailure of its task or constructor."""
    doing = f"program {program_id}: making {loaded.cls.__name__}"
    task = _read_task(declaration(loaded.cls).task_type, task_json, doing)
    with authored(doing, str(author_file(loaded.cls))):
        # A constructor of the author's may block; the one of `object` does not.
        plain = loaded.cls.__init__ is object.__init__
        environment = loaded.make() if plain else await run_in_thread(loaded.make)
    bind(environment, task, seed, secrets, sandbox)
    return Program(program_id, environment, task_json)


def _read_task(task_type: type[BaseModel], task_json: bytes, doing: str) -> BaseModel:
    try:
        return task_type.model_validate_json(task_json)
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, item['loc'])) or 'task'}: {item['msg']}" for item in error.errors()[:5]
        )
        raise EnvironmentFailure(f"{doing}: the task is no {task_type.__name__}: {wrong}") from error


def _text(returned: object, doing: str) -> str:
    """What the policy reads: text as it is, nothing for None, JSON of anything else."""
    if isinstance(returned, str):
        return returned
    if returned is None:
        return ""
    try:
        return to_json(returned).decode()
    except PydanticSerializationError as error:
        raise EnvironmentFailure(
            f"{doing}: returned a {type(returned).__name__}, which JSON cannot carry; return a str"
        ) from error
