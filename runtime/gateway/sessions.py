"""The programs of a gateway: who is there, and when they are over.

- A program that was opened by its owner is ended by its owner.
- One that named itself ends when it says so, is released, or has been silent for long; a weak hint, soon.
- A call that named nobody is a program of its own, over with its reply, shared with nobody.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Protocol

import anyio
from anyio.abc import TaskGroup

from sostenuto.records import Trajectory
from sostenuto.runtime.dispatcher import Dispatcher
from sostenuto.runtime.engines.wire import Spans
from sostenuto.runtime.gateway.flights import Flights
from sostenuto.runtime.gateway.identity import Identity, Strength
from sostenuto.runtime.gateway.lane import Entrance, LaneHome
from sostenuto.runtime.gateway.replies import Replies
from sostenuto.runtime.gateway.session import Session
from sostenuto.runtime.gateway.terms import Terms
from sostenuto.runtime.gateway.turn import Ask, Refused, Standing, Told
from sostenuto.scheduler.program import Snapshot
from sostenuto.types import GroupId, Outcome, OutcomeKind, ProgramId

SERVED = Outcome(OutcomeKind.SERVED)
_LOOK_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetimes:
    """How long programs that fell silent keep what they have, in seconds."""

    hold_s: float = 300.0
    """KV and place of a program that named itself, or was opened by its owner."""
    weak_hold_s: float = 60.0
    """The same after a hint that clients send by themselves."""
    forget_s: float = 3600.0
    """Then the program is over; a weak one after a tenth of that."""

    @property
    def look_s(self) -> float:
        """How often to look at programs."""
        return min(_LOOK_S, self.hold_s / 3, self.weak_hold_s / 3, self.forget_s / 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    programs: int
    """How many may be there; more are refused."""
    turn_tokens: int
    """Of a reply whose client sets no limit."""


class Books(Protocol):
    """Where programs are entered that nobody else keeps books on."""

    def begun(self, program_id: ProgramId, group_id: GroupId) -> None: ...

    def ended(self, trajectory: Trajectory) -> None:
        """With its outcome."""
        ...


@dataclass(slots=True, eq=False)
class Resident:
    """A program that is there."""

    session: Session
    flights: Flights[Told]
    strength: Strength
    name: str
    """The client's own; the key of the table."""
    children: set[str] = field(default_factory=set[str])
    """Names of its sub-agents."""
    replies: Replies = field(default_factory=Replies)


