"""One program of a client: its lanes, and in the end its record.

A client may run several conversations under one name: sub-agents, parallel calls, histories written anew.
Each is a lane.  A call goes to the lane whose conversation it continues; else it rewrites the one it has most
in common with; else it begins one.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from hashlib import sha256
from itertools import count
from secrets import randbits

import anyio

from sostenuto.errors import ProgramError
from sostenuto.records import Experts, Sequence, Trajectory
from sostenuto.runtime.engines.wire import Spans
from sostenuto.runtime.gateway.lane import Entrance, Lane, LaneHome
from sostenuto.runtime.gateway.terms import Terms
from sostenuto.runtime.gateway.turn import Ask, Refused, Told
from sostenuto.types import GroupId, Outcome, ProgramId, Purpose, StopReason, Usage

_LIMITS = {"turn_limit": StopReason.TURN_LIMIT, "context_length_exceeded": StopReason.CONTEXT_FULL}
"""By the code of the call that was refused for it."""
_BUSY_LANES = 64
"""Calls of one program at the same time."""
_SEED_BITS = 31
_SERVED_LANES = 256
"""Of a program that is only served; the longest idle beyond them are forgotten."""


class Session:
    """Use `ask`; then `close`."""

    def __init__(
        self,
        id_: ProgramId,
        terms: Terms,
        home: LaneHome,
        *,
        ended: Callable[["Session"], None],
        entrance: Entrance | None = None,
        homes: Mapping[str, LaneHome] | None = None,
    ) -> None:
        """`ended` is told once, after `close` and the last call.  `entrance`: for the first lane.

        `homes`: of the roles that another model speaks in.
        """
        self.id = id_
        self.terms = terms
        self.used_s = home.around.now_s()
        self.is_over = self._is_told = self._is_stopped = False
        self.limit: StopReason | None = None
        """What the last call was refused for, if it was for a limit."""
        self._home = home
        self._homes = dict(homes or {})
        self._ended = ended
        self._entrance = entrance
        self._calling: set[anyio.CancelScope] = set()
        self._lanes: list[tuple[str, Lane]] = []
        """With the name of the sub-agent that it is of; "" for the program itself."""
        self._roles: dict[ProgramId, str] = {}
        """In which the lanes speak."""
        self._numbers, self._seeds = count(2), count()

    def __repr__(self) -> str:
        return f"<Session {self.id} {len(self._lanes)} lanes>"

    @property
    def lanes(self) -> list[Lane]:
        return [lane for _, lane in self._lanes]

    @property
    def calls(self) -> int:
        return sum(lane.calls for lane in self.lanes)

    @property
    def is_busy(self) -> bool:
        return any(lane.is_busy for lane in self.lanes)

    async def ask(
        self, ask: Ask, *, child: str = "", is_last: bool = False, spans: Spans | None = None
    ) -> Told:
        """Sample; Refused, EngineError and Overloaded as `Lane.call` says.

        `child`: the sub-agent.  `is_last`: no other call of the conversation follows, and its KV can go.
        """
        if self.is_over or self._is_stopped:
            raise _over(self.id)
        try:
            told = await self._ask(self.terms.applied(ask), child, spans, is_last=is_last)
        except Refused as error:
            self.limit = _LIMITS.get(error.code or "")
            raise
        self.limit = None
        return told

    def keep_leases(self) -> None:
        """As `Lane.keep_lease` says."""
        for lane in self.lanes:
            lane.keep_lease()

    def release_child(self, child: str) -> None:
        """A sub-agent is over: what it held comes back; its record stays."""
        for name, lane in self._lanes:
            if name == child and not lane.is_busy:
                lane.close()

    def close(self) -> None:
        """The program is over, once the calls that run have ended.  Safe to call twice."""
        if not self.is_over:
            self.is_over = True
            self._settle()

    async def stop(self) -> None:
        """Refuse further calls, end those that run, and return when there is none any more.

        What lanes hold between their calls stays theirs until `close`.
        """
        self._is_stopped = True
        for scope in self._calling:
            scope.cancel()
        while self.is_busy:  # noqa: ASYNC110 - rare, and over within a few turns of the loop
            await anyio.sleep(0.001)

    @property
    def failure(self) -> ProgramError | None:
        """Of a call that no later one of its conversation has made good."""
        return next((lane.failure for lane in self.lanes if lane.failure is not None), None)

    def trajectory(
        self,
        *,
        task_id: str = "",
        group_id: GroupId | None = None,
        reward: float | None = None,
        stop: StopReason = StopReason.ANSWERED,
        outcome: Outcome | None = None,
    ) -> Trajectory:
        """The record as it stands: every sequence of every lane."""
        told = [lane for lane in self.lanes if lane.sequences()]
        experts = tuple(part for lane in told for part in _padded(lane))
        roles = tuple(self._roles[lane.id] for lane in told for _ in lane.sequences())
        return Trajectory(
            program_id=self.id,
            group_id=group_id or GroupId(self.id),
            task_id=task_id,
            purpose=self.terms.purpose,
            sequences=tuple(sequence for lane in told for sequence in self._sequences(lane)),
            reward=reward,
            stop_reason=stop,
            usage=sum((lane.usage for lane in told), Usage()),
            outcome=outcome,
            metrics={"turns": float(self.calls), "lanes": float(len(told)), **self._turns_by_role()},
            experts=experts if any(part is not None for part in experts) else (),
            roles=roles if any(roles) else (),
        )

    def _sequences(self, lane: Lane) -> tuple[Sequence, ...]:
        """Without a token to train, where its role is not trained."""
        if self.terms.is_trained(self._roles[lane.id]):
            return lane.sequences()
        return tuple(tuple(span.as_context() for span in sequence) for sequence in lane.sequences())

    def _turns_by_role(self) -> dict[str, float]:
        turns: Counter[str] = Counter()
        for lane in self.lanes:
            turns[self._roles[lane.id]] += lane.calls
        return {f"turns_{role}": float(count) for role, count in turns.items() if role}

    async def _ask(self, ask: Ask, child: str, spans: Spans | None, *, is_last: bool) -> Told:
        self._count_turn()
        lane = self._lane_for(ask, child)
        seed = ask.sampling.seed if self.terms.is_seed_of(ask) else self._next_seed()
        self.used_s = self._home.around.now_s()
        with anyio.CancelScope() as scope:
            self._calling.add(scope)
            try:
                return await lane.call(ask, seed=seed, is_last=is_last, spans=spans)
            finally:
                self._calling.discard(scope)
                self.used_s = self._home.around.now_s()
                self._settle()
        raise _over(self.id)

    def _next_seed(self) -> int:
        """Of the sampling noise: another one for each call, the same ones for the same program of a job."""
        if self.terms.seed is None:
            return randbits(_SEED_BITS)
        drawn = sha256(f"{self.terms.seed}/{next(self._seeds)}".encode()).digest()
        return int.from_bytes(drawn[:4]) >> (32 - _SEED_BITS)

    def _count_turn(self) -> None:
        limits = self.terms.limits
        if limits is not None and self.calls >= limits.turns:
            raise Refused(
                f"program {self.id} has had its {limits.turns} turns; raise limits.turns",
                status=429,
                code="turn_limit",
            )

    def _lane_for(self, ask: Ask, child: str) -> Lane:
        if sum(lane.is_busy for lane in self.lanes) >= _BUSY_LANES:
            raise Refused(
                f"program {self.id} has {_BUSY_LANES} calls under way; wait for one to end",
                status=429,
                code="too_many_calls",
            )
        of = [lane for name, lane in self._lanes if name == child and self._roles[lane.id] == ask.role]
        idle = [lane for lane in of if not lane.is_busy]
        nearest = max(idle, key=lambda lane: lane.record.nearness(ask), default=None)
        if nearest is not None and nearest.record.nearness(ask)[0]:
            return nearest
        home, entrance, id_ = self._home, None, self.id
        if ask.role in self._homes:
            home = self._homes[ask.role]
        else:
            entrance, self._entrance = self._entrance, None
        if home is not self._home or id_ in self._roles:
            id_ = ProgramId(f"{self.id}~{next(self._numbers)}")
        lane = Lane(id_, ask, home, entrance)
        self._roles[id_] = ask.role
        self._lanes.append((child, lane))
        return lane

    def _settle(self) -> None:
        """After a call or the end: who gives back what."""
        idle = sorted((lane for lane in self.lanes if not lane.is_busy), key=lambda lane: lane.used_s)
        for lane in idle if self.is_over else ():
            lane.close()
        if self.is_over and self._entrance is not None:
            self._entrance.place.leave()
        if self.terms.purpose is Purpose.SERVE and len(self._lanes) > _SERVED_LANES:
            forgotten = {lane.id for lane in idle[: len(self._lanes) - _SERVED_LANES]}
            self._lanes = [pair for pair in self._lanes if pair[1].id not in forgotten]
            self._roles = {lane.id: self._roles[lane.id] for lane in self.lanes}
        if self.is_over and not self.is_busy and not self._is_told:
            self._is_told = True
            self._ended(self)


def _over(id_: ProgramId) -> Refused:
    return Refused(f"program {id_} is over; begin another one", status=410, code="program_over")


def _padded(lane: Lane) -> tuple[Experts | None, ...]:
    return lane.experts() or (None,) * len(lane.sequences())
