"""One worker, as the tool server uses it: `tools.host.Host` over a socket to a process.

- Everything asked of the worker has a deadline.  The worker keeps it for async code; when nothing has
  come a grace later, the worker is ended, and what kept it busy is the environment's failure.
- A worker that ended, for whatever reason, fails everything it was asked and is never used again.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from logging import getLogger
from time import monotonic
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import msgspec
from anyio.abc import TaskGroup, TaskStatus
from pydantic import TypeAdapter
from pydantic_core import to_json

from sostenuto.envs.bounding import Bounding
from sostenuto.envs.flights import Flight, Flights
from sostenuto.envs.frames import (
    Call,
    Cancel,
    Channel,
    Declared,
    Hello,
    Load,
    Ping,
    Prepare,
    Release,
    Request,
    Save,
    Score,
)
from sostenuto.envs.lending import Lending
from sostenuto.envs.opening import encodable
from sostenuto.envs.process import WorkerProcess
from sostenuto.envs.program import CLOSE_S, SETTLE_S
from sostenuto.envs.verdict import Verdict
from sostenuto.errors import ConfigError, EnvironmentFailure, ProgramError, ToolServerError
from sostenuto.sandbox.protocol import Sandbox
from sostenuto.tools.host import EnvironmentFacts
from sostenuto.tools.remote.declared import Remote
from sostenuto.tools.wire import (
    CallRequest,
    EnvironmentRef,
    Prepared,
    PrepareRequest,
    Reward,
    RewardRequest,
    ToolSchema,
)
from sostenuto.types import Message, ProgramId, ToolResult

log = getLogger(__name__)

PING_S = 1.0
"""A loop that does not answer within this is stuck."""
UNKNOWN_TOOL_S = 30.0

T = TypeVar("T")

_TOOLS = TypeAdapter(tuple[ToolSchema, ...])
_REMOTE = TypeAdapter(tuple[Remote, ...])
_DECLARED = msgspec.msgpack.Decoder(Declared)
_MESSAGES = msgspec.msgpack.Decoder(tuple[Message, ...])
_RESULT = msgspec.msgpack.Decoder(ToolResult)
_VERDICT = msgspec.msgpack.Decoder(Verdict)
_TEXT = msgspec.msgpack.Decoder(str)
_STATE = msgspec.msgpack.Decoder(bytes)
_NONE = msgspec.msgpack.Decoder(type(None))


@dataclass(frozen=True, slots=True)
class HostConfig:
    """What every worker of a pool is told."""

    secrets: dict[str, str] = field(repr=False)
    redact: Callable[[str], str]
    import_paths: list[str]
    grace_s: float
    load_s: float


@dataclass(frozen=True, slots=True)
class Loaded:
    """A class that the worker has."""

    index: int
    name: str
    facts: EnvironmentFacts
    tools: dict[str, ToolSchema]
    blocking: frozenset[str]
    """Names of tools and steps that run in threads."""


class WorkerHost:
    """Lives while its `run` does; `alive` turns False at the first sign of its end."""

    def __init__(self, worker: WorkerProcess, config: HostConfig, bounding: Bounding) -> None:
        self._worker = worker
        self._config = config
        self._bounding = bounding
        self._loaded: dict[tuple[str | None, str | None, bytes], Loaded] = {}
        self._loading = anyio.Lock()
        self._programs: dict[ProgramId, Loaded] = {}
        self._culprit: Flight | None = None
        self._excess: ProgramError | None = None
        """Set once the worker has used more memory than it may."""
        self._to_start = asyncio.Queue[tuple[Callable[..., Coroutine[Any, Any, None]], tuple[object, ...]]]()
        self._flights = Flights(config.grace_s, lambda flight: self._start_soon(self._overdue, flight))
        self._channel = Channel(self._receive, self._flights.settle, self._lost)
        self._lending = Lending(self._channel, self._start_soon)
        self.alive = True

    @property
    def load(self) -> int:
        """Programs that it holds."""
        return len(self._programs)

    @property
    def pid(self) -> int:
        return self._worker.pid

    async def describe(self, environment: EnvironmentRef) -> EnvironmentFacts:
        """What the class declares, read in the worker."""
        return (await self._load(environment)).facts

    async def prepare(
        self,
        program_id: ProgramId,
        request: PrepareRequest,
        sandbox: Sandbox | None,
        *,
        state: bytes | None = None,
    ) -> Prepared:
        """Make the program's environment and run its `reset` or `resume`, or leave nothing of it behind."""
        started_s = monotonic()
        loaded = await self._load(request.environment)
        if loaded.facts.blueprint is not None and sandbox is None:
            raise ConfigError(f"environment {loaded.name} declares a sandbox, and none was lent to it")
        if program_id in self._programs:
            raise ToolServerError(f"program {program_id} is here already; release it first")
        self._programs[program_id] = loaded
        if sandbox is not None:
            self._lending.lend(program_id, sandbox)
        try:
            messages = await self._begin(program_id, request, loaded, sandbox is not None, state)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.release(program_id)
            raise
        return Prepared(messages=messages, tools=loaded.facts.tools, elapsed_s=monotonic() - started_s)

    async def save(self, program_id: ProgramId) -> bytes:
        """What its environment resumes from in another worker; Unsupported when it says that it cannot."""
        loaded = self._of(program_id)
        frame = Save(self._channel.next_id(), program_id, CLOSE_S)
        flight = self._step(frame.id, program_id, "save", loaded, CLOSE_S)
        return await self._ask(frame, flight, _STATE)

    async def call(self, program_id: ProgramId, request: CallRequest) -> ToolResult:
        """Run one tool.  EnvironmentFailure when it could not be ended but with its worker."""
        loaded = self._of(program_id)
        name, arguments = encodable(request.name), encodable(request.arguments)
        tool = loaded.tools.get(name)
        frame = Call(self._channel.next_id(), program_id, name, arguments)
        flight = Flight(
            frame.id,
            program_id,
            f"tool {name} of {loaded.name}",
            tool.timeout_s if tool else UNKNOWN_TOOL_S,
            blocking=name in loaded.blocking,
            serial=tool.serial if tool else False,
        )
        return await self._ask(frame, flight, _RESULT)

    async def reward(self, program_id: ProgramId, request: RewardRequest) -> Reward:
        """Score the episode, or raise EnvironmentFailure."""
        started_s = monotonic()
        loaded = self._of(program_id)
        frame = Score(self._channel.next_id(), program_id, request.episode, request.timeout_s)
        flight = self._step(frame.id, program_id, "reward", loaded, request.timeout_s)
        verdict = await self._ask(frame, flight, _VERDICT)
        return Reward(
            value=verdict.value,
            metrics=verdict.metrics,
            turns=verdict.turns,
            elapsed_s=monotonic() - started_s,
        )

    async def release(self, program_id: ProgramId) -> None:
        """Close the program's environment and forget it.

        What `close` raises is logged: the program's outcome stands, and the next step of its release follows.
        """
        loaded = self._programs.pop(program_id, None)
        if loaded is None:
            return
        frame = Release(self._channel.next_id(), program_id)
        flight = self._step(frame.id, program_id, "close", loaded, CLOSE_S + SETTLE_S)
        try:
            wrong = await self._ask(frame, flight, _TEXT) if self.alive else ""
        except (EnvironmentFailure, ToolServerError) as error:
            wrong = str(error)
        finally:
            self._lending.take_back(program_id)
        if wrong:
            log.warning("%s", wrong)

    async def run(self, *, task_status: TaskStatus[None]) -> None:
        """Connect and watch the process until it ends; being cancelled ends it."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._worker.follow, self._config.redact)
            group.start_soon(self._start_tasks, group)
            group.start_soon(self._watch_memory)
            try:
                await self._connect()
                task_status.started()
                await self._worker.process.wait()
            finally:
                with anyio.CancelScope(shield=True):
                    await self._bury()
                group.cancel_scope.cancel()

    def _start_soon(self, function: Callable[..., Coroutine[Any, Any, None]], *arguments: object) -> None:
        """Start a task from a callback of the loop, where anyio starts none."""
        self._to_start.put_nowait((function, arguments))

    async def _start_tasks(self, group: TaskGroup) -> None:
        while True:
            function, arguments = await self._to_start.get()
            group.start_soon(function, *arguments)

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self._channel, sock=self._worker.connection)
        config = self._config
        self._channel.send(Hello(self._channel.next_id(), config.secrets, config.import_paths))

    async def _watch_memory(self) -> None:
        if self._bounding.memory_bytes is not None:
            await self._bounding.until_exceeded(self.pid)
            self._blame_memory()
            self._lost()

    def _blame_memory(self) -> None:
        """The environment's failure where only one is here; whose it is among several cannot be told."""
        names = {loaded.name for loaded in self._programs.values()}
        alone = len(names) + self._loading.locked() <= 1
        kind = EnvironmentFailure if alone else ToolServerError
        what = f"environment {', '.join(sorted(names))}" if names else "the environment"
        self._excess = kind(f"{what} used more than {self._bounding.memory_bytes} bytes of memory")

    async def _bury(self) -> None:
        """End the process group, fail what was under way, give back what was lent."""
        self.alive = False
        self._worker.kill()
        await self._worker.process.wait()
        if self._excess is None and self._bounding.is_exceeded(self.pid):
            self._blame_memory()
        await anyio.to_thread.run_sync(self._bounding.remove)
        # What it wrote last is on its way through the pipe.
        await anyio.sleep(0.05)
        self._channel.fail_waiting(self._why)
        self._lending.take_back_all()
        self._channel.close()
        await self._worker.process.aclose()

    def _why(self, flight_id: int) -> Exception:
        """What became of one request when the worker ended."""
        what = self._flights.describe(flight_id)
        if self._excess is not None:
            return type(self._excess)(f"{what}: {self._excess}")
        if self._culprit is not None and self._culprit.id == flight_id:
            return EnvironmentFailure(
                f"{what}: {self._overrun(self._culprit)}, and nothing but the end of its worker stops it; "
                "bound what it waits for"
            )
        return ToolServerError(f"{what}: {self._ending()}")

    def _ending(self) -> str:
        if self._excess is not None:
            return str(self._excess)
        if self._culprit is None:
            return f"the worker ended: {self._worker.epitaph()}"
        overrun = self._overrun(self._culprit)
        return f"the worker was ended for a neighbour: {self._culprit} was {overrun}"

    def _overrun(self, culprit: Flight) -> str:
        return f"still running {self._config.grace_s:g} s after its limit of {culprit.limit_s:g} s"

    def _lost(self) -> None:
        self.alive = False
        self._worker.kill()

    def _receive(self, frame: Request | Cancel) -> None:
        self._lending.receive(frame)

    async def _overdue(self, flight: Flight) -> None:
        """Decide what to do about a request whose time and grace are over."""
        turns = await self._turns()
        if flight not in self._flights or not self.alive:
            return
        page = self._worker.page
        if not turns and not self._flights.is_suspect(flight, running=page.running, begun=page.begun):
            flight.stalled = True
            self._flights.arm(flight)
        elif turns and flight.stalled:
            # Its turn came late, by no fault of its own: it has its full time again.
            flight.stalled = False
            self._flights.arm(flight)
        else:
            self._culprit = flight
            self.alive = False
            self._worker.kill()

    async def _turns(self) -> bool:
        """Whether the worker's loop turns."""
        with anyio.move_on_after(PING_S):
            try:
                await self._channel.ask(Ping(self._channel.next_id()), _NONE)
            except ToolServerError:
                return False
            return True
        return False

    async def _load(self, ref: EnvironmentRef) -> Loaded:
        key = (ref.import_path, ref.pickled, to_json(ref.options))
        if key in self._loaded:
            return self._loaded[key]
        async with self._loading:
            if key not in self._loaded:
                self._loaded[key] = await self._load_new(ref, len(self._loaded))
            return self._loaded[key]

    async def _load_new(self, ref: EnvironmentRef, index: int) -> Loaded:
        frame = Load(self._channel.next_id(), index, ref.model_dump_json().encode())
        flight = Flight(frame.id, "", f"loading environment {ref.name}", self._config.load_s, blocking=True)
        declared = await self._ask(frame, flight, _DECLARED)
        tools = _TOOLS.validate_json(declared.tools_json)
        remote = _REMOTE.validate_json(declared.remote_json)
        facts = EnvironmentFacts(declared.blueprint, tools, remote, declared.setup)
        return Loaded(index, ref.name, facts, {t.name: t for t in tools}, frozenset(declared.blocking))

    async def _begin(
        self,
        program_id: ProgramId,
        request: PrepareRequest,
        loaded: Loaded,
        has_sandbox: bool,
        state: bytes | None,
    ) -> tuple[Message, ...]:
        frame = Prepare(
            self._channel.next_id(), program_id, loaded.index, to_json(request.task),
            request.seed, request.timeout_s, has_sandbox, state,
        )  # fmt: skip
        name = "reset" if state is None else "resume"
        flight = self._step(frame.id, program_id, name, loaded, request.timeout_s)
        return await self._ask(frame, flight, _MESSAGES)

    def _step(
        self, flight_id: int, program_id: ProgramId, name: str, loaded: Loaded, limit_s: float
    ) -> Flight:
        blocking = name in loaded.blocking
        return Flight(flight_id, program_id, f"{name} of {loaded.name}", limit_s, blocking)

    async def _ask(self, frame: Request, flight: Flight, decoder: msgspec.msgpack.Decoder[T]) -> T:
        if not self.alive:
            kind = type(self._excess) if self._excess else ToolServerError
            raise kind(f"{flight}: {self._ending()}")
        future = self._channel.post(frame)
        self._flights.add(flight)
        return await self._channel.answer(frame.id, future, decoder)

    def _of(self, program_id: ProgramId) -> Loaded:
        try:
            return self._programs[program_id]
        except KeyError:
            raise ToolServerError(f"program {program_id} is not in this worker; prepare it first") from None
