"""How a new version reaches the engines.  The gate in `scheduler/` decides; this carries it out."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import assert_never

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from sostenuto.errors import EngineError
from sostenuto.runtime.engines.protocol import Engine
from sostenuto.runtime.engines.wire import CommitReply, CommitRequest
from sostenuto.scheduler.actions import (
    CommitUpdate,
    Event,
    Opened,
    PublicationBegun,
    PublicationFailed,
    Quarantine,
    StageUpdate,
    UpdateAction,
    UpdateCommitted,
    UpdateFailed,
    UpdateStaged,
)
from sostenuto.trainer.publication.manifest import Manifest
from sostenuto.types import EngineId, Version


@dataclass(frozen=True, slots=True)
class UpdatePolicy:
    """What happens to KV of the old version when new weights are swapped in."""

    keep_kv: bool = False
    """True: requests in flight go on with it and held KV stays; False: it is computed anew."""
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
        quarantined: Callable[[EngineId, str], None],
    ) -> None:
        self._engines = engines
        self._policy = policy
        self._feed = feed
        self._running = running
        self._quarantined = quarantined
        self._pending: _Pending | None = None
        self.manifest: Manifest | None = None
        """Of what is deployed; None until something was published."""

    async def publish(self, manifest: Manifest) -> Publication:
        assert self._pending is None, "one publication at a time"
        version, pending = Version.parse(manifest.version), _Pending(manifest)
        self._pending, began_s = pending, anyio.current_time()
        # Half a publication helps nobody; each of its parts has a deadline.
        with anyio.CancelScope(shield=True):
            self._feed(PublicationBegun(version))
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
            case CommitUpdate(engine_id, version):
                self._running.start_soon(self._commit, engine_id, version)
            case Opened() | PublicationFailed():
                self._conclude(opened=isinstance(action, Opened))
            case Quarantine(engine_id, reason):
                if self._pending:
                    self._pending.failures.append(f"{engine_id}: {reason}")
                self._quarantined(engine_id, reason)
            case _:
                assert_never(action)

    def _conclude(self, *, opened: bool) -> None:
        if self._pending:
            self._pending.opened = opened
            self.manifest = self._pending.manifest if opened else self.manifest
            self._pending.over.set()

    @contextmanager
    def _seen_through(self) -> Generator[None]:
        """When the dispatcher ends in the block, whoever waits for the publication is told."""
        try:
            yield
        except anyio.get_cancelled_exc_class():
            if self._pending:
                self._pending.abandoned = True
                self._pending.failures.append("the engines were let go meanwhile")
                self._pending.over.set()
            raise

    async def _stage(self, engine_id: EngineId, version: Version) -> None:
        if self._pending is None:
            return
        try:
            with self._seen_through(), anyio.fail_after(self._policy.stage_timeout_s):
                await self._engines[engine_id].prepare_update(self._pending.manifest)
        except (EngineError, TimeoutError) as error:
            reason = str(error) or f"staging took over {self._policy.stage_timeout_s:.0f} s"
            self._feed(UpdateFailed(engine_id, version, reason))
            return
        if self._pending:
            self._pending.staged_s = anyio.current_time()
        self._feed(UpdateStaged(engine_id, version))

    async def _commit(self, engine_id: EngineId, version: Version) -> None:
        keep = self._policy.keep_kv
        request = CommitRequest(
            version=str(version),
            running="continue" if keep else "recompute",
            held="keep" if keep else "drop",
        )
        try:
            with self._seen_through():
                reply = await self._engines[engine_id].commit_update(request)
        except EngineError as error:
            self._feed(UpdateFailed(engine_id, version, str(error)))
            return
        if self._pending:
            self._pending.commits.append(reply)
        self._feed(UpdateCommitted(engine_id, version, dropped_kv=not keep))
