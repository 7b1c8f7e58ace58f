"""The shell around the scheduler: it owns the I/O and takes no decisions.

Invariants:
- The scheduler hears of an event here and nowhere else, one at a time, with the loop's clock.
- Every action is carried out by a task of the dispatcher's own group: when `open_dispatcher` is left,
  nothing of it is running.
- A program that leaves `run`, however, holds nothing: no KV, no environment, no place in the scheduler.
- An engine that dies takes no program with it: the scheduler places those again, with the same tokens.
"""

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import anyio
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from sostenuto.errors import EngineError, InvalidTransition, ProgramError, boundary
from sostenuto.records import Trajectory, validate
from sostenuto.runtime.drive import Drive, Grant, Surroundings
from sostenuto.runtime.engines.protocol import Engine
from sostenuto.runtime.engines.wire import Capabilities
from sostenuto.runtime.fleet import Fleet
from sostenuto.runtime.program import ProgramSpec, Timeouts, ToolServer
from sostenuto.runtime.publishing import Publication, Publishing, UpdatePolicy
from sostenuto.runtime.rendering.renderer import Renderer
from sostenuto.runtime.tool_pace import ToolPace
from sostenuto.scheduler.actions import (
    Action,
    Decode,
    Event,
    Evict,
    Expire,
    Finished,
    MoveSandbox,
    Offload,
    Prepare,
    Refuse,
    Submitted,
    Tick,
    TurnAway,
)
from sostenuto.scheduler.frame import Frame, SchedulerSettings
from sostenuto.scheduler.scheduler import Scheduler
from sostenuto.trainer.publication.manifest import Manifest
from sostenuto.types import EngineId, Outcome, OutcomeKind, ProgramId, StopReason, Version


@dataclass(slots=True)
class _Seat:
    """How the dispatcher reaches a program."""

    grants: MemoryObjectSendStream[Grant]
    scope: anyio.CancelScope


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
        self._fleet = Fleet(engines, self._feed, answer_s=timeouts.engine_answer_s)
        self._timeouts = timeouts
        self._running = running
        self._seats: dict[ProgramId, _Seat] = {}
        self._publishing = Publishing(engines, update, self._feed, running)
        self._wake = anyio.Event()
        self._around = Surroundings(
            tools=tools,
            renderer=renderer,
            generate=self._fleet.generate,
            release=self._fleet.release,
            context_tokens=lambda: self._fleet.context_tokens,
            report=self._feed,
            timeouts=timeouts,
            pace=ToolPace(),
        )

    def __repr__(self) -> str:
        return f"<Dispatcher {len(self._seats)} programs, {self.scheduler!r}>"

    @property
    def version(self) -> Version:
        """What is deployed."""
        deployed = self.scheduler.gate.deployed
        assert deployed is not None, "open_dispatcher joins the engines first"
        return deployed

    async def run(self, spec: ProgramSpec) -> Trajectory:
        """Drive one program to its end.  Its failure is the outcome of the record, not an exception."""
        send, receive = anyio.create_memory_object_stream[Grant](8)
        drive = Drive(spec, self._around, lambda: _newest(receive))
        with send, receive, anyio.CancelScope() as scope:
            try:
                self._seats[spec.id] = _Seat(send, scope)
                self._feed(_submitted(spec, self._lease_s(spec)))
                return await _finish(drive)
            finally:
                await drive.close()
                del self._seats[spec.id]
                self._feed(Finished(spec.id))
        reason = f"nothing was heard of it for {self._lease_s(spec):.0f} s"
        return _failed(drive, EngineError(reason))

    async def publish(self, manifest: Manifest) -> Publication:
        """Bring a version to every engine and open it; EngineError when none could take it.

        Decoding goes on until the swap.  An engine that fails serves nothing until the next version.
        """
        return await self._publishing.publish(manifest)

    async def join(self, engine_id: EngineId) -> Capabilities:
        """Take an engine into the fleet as it is; also one that was lost and is back.

        EngineError when it does not answer, or serves an older version than the deployed one.
        """
        return await self._fleet.join(engine_id, deployed=self.scheduler.gate.deployed)

    async def keep_informed(self) -> None:
        """Tell the scheduler now and then what the engines say of themselves."""
        await self._fleet.keep_polling()

    async def keep_time(self) -> None:
        """Tell the scheduler of time passing when it asked to be told."""
        while True:
            wake_s = self.scheduler.wake_at_s()
            with anyio.move_on_at(wake_s if wake_s is not None else float("inf")):
                await self._wake.wait()
                self._wake = anyio.Event()
                continue
            self._feed(Tick())

    def _lease_s(self, spec: ProgramSpec) -> float:
        # Every part of a program has a deadline of its own; the lease ends after all of them.
        t = self._timeouts
        return spec.limits.wall_s + t.prepare_s + t.reward_s + t.call_margin_s + t.release_s

    def _feed(self, event: Event) -> None:
        for action in self.scheduler.apply(event, anyio.current_time()):
            self._start(action)
        self._wake.set()

    def _start(self, action: Action) -> None:
        match action:
            case Prepare() | Decode() | Refuse() | TurnAway():
                self._seats[action.program_id].grants.send_nowait(action)
            case Evict(program_id, engine_id):
                self._running.start_soon(self._fleet.release, engine_id, program_id)
            case Expire(program_id):
                self._seats[program_id].scope.cancel()
            case Offload() | MoveSandbox():
                # Asked for only of an engine with a lower tier and of a tool server with stated limits.
                raise InvalidTransition(f"nothing here can carry out {action}")
            case _:
                self._publishing.start(action)


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
        yield dispatcher
        running.cancel_scope.cancel()


async def _newest(grants: MemoryObjectReceiveStream[Grant]) -> Grant:
    """The scheduler's last word: what it said before the loss of an engine does not count any more."""
    grant = await grants.receive()
    while grants.statistics().current_buffer_used:
        grant = grants.receive_nowait()
    return grant


def _submitted(spec: ProgramSpec, lease_s: float) -> Submitted:
    return Submitted(
        spec.id,
        lease_s,
        group=spec.group_id,
        group_size=spec.group_size,
        trainable_until=spec.trainable_until,
    )


async def _finish(drive: Drive) -> Trajectory:
    """The program's record, with the outcome FAILED when one of its parts failed."""
    try:
        trajectory = await drive.run()
        with boundary(EngineError, "the record is refused"):
            validate(trajectory)
    except ProgramError as error:
        return _failed(drive, error)
    return trajectory


def _failed(drive: Drive, error: ProgramError) -> Trajectory:
    outcome = Outcome(OutcomeKind.FAILED, str(error), error.blame)
    return replace(drive.record(StopReason.FAILED), outcome=outcome)
