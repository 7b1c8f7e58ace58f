"""How a new version reaches the engines.  The gate in `scheduler/` decides; this carries it out."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import assert_never

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from sostenuto.errors import EngineError
from sostenuto.runtime.engines.protocol import Engine
from sostenuto.runtime.engines.wire import CommitReply, CommitRequest
from sostenuto.runtime.fleet import Fleet
from sostenuto.scheduler.actions import (
    CommitUpdate,
    Interrupt,
    Opened,
    PublicationFailed,
    Quarantine,
    StageUpdate,
    UpdateAction,
)
from sostenuto.scheduler.events import Event, PublicationBegun, UpdateCommitted, UpdateFailed, UpdateStaged
from sostenuto.scheduler.gate import EngineState, Gate
from sostenuto.scheduler.update_terms import DEFAULT, UpdateTerms
from sostenuto.trainer.publication.manifest import Manifest
from sostenuto.types import EngineId, ProgramId, Version

_AGAIN_S = 0.05
"""A request that had not reached its engine when it was interrupted is interrupted again after this."""


@dataclass(frozen=True, slots=True)
class UpdatePolicy:
    """What a dispatcher's publications do."""

    terms: UpdateTerms = DEFAULT
    stage_timeout_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Publication:
    """What publishing one version took."""

    version: Version
    stage_s: float
    """Copy and check beside the running weights."""
    pause_s: float
    """The longest that one engine stood still."""
    recomputed_requests: int
    dropped_programs: int


@dataclass(slots=True)
class _Pending:
    """The publication under way."""

    manifest: Manifest
    over: anyio.Event = field(default_factory=anyio.Event)
    failures: list[str] = field(default_factory=list[str])
    commits: list[CommitReply] = field(default_factory=list[CommitReply])
    opened: bool = False
    abandoned: bool = False
    """Who would carry it out is gone."""
    staged_s: float = 0.0


class Publishing:
    """One publication at a time.  Owned by the dispatcher."""

    def __init__(
        self,
        engines: Mapping[EngineId, Engine],
        policy: UpdatePolicy,
        feed: Callable[[Event], None],
        running: TaskGroup,
        fleet: Fleet,
        gate: Gate,
    ) -> None:
        self._engines = engines
        self._policy = policy
        self._feed = feed
        self._running = running
        self._fleet = fleet
        self._gate = gate
        self._staging: dict[EngineId, anyio.Lock] = {}
        self._pending: _Pending | None = None
        self.manifest: Manifest | None = None
        """Of what is deployed; None until something was published."""

    async def publish(self, manifest: Manifest) -> Publication:
        assert self._pending is None, "one publication at a time"
        version, pending = Version.parse(manifest.version), _Pending(manifest)
        self._pending, began_s = pending, anyio.current_time()
        # Half a publication helps nobody; each of its parts has a deadline.
        with anyio.CancelScope(shield=True):
            self._running.start_soon(self._watch, pending)
            self._feed(PublicationBegun(version, self._policy.terms))
            await pending.over.wait()
        self._pending = None
        if pending.abandoned:
            await anyio.lowlevel.checkpoint_if_cancelled()
        if not pending.opened:
            raise EngineError(f"version {version} could not be published: {'; '.join(pending.failures)}")
        return Publication(
            version=version,
            stage_s=pending.staged_s - began_s,
            pause_s=max((reply.pause_s for reply in pending.commits), default=0.0),
            recomputed_requests=sum(reply.recomputed_requests for reply in pending.commits),
            dropped_programs=sum(reply.dropped_programs for reply in pending.commits),
        )

    async def settled(self) -> None:
        """Return as soon as nothing is being published."""
        while (pending := self._pending) is not None:
            await pending.over.wait()
            await anyio.lowlevel.checkpoint()

    def start(self, action: UpdateAction) -> None:
        """Carry out what the gate asks for."""
        match action:
            case StageUpdate(engine_id, version):
                self._running.start_soon(self._stage, engine_id, version)
            case CommitUpdate():
                self._running.start_soon(self._commit, action)
            case Interrupt(engine_id):
                self._running.start_soon(self._interrupt, engine_id)
            case Opened() | PublicationFailed():
                self._conclude(opened=isinstance(action, Opened))
            case Quarantine(engine_id, reason):
                if self._pending:
                    self._pending.failures.append(f"{engine_id}: {reason}")
                self._fleet.quarantined(engine_id, reason)
            case _:
                assert_never(action)

    def _conclude(self, *, opened: bool) -> None:
        if self._pending:
            self._pending.opened = opened
            self.manifest = self._pending.manifest if opened else self.manifest
            self._pending.over.set()

    async def _watch(self, pending: _Pending) -> None:
        """When the dispatcher ends meanwhile, whoever waits for the publication is told."""
        try:
            await pending.over.wait()
        except anyio.get_cancelled_exc_class():
            if not pending.over.is_set():
                pending.abandoned = True
                pending.failures.append("the engines were let go meanwhile")
                pending.over.set()
            raise

    async def _stage(self, engine_id: EngineId, version: Version) -> None:
        pending = self._pending
        if pending is None:
            return
        try:
            # One that was late takes in what it had begun to its end before it takes in the next.
            async with self._staging.setdefault(engine_id, anyio.Lock()):
                if self._is_superseded(engine_id, version):
                    return
                with anyio.fail_after(self._policy.stage_timeout_s):
                    await self._engines[engine_id].prepare_update(pending.manifest)
        except (EngineError, TimeoutError) as error:
            reason = str(error) or f"staging took over {self._policy.stage_timeout_s:.0f} s"
            self._feed(UpdateFailed(engine_id, version, reason))
            return
        if self._pending:
            self._pending.staged_s = anyio.current_time()
        self._feed(UpdateStaged(engine_id, version))

    def _is_superseded(self, engine_id: EngineId, version: Version) -> bool:
        is_staging = self._gate.states().get(engine_id) is EngineState.STAGING
        return not is_staging or self._gate.publishing not in (None, version)

    async def _interrupt(self, engine_id: EngineId) -> None:
        """End what runs there, with the tokens it has, until nothing does or the swap begins."""
        engine = self._engines[engine_id]
        with suppress(EngineError):
            while self._gate.states().get(engine_id) is EngineState.FINISHING:
                for request_id in self._fleet.requests_on(engine_id):
                    await engine.abort(request_id)
                await anyio.sleep(_AGAIN_S)

    async def _commit(self, action: CommitUpdate) -> None:
        engine_id, version = action.engine_id, action.version
        request = self._request(action)
        try:
            reply = await self._engines[engine_id].commit_update(request)
        except EngineError as error:
            self._feed(UpdateFailed(engine_id, version, str(error)))
            return
        if self._pending:
            self._pending.commits.append(reply)
        drops = request.held == "drop"
        dropped = tuple(ProgramId(name) for name in reply.dropped)
        self._feed(UpdateCommitted(engine_id, version, dropped_kv=drops, dropped=dropped))

    def _request(self, action: CommitUpdate) -> CommitRequest:
        terms, oldest = self._policy.terms, action.oldest_kv
        keeps = terms.acting == "keep" and not action.drops_kv
        # What finish and abort leave running has had its time.
        continues = (terms.running == "continue" and not action.drops_kv) or (terms.holds_back and keeps)
        return CommitRequest(
            version=str(action.version),
            running="continue" if continues else "recompute",
            held="keep" if keeps else "drop",
            oldest_kv=None if oldest is None else str(oldest),
        )
