"""One conversation of a program: its record, and its place in the scheduler while it has one.

Invariants:
- One call at a time.  It decodes only on a grant of the scheduler, and reports every change of phase.
- A call that ends without a reply, however it ends, leaves the lane without place and KV; its record keeps
  what engines were sent and returned, and the next call takes a new place.
- Between calls the program acts: its KV is held until the scheduler gives it up, or the lease ends.
"""

from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import anyio

from sostenuto.errors import ProgramError, VersionUnavailable
from sostenuto.records import Experts, Sequence
from sostenuto.runtime.drive import Surroundings
from sostenuto.runtime.engines.wire import GenerateReply, GenerateRequest, Spans
from sostenuto.runtime.gateway.record import called, record_for
from sostenuto.runtime.gateway.turn import Ask, Refused, Standing, Told
from sostenuto.runtime.place import Place
from sostenuto.runtime.turn_costs import cost_of, used_by
from sostenuto.runtime.turn_stream import TurnStream, joined, unserved, versions_of
from sostenuto.scheduler.actions import Decode, Refuse, Unserved
from sostenuto.scheduler.events import Heard, Interrupted, Prepared, Submitted, ToolReturned, TurnEnded
from sostenuto.scheduler.kv import Footprint
from sostenuto.scheduler.requirements import Requirement
from sostenuto.types import EngineId, ProgramId, Usage, Version


@dataclass(frozen=True, slots=True)
class LaneHome:
    """What a lane has of the gateway."""

    admit: Callable[[Submitted, Callable[[str], None]], Place]
    waits_of: Callable[[ProgramId], dict[str, float]]
    give_back: Callable[[Callable[[], Awaitable[None]]], None]
    """Runs what gives something back, whoever goes away meanwhile."""
    around: Surroundings
    lease_s: float
    """An idle lane keeps its place so long."""
    turn_tokens: int
    """Of a reply for which the client sets no limit: the scheduler keeps KV clear for as many."""
    routed_experts: bool = False
    total_tokens: int | None = None
    """Of one conversation; None: as many as the model's context has."""


@dataclass(frozen=True, slots=True)
class Entrance:
    """A place that the program's owner has taken before the first call, so that the scheduler counts it."""

    submitted: Submitted
    """Also for whatever place comes after it."""
    place: Place
    """It has had its first grant."""


