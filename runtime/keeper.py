"""One engine of a fleet, kept: it joins, and when it is lost it comes back.

- Weights first, then traffic: it joins only with the version that is deployed.
- An engine of ours that dies is started again, so often and no more, unless it refused to serve; one that
  runs elsewhere is waited for.
- One that failed a publication serves nothing until a full update, or until it was started again.
- Leaving `run` means that it is out of the fleet, and that nothing of it is left here.
"""

import logging
from enum import StrEnum

import anyio

from sostenuto.errors import EngineError, EngineKilled, lone_error
from sostenuto.runtime.dispatcher import Dispatcher
from sostenuto.runtime.engines.opened import Opened, Source
from sostenuto.runtime.engines.protocol import Engine
from sostenuto.runtime.engines.suits import Requirements
from sostenuto.runtime.engines.wire import Capabilities, CommitRequest
from sostenuto.types import Version

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
"""Between two attempts to open an engine."""
_COUNTED_S = 600.0
"""For so long a restart counts."""
_LOOK_S = 2.0
"""Between two looks at an engine that is not ours."""
_CALL_S = 15.0
_DIES_WITHIN_S = 1.0
"""After a call that failed, the death that it failed by is known."""

_log = logging.getLogger(__name__)


class Standing(StrEnum):
    """How an engine stands to the fleet."""

    JOINING = "joining"
    MEMBER = "member"
    DRAINING = "draining"
    LOST = "lost"


