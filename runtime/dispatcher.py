"""The shell around the scheduler: it owns the I/O and takes no decisions.

Invariants:
- The scheduler hears of an event here and nowhere else, one at a time, with the loop's clock.
- Every action is carried out by a task of the dispatcher's own group: when `open_dispatcher` is left,
  nothing of it is running.
- A program that leaves `run`, however, holds nothing: no KV, no environment, no place in the scheduler.
- An engine that dies takes no program with it: the scheduler places those again, with the same tokens.
"""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import anyio
from anyio.abc import TaskGroup

from sostenuto.errors import EngineError, SostenutoError
from sostenuto.records import Trajectory
from sostenuto.runtime.drive import Surroundings
from sostenuto.runtime.engines.protocol import Engine
from sostenuto.runtime.engines.wire import Capabilities
from sostenuto.runtime.fleet import Fleet, Trouble
from sostenuto.runtime.passage import STALE, drive_for, failed, finish, lease_s_of, stale, submitted_for
from sostenuto.runtime.place import Mail, Place
from sostenuto.runtime.program import ProgramSpec, Timeouts, ToolServer
from sostenuto.runtime.prompts import Prompts
from sostenuto.runtime.publishing import Publication, Publishing, UpdatePolicy
from sostenuto.runtime.rendering.renderer import Renderer
from sostenuto.runtime.turn_stream import TurnSpans
from sostenuto.scheduler.actions import (
    Action,
    Decode,
    EndStale,
    Evict,
    Expire,
    MoveSandbox,
    Offload,
    PaceAction,
    Prepare,
    Probe,
    Recovered,
    Refuse,
    Slowed,
    TurnAway,
    Unserved,
)
from sostenuto.scheduler.events import (
    EngineDraining,
    Event,
    Finished,
    SandboxMoved,
    Submitted,
    Tick,
    ToolServerJoined,
)
from sostenuto.scheduler.frame import Frame
from sostenuto.scheduler.scheduler import Scheduler
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.trainer.publication.manifest import Manifest
from sostenuto.types import EngineId, ProgramId, SandboxRung, Version

_log = logging.getLogger(__name__)


_SILENT = "nothing was heard of it"
_NO_ENGINE = "no engine is left, and none has come back in time"


@dataclass(slots=True)
class _Seat:
    """How the dispatcher reaches a program."""

    mail: Mail
    end: Callable[[str], None]
    """With the reason."""