class Sessions:
    """Owned by the gateway."""

    def __init__(  # noqa: PLR0913 - as `open_gateway`
        self,
        dispatcher: Dispatcher,
        running: TaskGroup,
        returning: TaskGroup,
        books: Books | None,
        *,
        prefix: str,
        lifetimes: Lifetimes,
        bounds: Bounds,
        roles: Mapping[str, Dispatcher] | None = None,
    ) -> None:
        """`prefix` begins the ids of programs; no other gateway of the run has the same.

        `running` may be cancelled; in `returning`, what programs held is given back, within a deadline.
        `roles`: by name who speaks in those that are not the dispatcher's.
        `books`: None where only programs are there that their owner has opened.
        """
        self._dispatcher = dispatcher
        self._running = running
        self._returning = returning
        self._books = books
        self._prefix = prefix
        self._lifetimes = lifetimes
        self._bounds = bounds
        self._roles = dict(roles or {})
        self._residents: dict[str, Resident] = {}
        self._parents: dict[str, str] = {}
        """Of sub-agents: the name of the program that they belong to."""
        self._numbers = count(1)

    def __len__(self) -> int:
        return len(self._residents)

    def all(self) -> list[Resident]:
        return list(self._residents.values())

    def find(self, name: str) -> Resident | None:
        return self._residents.get(name)

    def snapshot(self) -> Snapshot:
        """Of the scheduler, whose programs are our lanes and whatever else it runs."""
        return self._dispatcher.scheduler.snapshot()

    def resident(self, identity: Identity) -> Resident | None:
        """The program that a call is of, where it is here already."""
        return self._residents.get(self._root(identity))

    def open(
        self,
        name: str,
        terms: Terms,
        *,
        id_: ProgramId | None = None,
        entrance: Entrance | None = None,
    ) -> Resident:
        """A program of an owner who ends it and keeps its books.  `entrance`: its place, from now on ours."""
        id_ = id_ or self._new_id()
        return self._enter(name, Strength.KEY, terms, id_, ended=lambda _: None, entrance=entrance)

    async def ask(
        self,
        identity: Identity,
        ask: Ask,
        *,
        once: str = "",
        join: bool = False,
        spans: Spans | None = None,
    ) -> tuple[Resident, Told]:
        """Sample for whoever calls; errors as `Session.ask` says.

        `once`: the same text for the same call; with `join` it may have come before.  `spans` is called
        with tokens as they come, unless the call joins another.
        """
        resident, child = self._whose(identity)

        async def work() -> Told:
            is_last = identity.is_final or resident.strength is Strength.NONE
            return await resident.session.ask(ask, child=child, is_last=is_last, spans=spans)

        try:
            told, joined = (
                await resident.flights.fly(once, work, join=join) if once else (await work(), False)
            )
        finally:
            if resident.strength is Strength.NONE:
                self.end(resident)
        if identity.is_final:
            self._finish(resident, child)
        return resident, replace(told, standing=Standing.REPEATED) if joined else told

    def release(self, name: str) -> None:
        """A program that named itself is over; Refused for one that is not there, or has an owner."""
        resident = self._residents.get(name)
        if resident is not None and resident.strength is Strength.KEY:
            raise Refused(
                f"program {name[:80]!r} belongs to a job, which ends it; cancel the job",
                status=409,
                field="program_id",
                code="owned",
            )
        if resident is None:
            raise Refused(
                f"program {name[:80]!r} is not here; it has ended, or never made a call",
                status=404,
                field="program_id",
                code="unknown_program",
            )
        self.end(resident)

    def end(self, resident: Resident) -> None:
        """Give back all that the program holds, and enter its record.  Safe to call twice."""
        self._residents.pop(resident.name, None)
        for child in resident.children:
            self._parents.pop(child, None)
        resident.session.close()

    async def keep_expiring(self) -> None:
        """Keep the leases of calls that run, and end programs that have been silent for too long."""
        while True:
            await anyio.sleep(self._lifetimes.look_s)
            now_s = anyio.current_time()
            for resident in self.all():
                resident.session.keep_leases()
                silent_s = now_s - resident.session.used_s
                if silent_s > self._patience_s(resident.strength) and not resident.session.is_busy:
                    self.end(resident)

    def close(self) -> None:
        for resident in self.all():
            self.end(resident)

    def _whose(self, identity: Identity) -> tuple[Resident, str]:
        """The program of a call, and the sub-agent in it that calls; "" for none."""
        if identity.strength is Strength.NONE:
            number = next(self._numbers)
            # With a blank, as no client can name its program.
            return self._served(f"~ {number}", Strength.NONE), ""
        root = self._root(identity)
        resident = self._residents.get(root)
        if resident is None or resident.strength is Strength.KEY:
            _refuse_without_owner(resident, identity)
        resident = resident or self._served(root, identity.strength)
        if root == identity.name:
            return resident, ""
        self._parents[identity.name] = root
        resident.children.add(identity.name)
        return resident, identity.name

    def _root(self, identity: Identity) -> str:
        name = identity.parent or identity.name
        return self._parents.get(name, name)

    def _finish(self, resident: Resident, child: str) -> None:
        if not child:
            self.end(resident)
            return
        self._parents.pop(child, None)
        resident.children.discard(child)
        resident.session.release_child(child)

    def _served(self, name: str, strength: Strength) -> Resident:
        id_ = self._new_id()
        if self._books is None:
            raise Refused("nobody is served here but programs that have a key", status=403, code="forbidden")
        books = self._books
        resident = self._enter(name, strength, Terms(), id_, ended=partial(_has_served, books))
        books.begun(id_, GroupId(id_))
        return resident

    def _enter(
        self,
        name: str,
        strength: Strength,
        terms: Terms,
        id_: ProgramId,
        *,
        ended: Callable[[Session], None],
        entrance: Entrance | None = None,
    ) -> Resident:
        if name in self._residents:
            raise Refused(f"program {name!r} is here already; choose another name", status=409)
        if len(self._residents) >= self._bounds.programs:
            raise Refused(
                f"{self._bounds.programs} programs are here already; try again later, or raise "
                "gateway.programs",
                status=429,
                code="over_capacity",
                retry_after_s=1.0,
            )
        home = self._home(strength, terms)
        homes = {
            role: replace(home, admit=other.admit, around=other.around, waits_of=partial(_waits_of, other))
            for role, other in self._roles.items()
        }
        session = Session(id_, terms, home, ended=ended, entrance=entrance, homes=homes)
        resident = self._residents[name] = Resident(session, Flights(self._running), strength, name)
        return resident

    def _home(self, strength: Strength, terms: Terms) -> LaneHome:
        weak = strength is Strength.WEAK
        return LaneHome(
            admit=self._dispatcher.admit,
            waits_of=partial(_waits_of, self._dispatcher),
            give_back=self._give_back,
            around=self._dispatcher.around,
            lease_s=self._lifetimes.weak_hold_s if weak else self._lifetimes.hold_s,
            routed_experts=terms.routed_experts,
            turn_tokens=self._bounds.turn_tokens,
            total_tokens=terms.limits.total_tokens if terms.limits else None,
        )

    def _give_back(self, work: Callable[[], Awaitable[None]]) -> None:
        async def bounded() -> None:
            with anyio.move_on_after(self._dispatcher.around.timeouts.release_s):
                await work()

        self._returning.start_soon(bounded)

    def _patience_s(self, strength: Strength) -> float:
        if strength is Strength.KEY:
            return float("inf")
        return self._lifetimes.forget_s / (10 if strength is Strength.WEAK else 1)

    def _new_id(self) -> ProgramId:
        return ProgramId(f"{self._prefix}/{next(self._numbers)}")


def _waits_of(dispatcher: Dispatcher, program_id: ProgramId) -> dict[str, float]:
    return {str(reason): s for reason, s in dispatcher.scheduler.waits_of(program_id).items()}


def _has_served(books: Books, session: Session) -> None:
    books.ended(session.trajectory(task_id="gateway", outcome=SERVED))


def _refuse_without_owner(resident: Resident | None, identity: Identity) -> None:
    """A program that has an owner is begun by that, and reached by its key alone."""
    if resident is None and identity.strength is Strength.KEY:
        raise Refused(
            f"the program of this key, {identity.name}, is over; ask its owner for another key",
            status=401,
            code="program_over",
        )
    if resident is not None and identity.strength is not Strength.KEY:
        raise Refused(
            f"program {resident.name[:80]!r} is reached by the key that was made for it; choose another name",
            status=403,
            field="program_id",
            code="owned",
        )