class Keeper:
    """Use `run`, once."""

    def __init__(self, source: Source, dispatcher: Dispatcher, needs: Requirements) -> None:
        self.source = source
        self.standing = Standing.JOINING
        self.reason = ""
        """Why it is lost."""
        self.restarts = 0
        self.promised_tokens = 0
        """The context that programs count on once they run."""
        self.tried = anyio.Event()
        """Set once it has joined, or could not."""
        self.over = anyio.Event()
        """Set when it is not kept any more."""
        self._dispatcher = dispatcher
        self._needs = needs
        self._has_served = self._was_killed = False
        self._began_again_s: list[float] = []
        self._pause_s = _FIRST_PAUSE_S
        self._scope = anyio.CancelScope(shield=True)
        """It is cancelled by `close` alone: programs that are cancelled still give up their KV there."""

    def __repr__(self) -> str:
        return f"<Keeper {self.source.id} {self.standing}>"

    async def run(self) -> None:
        """Keep it in the fleet, until it is closed or given up."""
        try:
            with self._scope:
                while True:
                    self.standing = Standing.JOINING
                    self._is_lost(await self._life())
                    if not self._may_come_back():
                        return
                    await anyio.sleep(self._pause_s)
                    self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
                    self.restarts += 1
        finally:
            self.tried.set()
            self.over.set()

    async def dismiss(self, *, within_s: float) -> None:
        """Take it out of the fleet: what runs there may end within the deadline.  Then close it."""
        self.standing = Standing.DRAINING
        await self._dispatcher.leave(self.source.id, "it is removed", within_s=within_s)
        self.close()
        await self.over.wait()

    def close(self) -> None:
        """End `run`, and with it what was opened."""
        self._scope.cancel()

    async def _life(self) -> str:
        """From its opening to its loss; why it was lost."""
        why = ""
        try:
            with lone_error():
                async with self.source.open() as opened:
                    why = await self._serve(opened)
        except EngineError as error:
            self._was_killed = isinstance(error, EngineKilled)
            why = why or str(error)
        return why

    async def _serve(self, opened: Opened) -> str:
        ends: list[str] = []
        async with anyio.create_task_group() as group:

            async def watch() -> None:
                ends.append(await opened.ended())
                # At once: programs need not wait until a call of theirs fails.
                self._dispatcher.fleet.lose(self.source.id, ends[0])
                group.cancel_scope.cancel()

            group.start_soon(watch)
            if self.source.restarts is None:
                group.start_soon(self._watch_version, opened.engine)
            try:
                ends.append(await self._member_until_lost(opened))
            except EngineError as error:
                # Where it has died, that is the reason; otherwise it is what it refuses.
                await anyio.sleep(_DIES_WITHIN_S if self.source.restarts is not None else 0)
                raise error from None
            group.cancel_scope.cancel()
        self._was_killed = True
        return ends[0]

    async def _member_until_lost(self, opened: Opened) -> str:
        """Join, and again whenever a full update is enough to come back."""
        while True:
            await self._join(opened)
            trouble = await self._dispatcher.until_troubled(self.source.id)
            self._is_lost(trouble.reason)
            self._dispatcher.fleet.lose(self.source.id, trouble.reason)
            if trouble.is_lost or not await self._is_behind(opened.engine):
                return trouble.reason

    async def _join(self, opened: Opened) -> None:
        engine = opened.engine
        self._needs.check(self.source.id, await engine.capabilities(), promised_tokens=self.promised_tokens)
        while True:
            facts = await self._bring_up_to_date(opened)
            deployed = self._dispatcher.deployed
            try:
                await self._dispatcher.join(self.source.id, engine)
            except EngineError:
                if self._dispatcher.deployed == deployed:
                    raise
                # A version has opened meanwhile.
                continue
            break
        self.standing, self.reason, self._pause_s = Standing.MEMBER, "", _FIRST_PAUSE_S
        self._has_served = True
        self.tried.set()
        _log.info("engine %s serves version %s", self.source.id, facts.version)

    async def _bring_up_to_date(self, opened: Opened) -> Capabilities:
        """Give it the deployed version, as a full update that it verifies."""
        engine = opened.engine
        while True:
            facts = await engine.capabilities()
            deployed = self._dispatcher.deployed or self._needs.version
            if facts.version == str(deployed):
                return facts
            await self._prepare(opened, facts, deployed)
            try:
                await engine.commit_update(CommitRequest(version=str(deployed)))
            except EngineError as error:
                raise EngineError(f"{error}; does it serve the job's model, {self._needs.model}?") from error
            if (await engine.capabilities()).version != str(deployed):
                raise EngineError(
                    f"engine {self.source.id}: update to {deployed}: it says that it serves another "
                    "version; start it again"
                )

    async def _prepare(self, opened: Opened, facts: Capabilities, deployed: Version) -> None:
        if (manifest := self._dispatcher.manifest) is not None:
            await opened.engine.prepare_update(manifest)
        elif opened.prepare_start is not None:
            await opened.prepare_start(str(deployed))
        else:
            raise EngineError(
                f"engine {self.source.id}: capabilities: it serves version {facts.version}, and "
                f"{deployed} is deployed; start it with the job's model"
            )

    async def _is_behind(self, engine: Engine) -> bool:
        """Whether a full update would bring it to what is deployed."""
        deployed = self._dispatcher.deployed
        version = _parsed((await engine.capabilities()).version)
        return version is not None and deployed is not None and version < deployed

    async def _watch_version(self, engine: Engine) -> None:
        """One that was started anew by others serves what it was started with."""
        while True:
            await anyio.sleep(_LOOK_S)
            served = self._settled_version()
            if served is None:
                continue
            try:
                with anyio.fail_after(_CALL_S):
                    version = (await engine.capabilities()).version
            except (EngineError, TimeoutError) as error:
                self._dispatcher.fleet.lose(self.source.id, str(error) or f"no answer within {_CALL_S:g} s")
                continue
            if served == self._settled_version() and version != str(served):
                self._dispatcher.fleet.lose(
                    self.source.id, f"it has started anew: it serves version {version} in place of {served}"
                )

    def _settled_version(self) -> Version | None:
        """What it has to serve now; None while it takes in another one, and may have either."""
        return self._dispatcher.scheduler.gate.settled(self.source.id)

    # ---- whether it comes back ----

    def _is_lost(self, reason: str) -> None:
        self.standing, self.reason = Standing.LOST, reason

    def _may_come_back(self) -> bool:
        allowed = self.source.restarts
        if allowed is None:
            self.tried.set()
            _log.warning("engine %s is waited for: %s", self.source.id, self.reason)
            return True
        now_s = anyio.current_time()
        self._began_again_s = [at_s for at_s in self._began_again_s if now_s - at_s < _COUNTED_S]
        if not self._has_served and not self._was_killed:
            # What it refuses to start with does not change by trying.
            return False
        if len(self._began_again_s) >= allowed:
            self.reason += f"; it was started again {len(self._began_again_s)} times, and is given up"
            return False
        self._began_again_s.append(now_s)
        _log.warning("engine %s is started again: %s", self.source.id, self.reason)
        return True


def _parsed(version: str) -> Version | None:
    try:
        return Version.parse(version)
    except ValueError:
        return None
