"""The version gate: which engine may start requests, and how a new version gets to all of them.

    engine state   waits for
    SERVING        -
    STAGING        the copy beside the old weights, checked
    STAGED         the other engines
    FINISHING      requests in flight, where the terms say so; nothing new starts
    COMMITTING     the swap
    READY          the swaps of the others: it has the version, and nothing starts under it yet
    QUARANTINED    a full verified update

An engine can be closed beside that: it takes part in publications and starts nothing until it is opened.

- Swaps begin when every engine that takes part has a verified copy, or enough of them once the deadline has
  passed; the version opens when all of these have swapped.  Nothing starts under it before.
- An engine that comes late is behind what is deployed: it starts nothing but programs that are pinned to its
  version (drain), or nothing at all (quarantine), until it has the version.
- One that fails is quarantined and the others go on; it serves nothing, also while it takes in the next
  version, until that one is verified.
- Versions never go back.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from sostenuto.errors import InvalidTransition
from sostenuto.scheduler.actions import (
    Action,
    CommitUpdate,
    Interrupt,
    Opened,
    PublicationFailed,
    Quarantine,
    StageUpdate,
)
from sostenuto.scheduler.update_terms import DEFAULT, UpdateTerms
from sostenuto.types import EngineId, Version

_REMEMBERED = 64
"""Versions that have opened; no bound on the age of KV needs more."""
_NEVER = float("inf")


class EngineState(StrEnum):
    SERVING = "serving"
    STAGING = "staging"
    STAGED = "staged"
    FINISHING = "finishing"
    COMMITTING = "committing"
    READY = "ready"
    QUARANTINED = "quarantined"


_MOMENTARY = frozenset({EngineState.FINISHING, EngineState.COMMITTING, EngineState.READY})


@dataclass(slots=True)
class _Member:
    verified: Version | None
    """What it serves; None while nothing on it is verified."""
    state: EngineState = EngineState.SERVING
    target: Version | None = None
    """What it takes in, or took in last."""
    finish_by_s: float = _NEVER
    tells_kv_age: bool = True
    kv_since: Version | None = None
    """Of an engine that does not tell its age: the oldest that its KV can be of."""
    is_late: bool = False
    """The version that it takes in opens, or has opened, without it."""
    closed: str = ""
    """Why it starts nothing although it could; empty: it may."""
    failure: str = ""
    """Why it is quarantined."""


class Gate:
    """Versions of the fleet.  Written by the scheduler alone, one event at a time."""

    def __init__(self) -> None:
        self._members: dict[EngineId, _Member] = {}
        self._pending: Version | None = None
        self._is_swapping = False
        self._begun = 0
        self._deadline_s = _NEVER
        self._opened: deque[Version] = deque(maxlen=_REMEMBERED)
        self.now_s = 0.0
        """Of the event under way."""
        self.terms = DEFAULT
        """Of the last publication."""
        self.revision = 0
        """Rises whenever what engines serve or may start has changed."""

    @property
    def deployed(self) -> Version | None:
        """The newest version that has opened; None before the first engine joined."""
        return self._opened[-1] if self._opened else None

    @property
    def publishing(self) -> Version | None:
        return self._pending

    def version(self, engine_id: EngineId) -> Version | None:
        """What the engine serves; None while it is quarantined, or not in the fleet."""
        member = self._members.get(engine_id)
        return member.verified if member is not None else None

    def kept_from(self) -> Version | None:
        """The oldest version whose KV outlives the next change; None: all does, or nothing is known of it."""
        if self.deployed is None or self._begun == 0:
            return None
        following = self.deployed.next()
        return self._oldest_kv(following) if self.terms.acting == "keep" else following

    def settled(self, engine_id: EngineId) -> Version | None:
        """The same; None also while it takes in another version, and may have either."""
        member = self._members.get(engine_id)
        is_settled = self._pending is None and member is not None and member.state is EngineState.SERVING
        return self.version(engine_id) if is_settled else None

    def may_start(self, engine_id: EngineId) -> bool:
        """Whether a request may start there: it serves what is deployed, is not closed and not changing."""
        member = self._members.get(engine_id)
        return member is not None and self._serves(member) and member.state not in _MOMENTARY

    def serves(self, engine_id: EngineId) -> bool:
        """The same, and also while it changes: that is over soon."""
        member = self._members.get(engine_id)
        return member is not None and self._serves(member)

    def may_start_pinned(self, engine_id: EngineId) -> Version | None:
        """The older version that programs pinned to it may start under there; None: there is none."""
        member = self._members.get(engine_id)
        if member is None or not self._is_behind(member) or member.closed or member.state in _MOMENTARY:
            return None
        return member.verified if self.terms.late == "drain" else None

    def oldest_pinned(self) -> Version | None:
        """The oldest version that an engine still has for programs that are pinned to it."""
        kept = [self.may_start_pinned(engine_id) for engine_id in self._members]
        return min((version for version in kept if version is not None), default=None)

    def is_changing(self, engine_id: EngineId) -> bool:
        """Whether it is only for a moment that nothing starts there."""
        member = self._members.get(engine_id)
        return member is not None and member.state in _MOMENTARY

    def close(self, engine_id: EngineId, reason: str) -> None:
        """From now on nothing starts there.  An engine that is not in the fleet is left alone."""
        if (member := self._members.get(engine_id)) is not None:
            member.closed = reason
            self.revision += 1

    def open(self, engine_id: EngineId) -> None:
        if (member := self._members.get(engine_id)) is not None:
            member.closed = ""
            self.revision += 1

    def why_not(self, engine_id: EngineId) -> str:
        """Why it is quarantined, closed or behind, for people; empty for one that serves."""
        member = self._members.get(engine_id)
        if member is None:
            return ""
        late = f"late: it still serves {member.verified}" if self._is_behind(member) else ""
        return member.failure or member.closed or late

    def states(self) -> dict[EngineId, EngineState]:
        return {engine_id: member.state for engine_id, member in self._members.items()}

    # ---- what happens to engines ----

    def join(self, engine_id: EngineId, version: Version, *, tells_kv_age: bool = True) -> list[Action]:
        """An engine serves `version`, verified.

        The first engine of a fleet, and the first after none was left that serves, sets what is deployed.

        One that joins with an older version than the one being published takes part in that.
        """
        if self.deployed is not None and version < self.deployed:
            raise InvalidTransition(f"{engine_id} joins with {version}, deployed is {self.deployed}")
        others = [other for id_, other in self._members.items() if id_ != engine_id]
        self._members[engine_id] = member = _Member(version, tells_kv_age=tells_kv_age, kv_since=version)
        self.revision += 1
        alone = self._pending is None and all(m.verified is None for m in others)
        if self.deployed is None or (alone and version > self.deployed):
            self._opened.append(version)
        if self._pending is None or version >= self._pending:
            member.target = version
            return self._progress()
        return [self._stage(engine_id, member, self._pending)]

    def leave(self, engine_id: EngineId) -> list[Action]:
        self._members.pop(engine_id, None)
        self.revision += 1
        return self._progress()

    def begin(self, version: Version, terms: UpdateTerms = DEFAULT, now_s: float = 0.0) -> list[Action]:
        """Start to publish `version` to every engine that takes part, quarantined ones included."""
        if self._pending is not None:
            raise InvalidTransition(f"{version} begins while {self._pending} is published")
        if self.deployed is not None and version <= self.deployed:
            raise InvalidTransition(f"{version} is not newer than {self.deployed}")
        self._pending, self.terms, self.now_s = version, terms, now_s
        self._is_swapping = False
        self._begun += 1
        self._deadline_s = _NEVER if terms.quorum is None else now_s + terms.deadline_s
        actions: list[Action] = [
            self._stage(engine_id, member, version)
            for engine_id, member in self._members.items()
            # A late one that swaps takes in the next version as soon as it has this one.
            if member.state is not EngineState.COMMITTING
        ]
        return actions + self._progress()

    def staged(self, engine_id: EngineId, version: Version) -> list[Action]:
        if not self._expects(engine_id, version, EngineState.STAGING):
            return []
        member = self._members[engine_id]
        member.state = EngineState.STAGED
        if member.is_late or self._is_swapping or self._pending is None:
            return self._swap(engine_id, member)
        return self._progress()

    def committed(self, engine_id: EngineId, version: Version, *, dropped_kv: bool = False) -> list[Action]:
        if not self._expects(engine_id, version, EngineState.COMMITTING):
            return []
        member = self._members[engine_id]
        member.verified, member.failure = version, ""
        member.kv_since = version if dropped_kv else member.kv_since
        member.state = EngineState.READY if version == self._pending else EngineState.SERVING
        member.is_late = member.is_late and version == self._pending
        self.revision += 1
        if self._pending is not None and version < self._pending:
            return [self._stage(engine_id, member, self._pending)]
        return self._progress()

    def failed(self, engine_id: EngineId, version: Version, reason: str) -> list[Action]:
        """The engine could not stage or swap: it serves nothing until a full verified update."""
        member = self._members.get(engine_id)
        if member is None or version != member.target or member.verified == version:
            return []
        member.verified, member.state, member.failure = None, EngineState.QUARANTINED, reason
        member.is_late = False
        self.revision += 1
        return [Quarantine(engine_id, reason), *self._progress()]

    def expects_commit(self, engine_id: EngineId, version: Version) -> bool:
        """Whether a report of that swap is no late or repeated one."""
        return self._expects(engine_id, version, EngineState.COMMITTING)

    # ---- time ----

    def advance(self, now_s: float, decoding: Callable[[EngineId], int]) -> list[Action]:
        """After every event: swap where what runs has ended, or has had its time; mind the deadline.

        `decoding`: how many requests run on an engine.
        """
        self.now_s = now_s
        actions: list[Action] = []
        if self._pending is not None and not self._is_swapping and now_s >= self._deadline_s:
            actions += self._progress()
        for engine_id, member in self._members.items():
            is_over = now_s >= member.finish_by_s or not decoding(engine_id)
            if member.state is EngineState.FINISHING and is_over:
                actions.append(self._commit(engine_id, member))
        return actions

    def wake_at_s(self) -> float:
        """When `advance` has something to do although nothing else has happened."""
        finish_s = (m.finish_by_s for m in self._members.values() if m.state is EngineState.FINISHING)
        waits = self._pending is not None and not self._is_swapping and self.now_s < self._deadline_s
        return min((self._deadline_s if waits else _NEVER, *finish_s))

    # ---- how a publication goes on ----

    def _progress(self) -> list[Action]:
        if self._pending is None:
            return []
        if all(m.state is EngineState.QUARANTINED for m in self._members.values()):
            failed, self._pending = self._pending, None
            return [PublicationFailed(failed)]
        return self._open_when_swapped() if self._is_swapping else self._swap_when_enough()

    def _swap_when_enough(self) -> list[Action]:
        part = {id_: m for id_, m in self._members.items() if m.state is not EngineState.QUARANTINED}
        # While a version is published, SERVING with it is what has it already.
        here = [m for m in part.values() if m.state is EngineState.STAGED or m.verified == self._pending]
        is_enough = len(here) >= self.terms.engines(len(self._members)) and self.now_s >= self._deadline_s
        if len(here) < len(part) and not is_enough:
            return []
        self._is_swapping = True
        actions: list[Action] = []
        for engine_id, member in part.items():
            if member.state is EngineState.STAGED:
                actions += self._swap(engine_id, member)
            elif member.verified != self._pending:
                member.is_late = True
        return actions + self._progress()

    def _open_when_swapped(self) -> list[Action]:
        assert self._pending is not None
        on_time = [
            m for m in self._members.values() if m.state is not EngineState.QUARANTINED and not m.is_late
        ]
        if not on_time:
            # Those that were enough have all failed: the late ones are waited for after all.
            self._is_swapping, self._deadline_s = False, _NEVER
            for member in self._members.values():
                member.is_late = False
            return self._swap_when_enough()
        if any(member.verified != self._pending for member in on_time):
            return []
        opened, self._pending = self._pending, None
        self._opened.append(opened)
        self.revision += 1
        for member in self._members.values():
            if member.state is EngineState.READY:
                member.state, member.is_late = EngineState.SERVING, False
        return [Opened(opened)]

    def _swap(self, engine_id: EngineId, member: _Member) -> list[Action]:
        if not self.terms.holds_back:
            return [self._commit(engine_id, member)]
        member.state, member.finish_by_s = EngineState.FINISHING, self.now_s + self.terms.finish_within_s
        self.revision += 1
        return [Interrupt(engine_id)] if self.terms.running == "abort" else []

    def _stage(self, engine_id: EngineId, member: _Member, version: Version) -> Action:
        member.state, member.target, member.is_late = EngineState.STAGING, version, False
        return StageUpdate(engine_id, version)

    def _commit(self, engine_id: EngineId, member: _Member) -> Action:
        assert member.target is not None
        member.state = EngineState.COMMITTING
        self.revision += 1
        oldest = self._oldest_kv(member.target)
        if member.tells_kv_age or oldest is None:
            return CommitUpdate(engine_id, member.target, oldest)
        may_be_too_old = member.kv_since is None or member.kv_since < oldest
        return CommitUpdate(engine_id, member.target, drops_kv=may_be_too_old)

    def _oldest_kv(self, version: Version) -> Version | None:
        """The oldest version whose KV is still used under `version`; None: any."""
        age = self.terms.max_kv_age
        if age is None:
            return None
        before = [opened for opened in self._opened if opened < version]
        return version if not age else before[-age] if age <= len(before) else None

    def _serves(self, member: _Member) -> bool:
        return member.verified is not None and member.verified == self.deployed and not member.closed

    def _is_behind(self, member: _Member) -> bool:
        deployed = self.deployed
        return member.verified is not None and deployed is not None and member.verified < deployed

    def _expects(self, engine_id: EngineId, version: Version, state: EngineState) -> bool:
        # A late or repeated report of an earlier publication changes nothing.
        member = self._members.get(engine_id)
        return member is not None and version == member.target and member.state is state