class Dispatcher:
    """Use `open_dispatcher`."""

    def __init__(
        self,
        policy: Frame,
        engines: Mapping[EngineId, Engine],
        tools: ToolServer,
        renderer: Renderer,
        *,
        timeouts: Timeouts,
        update: UpdatePolicy,
        running: TaskGroup,
    ) -> None:
        self.scheduler = policy
        known = dict(engines)
        self.fleet = Fleet(
            known,
            self._feed,
            answer_s=timeouts.engine_answer_s,
            deserted=self._expect_return,
            gate=policy.gate,
        )
        self._gave_up = ""
        """Why no program can go on; empty while some can."""
        self._timeouts = timeouts
        self._running = running
        self._seats: dict[ProgramId, _Seat] = {}
        self._publishing = Publishing(known, update, self._feed, running, self.fleet, policy.gate)
        self._emptying: dict[EngineId, anyio.Event] = {}
        """Engines on which nothing starts; set once nothing decodes there."""
        self._now_s = asyncio.get_running_loop().time
        self._sooner = anyio.Event()
        self._sleeps_until_s = math.inf
        self._prompts = Prompts()
        self.around = Surroundings(
            tools=tools,
            renderer=renderer,
            generate=self.fleet.generate,
            release=self.fleet.release,
            context_tokens=lambda: self.fleet.context_tokens,
            report=self._feed,
            now_s=self._now_s,
            timeouts=timeouts,
            prompts=self._prompts,
        )

    def __repr__(self) -> str:
        return f"<Dispatcher {len(self._seats)} programs, {self.scheduler!r}>"

    @property
    def version(self) -> Version:
        """What is deployed."""
        deployed = self.scheduler.gate.deployed
        assert deployed is not None, "open_dispatcher joins the engines first"
        return deployed

    async def run(self, spec: ProgramSpec, spans: TurnSpans | None = None) -> Trajectory:
        """Drive one program to its end.  Its failure is the outcome of the record, not an exception.

        `spans` is called with the tokens of each turn as they come, each of them once, whichever engines
        the turn is on.
        """
        mail = Mail()
        drive, reasons = drive_for(spec, self.around, mail, spans), list[str]()
        if self._gave_up:
            return failed(drive, EngineError(self._gave_up))
        with anyio.CancelScope() as scope:

            def end(reason: str) -> None:
                reasons.append(reason)
                scope.cancel()

            try:
                self._seats[spec.id] = _Seat(mail, end)
                entered = submitted_for(spec, lease_s_of(spec, self._timeouts))
                self._feed(replace(entered, may_be_ended=True))
                return await finish(drive)
            finally:
                await drive.close()
                del self._seats[spec.id]
                self._feed(Finished(spec.id))
        if reasons[:1] == [STALE]:
            return stale(drive)
        silent = f"{_SILENT} for {lease_s_of(spec, self._timeouts):.0f} s"
        return failed(drive, EngineError(self._gave_up or silent))

    def admit(self, submitted: Submitted, lost: Callable[[str], None]) -> Place:
        """Give a program that somebody else drives a place; EngineError when no engine will come back.

        Its first grant is Prepare, to be answered with Prepared.  `lost` is told why it has to be left.
        """
        if self._gave_up:
            raise EngineError(self._gave_up)
        if submitted.program_id in self._seats:
            raise ValueError(f"{submitted.program_id} has a place already")
        mail = Mail()

        def leave() -> None:
            del self._seats[submitted.program_id]
            self._feed(Finished(submitted.program_id))

        place = Place(submitted.program_id, self.around, mail, leave=leave, lost=lost)
        self._seats[submitted.program_id] = _Seat(mail, place.lose)
        self._feed(submitted)
        return place

    async def publish(self, manifest: Manifest) -> Publication:
        """Bring a version to every engine and open it; EngineError when none could take it.

        Decoding goes on until the swap.  An engine that fails serves nothing until the next version.
        """
        return await self._publishing.publish(manifest)

    # ---- engines come and go ----

    @property
    def deployed(self) -> Version | None:
        """None before the first engine has joined."""
        return self.scheduler.gate.deployed

    @property
    def manifest(self) -> Manifest | None:
        """Of the deployed version; None while that is what engines are started with."""
        return self._publishing.manifest

    async def join(self, engine_id: EngineId, engine: Engine | None = None) -> Capabilities:
        """Take an engine into the fleet as it is; also one that was lost and is back.

        EngineError when it does not answer, or serves an older version than the deployed one.
        """
        facts = await self.fleet.join(engine_id, engine)
        self._prompts.joined(engine_id, facts)
        self._gave_up = ""
        return facts

    def serves(self, engine_id: EngineId) -> Version | None:
        """The verified version of an engine; None while it has none, or is not in the fleet."""
        return self.scheduler.gate.version(engine_id)

    async def until_troubled(self, engine_id: EngineId) -> Trouble:
        """Wait until the engine is lost, or has failed a publication and no later one has brought it back."""
        while True:
            trouble = await self.fleet.until_troubled(engine_id)
            if not trouble.is_lost:
                await self._publishing.settled()
                if self.serves(engine_id) is not None:
                    self.fleet.recovered(engine_id)
                    continue
            return trouble

    async def leave(self, engine_id: EngineId, reason: str, *, within_s: float) -> None:
        """Let the engine go: nothing new starts there, what runs may end within the deadline.

        Programs that still decode then go on elsewhere, with the tokens that they had before that turn.
        """
        if self.fleet.seen(engine_id) is None:
            return
        self._emptying[engine_id] = emptied = anyio.Event()
        try:
            self._feed(EngineDraining(engine_id, reason))
            with anyio.move_on_after(within_s):
                await emptied.wait()
        finally:
            del self._emptying[engine_id]
            self.fleet.lose(engine_id, reason)

    def give_up(self, reason: str) -> None:
        """No engine will come back: end every program, and whatever is submitted before one joins."""
        self._gave_up = reason
        for seat in list(self._seats.values()):
            seat.end(reason)

    def limit(self, sandboxes: ToolServerJoined) -> None:
        """What the tool server can give to sandboxes together; until this is told they are not limited."""
        self._feed(sandboxes)

    async def _move_sandbox(self, program_id: ProgramId, rung: SandboxRung) -> None:
        try:
            moved = await self.around.tools.move(program_id, rung)
        except SostenutoError as error:
            # Whoever uses the sandbox next is told by that what became of it.
            _log.warning("sandbox of %s, on its way to %s: %s", program_id, rung, error)
        else:
            self._feed(SandboxMoved(program_id, moved.rung, moved.elapsed_s))

    def _expect_return(self, lost: str) -> None:
        self._running.start_soon(self._give_up_engines, lost)

    async def _give_up_engines(self, lost: str) -> None:
        """End every program when no engine has come back in time."""
        await anyio.sleep(self._timeouts.engine_return_s)
        if not len(self.fleet):
            self.give_up(f"{_NO_ENGINE}; {lost}")

    async def keep_informed(self) -> None:
        """Tell the scheduler now and then what the engines say of themselves."""
        await self.fleet.keep_polling()

    async def keep_time(self) -> None:
        """Tell the scheduler of time passing when it asked to be told.

        An event that leaves it less to wait for wakes this only when the time comes to look again.
        """
        while True:
            self._sooner, self._sleeps_until_s = anyio.Event(), self._wake_at_s()
            with anyio.move_on_at(self._sleeps_until_s):
                await self._sooner.wait()
            if self._wake_at_s() <= self._now_s():
                self._feed(Tick())

    def _wake_at_s(self) -> float:
        wake_s = self.scheduler.wake_at_s()
        return math.inf if wake_s is None else wake_s

    def _feed(self, event: Event) -> None:
        for action in self.scheduler.apply(event, self._now_s()):
            self._start(action)
        if self._wake_at_s() < self._sleeps_until_s:
            self._sooner.set()
        if self._emptying:
            self._tell_emptied()

    def _tell_emptied(self) -> None:
        decoding = self.scheduler.snapshot().engines
        for engine_id, emptied in self._emptying.items():
            if decoding.get(engine_id, (0, 0))[1] == 0:
                emptied.set()

    def _start(self, action: Action) -> None:
        match action:
            case Prepare() | Decode() | Refuse() | Unserved() | TurnAway():
                self._seats[action.program_id].mail.put(action)
            case Evict(program_id, engine_id):
                self._running.start_soon(self.fleet.release, engine_id, program_id)
            case Expire(program_id):
                self._seats[program_id].end(_SILENT)
            case EndStale(program_id):
                self._seats[program_id].end(STALE)
            case Probe() | Slowed() | Recovered():
                self._mind_pace(action)
            case MoveSandbox(program_id, rung):
                self._running.start_soon(self._move_sandbox, program_id, rung)
            case Offload(program_id, engine_id):
                self._running.start_soon(self.fleet.offload, engine_id, program_id)
            case _:
                self._publishing.start(action)

    def _mind_pace(self, action: PaceAction) -> None:
        if isinstance(action, Probe):
            self._running.start_soon(self.fleet.probe, action.engine_id)
        else:
            _log.warning("%s", action)


@asynccontextmanager
async def open_dispatcher(
    settings: SchedulerSettings,
    engines: Mapping[EngineId, Engine],
    tools: ToolServer,
    renderer: Renderer,
    *,
    timeouts: Timeouts | None = None,
    update: UpdatePolicy | None = None,
    policy: Frame | None = None,
) -> AsyncGenerator[Dispatcher]:
    """Join the engines and dispatch until the block is left; programs still running then are cancelled.

    `policy`: one that knows nothing yet, in place of ours with `settings`.
    """
    async with anyio.create_task_group() as running:
        dispatcher = Dispatcher(
            policy or Scheduler(settings),
            engines,
            tools,
            renderer,
            timeouts=timeouts or Timeouts(),
            update=update or UpdatePolicy(),
            running=running,
        )
        for engine_id in engines:
            await dispatcher.join(engine_id)
        running.start_soon(dispatcher.keep_time)
        running.start_soon(dispatcher.keep_informed)
        try:
            yield dispatcher
        finally:
            dispatcher.fleet.forget()
        running.cancel_scope.cancel()