class Lane:
    """Use `call`; then `close`."""

    def __init__(self, id_: ProgramId, first: Ask, home: LaneHome, entrance: Entrance | None = None) -> None:
        """`entrance`: of the program with this id; the lane gives its place back."""
        self.id = id_
        self.record = record_for(first, home.around.renderer)
        self.usage = Usage()
        self.calls = 0
        self.used_s = home.around.now_s()
        self.is_busy = False
        self.failure: ProgramError | None = None
        """Of the last call, where that was no fault of its own."""
        self._home = home
        self._submitted = (
            entrance.submitted if entrance else Submitted(id_, home.lease_s, has_environment=False)
        )
        self._place = entrance.place if entrance else None
        self._may_prepare = entrance is not None
        """The place is new: the scheduler was told nothing since it was granted."""
        if entrance:
            entrance.place.hand_over(self._lost)
        self._acts_after: int | None = None
        """The turn after which it acts; None: it has no place, or has not decoded there."""
        self._began: Version | None = None
        """What sampled its first token."""
        self._engine_ids: set[EngineId] = set()
        self._released: anyio.Event | None = None
        """Set once the KV of the last place has been given back."""

    def __repr__(self) -> str:
        return f"<Lane {self.id} {self.calls} calls, {len(self.record.token_ids)} tokens>"

    @property
    def engine_ids(self) -> tuple[EngineId, ...]:
        """Engines that may hold KV of it."""
        return tuple(self._engine_ids)

    def sequences(self) -> tuple[Sequence, ...]:
        return self.record.sequences()

    def experts(self) -> tuple[Experts | None, ...]:
        return self.record.experts()

    async def call(self, ask: Ask, *, seed: int, is_last: bool = False, spans: Spans | None = None) -> Told:
        """Sample what `ask` wants; `spans` is called with tokens as they come.

        After the last call the engine does not hold its KV.
        Refused when it is too long or the template refuses it, EngineError and Overloaded as the dispatcher
        says.
        """
        with self._busy():
            standing = self.record.take(ask, at_s=self._home.around.now_s())
            room = self._room(ask)
            try:
                request = partial(self._request, ask, room, seed, hold=not is_last)
                told = await self._sample(standing, room, request, spans, ask.requires)
            except BaseException as error:
                self.failure = error if isinstance(error, ProgramError) else None
                self.close()
                raise
        self.failure = None
        return told

    def keep_lease(self) -> None:
        """To be called more often than the lease ends: a call that runs renews it."""
        if self.is_busy and self._place is not None:
            self._home.around.report(Heard(self.id))

    def close(self) -> None:
        """Give back place and KV.  Safe to call twice; the record stays."""
        place, self._place = self._place, None
        self._acts_after, self._may_prepare = None, False
        if place is not None:
            self._home.around.prompts.remove(self.id)
            place.leave()
        engine_ids, self._engine_ids = self._engine_ids, set[EngineId]()
        if engine_ids:
            self._released = released = anyio.Event()
            self._home.give_back(partial(self._release_kv, engine_ids, released))

    @contextmanager
    def _busy(self) -> Generator[None]:
        assert not self.is_busy, f"{self.id} has a call already"
        self.is_busy = True
        try:
            yield
        finally:
            self.is_busy = False
            self.used_s = self._home.around.now_s()

    async def _sample(
        self,
        standing: Standing,
        room: int,
        request_of: Callable[[Decode], GenerateRequest],
        spans: Spans | None,
        requires: Requirement | None,
    ) -> Told:
        around = self._home.around
        stream = TurnStream((lambda _, span: spans(span)) if spans else None, around.now_s)
        await self._lack_engine(room, requires and requires.of(self._began))
        before = self._home.waits_of(self.id)
        while True:
            grant = await self._granted()
            waited_s = _grown(before, self._home.waits_of(self.id))
            request = request_of(grant)
            began_s = around.now_s()
            self._engine_ids.add(grant.engine_id)
            self.record.sent()
            parts = await stream.sampled(grant.engine_id, request, around.generate)
            if parts:
                break
            if stream.interrupted is not None:
                around.report(Interrupted(self.id, grant.turn, stream.interrupted))
        if not request.hold:
            self._engine_ids.discard(grant.engine_id)
        ended_s = around.now_s()
        turns = [self.record.sampled(part, started_s=began_s, ended_s=ended_s) for part in parts]
        self.calls += 1
        if self._began is None:
            self._began = Version.parse(parts[0].versions[0].version) if parts[0].versions else None
        queued = Usage(prompt_tokens=len(request.token_ids), queue_s=sum(waited_s.values()))
        self.usage += sum(map(used_by, parts), queued)
        reply = joined(parts)
        self._acts_after = grant.turn
        self._report_turn(grant.turn, called(turns[-1], reply), reply)
        prompt = tuple(request.token_ids)
        return Told(
            reply=reply, turn=turns[-1], prompt_token_ids=prompt, standing=standing, waited_s=waited_s
        )

    def _report_turn(self, turn: int, tools: tuple[str, ...], reply: GenerateReply) -> None:
        self._home.around.report(TurnEnded(self.id, turn, self._footprint(), tools, cost_of(reply)))

    async def _lack_engine(self, room: int, requires: Requirement | None) -> None:
        """Tell the scheduler that nothing is missing but an engine."""
        if self._place is not None and self._acts_after is not None:
            turn, self._acts_after = self._acts_after, None
            self.usage += Usage(tool_s=self._home.around.now_s() - self.used_s)
            self._home.around.report(ToolReturned(self.id, turn, self._footprint(), room, requires=requires))
            return
        if not self._may_prepare:
            self.close()
            if self._released is not None:
                # What the next call computes must not be given back with the KV of the last one.
                await self._released.wait()
            self._place = self._home.admit(self._submitted, self._lost)
            await self._place.grant()
        self._may_prepare = False
        self._home.around.prompts.add(self.id, self.record.token_ids)
        self._home.around.report(Prepared(self.id, self._footprint(), room, requires))

    async def _granted(self) -> Decode:
        assert self._place is not None
        grant = await self._place.grant()
        if isinstance(grant, Refuse):
            raise Refused(
                f"this call needs KV of {grant.needed_tokens} tokens, and the largest engine has "
                f"{grant.largest_tokens}; shorten the conversation, ask for fewer tokens, or raise "
                "engine.kv_tokens",
                field="max_tokens",
                code="context_length_exceeded",
            )
        if isinstance(grant, Unserved):
            raise VersionUnavailable(unserved(grant))
        assert isinstance(grant, Decode), grant
        return grant

    def _request(self, ask: Ask, room: int, seed: int, grant: Decode, *, hold: bool) -> GenerateRequest:
        request = GenerateRequest(
            request_id=f"{self.id}/{self.calls}/{grant.turn}",
            program_id=self.id,
            token_ids=self.record.token_ids.copy(),
            max_new_tokens=room,
            sampling=ask.sampling.model_copy(update={"seed": seed}),
            hold=hold,
            priority=ask.priority,
            salt=ask.salt,
            top_logprobs=ask.top_logprobs,
            routed_experts=ask.routed_experts or self._home.routed_experts,
        )
        return request.model_copy(update=versions_of(grant.requires))

    def _lost(self, reason: str) -> None:
        del reason
        if not self.is_busy:
            self.close()

    async def _release_kv(self, engine_ids: set[EngineId], released: anyio.Event) -> None:
        try:
            for engine_id in engine_ids:
                await self._home.around.release(engine_id, self.id)
        finally:
            released.set()

    def _footprint(self) -> Footprint:
        return self._home.around.prompts.footprint(self.id, len(self.record.token_ids))

    def _room(self, ask: Ask) -> int:
        """Tokens that may be sampled; Refused when there is no room for one."""
        length, context = len(self.record.token_ids), self._context_tokens()
        if length >= context:
            raise Refused(
                f"the conversation has {length} tokens, and the context ends at {context}; shorten it",
                field="messages" if ask.messages else "prompt",
                code="context_length_exceeded",
            )
        return min(context - length, ask.max_tokens or self._home.turn_tokens)

    def _context_tokens(self) -> int:
        context, total = self._home.around.context_tokens(), self._home.total_tokens
        return context if total is None else min(context, total)


def _grown(before: dict[str, float], now: dict[str, float]) -> dict[str, float]:
    return {reason: s - before.get(reason, 0.0) for reason, s in now.items() if s > before.get(reason, 0.0)}
