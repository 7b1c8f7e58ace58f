"""The version gate: which engine may start requests, and how a new version gets to all of them.

    engine state   waits for
    SERVING        -
    STAGING        the copy beside the old weights, checked
    STAGED         the other engines
    COMMITTING     the swap
    QUARANTINED    a full verified update

An engine can be closed beside that: it takes part in publications and starts nothing until it is opened.

A version opens when every engine that takes part serves it.  One that fails is quarantined and the
others go on; it serves nothing, also while it takes in the next version, until that one is verified.
Versions never go back.
"""

from dataclasses import dataclass
from enum import StrEnum

from sostenuto.errors import InvalidTransition
from sostenuto.scheduler.actions import (
    Action,
    CommitUpdate,
    Opened,
    PublicationFailed,
    Quarantine,
    StageUpdate,
)
from sostenuto.types import EngineId, Version


class EngineState(StrEnum):
    SERVING = "serving"
    STAGING = "staging"
    STAGED = "staged"
    COMMITTING = "committing"
    QUARANTINED = "quarantined"


@dataclass(slots=True)
class _Member:
    verified: Version | None
    """What it serves; None while nothing on it is verified."""
    state: EngineState = EngineState.SERVING
    closed: str = ""
    """Why it starts nothing although it could; empty: it may."""
    failure: str = ""
    """Why it is quarantined."""


class Gate:
    """Versions of the fleet.  Written by the scheduler alone, one event at a time."""

    def __init__(self) -> None:
        self._members: dict[EngineId, _Member] = {}
        self._pending: Version | None = None
        self._deployed: Version | None = None

    @property
    def deployed(self) -> Version | None:
        """The newest version that has opened; None before the first engine joined."""
        return self._deployed

    @property
    def publishing(self) -> Version | None:
        return self._pending

    def version(self, engine_id: EngineId) -> Version | None:
        """What the engine serves; None while it is quarantined, or not in the fleet."""
        member = self._members.get(engine_id)
        return member.verified if member is not None else None

    def may_start(self, engine_id: EngineId) -> bool:
        """Whether a request may start there: its version is verified, and it is not closed."""
        member = self._members.get(engine_id)
        return member is not None and member.verified is not None and not member.closed

    def close(self, engine_id: EngineId, reason: str) -> None:
        """From now on nothing starts there.  An engine that is not in the fleet is left alone."""
        if (member := self._members.get(engine_id)) is not None:
            member.closed = reason

    def open(self, engine_id: EngineId) -> None:
        if (member := self._members.get(engine_id)) is not None:
            member.closed = ""

    def why_not(self, engine_id: EngineId) -> str:
        """Why it is quarantined or closed, for people; empty for one that serves."""
        member = self._members.get(engine_id)
        return member.failure or member.closed if member is not None else ""

    def states(self) -> dict[EngineId, EngineState]:
        return {engine_id: member.state for engine_id, member in self._members.items()}

    def join(self, engine_id: EngineId, version: Version) -> list[Action]:
        """An engine serves `version`, verified.  The fleet's first engine sets what is deployed.

        One that joins with an older version than the one being published takes part in that.
        """
        if self._deployed is not None and version < self._deployed:
            raise InvalidTransition(f"{engine_id} joins with {version}, deployed is {self._deployed}")
        self._members[engine_id] = _Member(version)
        if self._deployed is None:
            self._deployed = version
        if self._pending is None or version >= self._pending:
            return self._progress()
        self._members[engine_id].state = EngineState.STAGING
        return [StageUpdate(engine_id, self._pending)]

    def leave(self, engine_id: EngineId) -> list[Action]:
        self._members.pop(engine_id, None)
        return self._progress()

    def begin(self, version: Version) -> list[Action]:
        """Start to publish `version` to every engine that takes part, quarantined ones included."""
        if self._pending is not None:
            raise InvalidTransition(f"{version} begins while {self._pending} is published")
        if self._deployed is not None and version <= self._deployed:
            raise InvalidTransition(f"{version} is not newer than {self._deployed}")
        self._pending = version
        for member in self._members.values():
            member.state = EngineState.STAGING
        actions: list[Action] = [StageUpdate(engine_id, version) for engine_id in self._members]
        return actions + self._progress()

    def staged(self, engine_id: EngineId, version: Version) -> list[Action]:
        if not self._expects(engine_id, version, EngineState.STAGING):
            return []
        self._members[engine_id].state = EngineState.STAGED
        return self._progress()

    def committed(self, engine_id: EngineId, version: Version) -> list[Action]:
        if not self._expects(engine_id, version, EngineState.COMMITTING):
            return []
        member = self._members[engine_id]
        member.verified, member.state, member.failure = version, EngineState.SERVING, ""
        return self._progress()

    def failed(self, engine_id: EngineId, version: Version, reason: str) -> list[Action]:
        """The engine could not stage or swap: it serves nothing until a full verified update."""
        member = self._members.get(engine_id)
        if member is None or version != self._pending:
            return []
        member.verified, member.state, member.failure = None, EngineState.QUARANTINED, reason
        return [Quarantine(engine_id, reason), *self._progress()]

    def expects_commit(self, engine_id: EngineId, version: Version) -> bool:
        """Whether a report of that swap is no late or repeated one."""
        return self._expects(engine_id, version, EngineState.COMMITTING)

    def _expects(self, engine_id: EngineId, version: Version, state: EngineState) -> bool:
        # A late or repeated report of an earlier publication changes nothing.
        member = self._members.get(engine_id)
        return member is not None and version == self._pending and member.state is state

    def _progress(self) -> list[Action]:
        if self._pending is None:
            return []
        states = {m.state for m in self._members.values() if m.state is not EngineState.QUARANTINED}
        if not states:
            failed, self._pending = self._pending, None
            return [PublicationFailed(failed)]
        if states == {EngineState.SERVING}:
            self._deployed, self._pending = self._pending, None
            return [Opened(self._deployed)]
        # While a version is published, SERVING is what has it already.
        if states <= {EngineState.STAGED, EngineState.SERVING}:
            return self._commit(self._pending)
        return []

    def _commit(self, version: Version) -> list[Action]:
        actions: list[Action] = []
        for engine_id, member in self._members.items():
            if member.state is EngineState.STAGED:
                member.state = EngineState.COMMITTING
                actions.append(CommitUpdate(engine_id, version))
        return actions
