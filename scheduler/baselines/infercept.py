"""InferCept (ICML 24): preserve, swap or discard, whichever wastes the least memory over time.

For a program of C tokens whose tool is expected to run for T seconds, beside C_other tokens of others that
run on its engine, with F(C) the time to prefill C again:

    preserve   T * C
    discard    F(C) * (C + C_other) / 2      chunked: its memory fills while the others wait
    swap       0 within the bandwidth of the lower tier, which works beside the engine

Swap: when the tier has room and the link, after what it has to move already, brings C out and back
within T.  Otherwise preserve while that wastes less than discarding: so long as the tool has run for
less than F(C) * (C + C_other) / 2C, the form in which MARS (2604.26963) states it.  T is the mean of the
tool's calls so far; for a tool without any, that same break-even.  The published system profiles tools
beforehand, and hands its swap budget to the largest waste in each iteration; events come one at a time.

Within an engine, programs go by submission: one that returns keeps its original time of arrival.
"""

from dataclasses import dataclass

from sostenuto.scheduler.actions import Offload
from sostenuto.scheduler.baselines.engine_queue import Key
from sostenuto.scheduler.baselines.pins import PinnedQueue
from sostenuto.scheduler.events import EngineJoined
from sostenuto.scheduler.fleet import EngineSeat
from sostenuto.scheduler.lifecycle import Move
from sostenuto.scheduler.program import Program
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.types import EngineId, ProgramId


@dataclass(slots=True)
class _Tier:
    """An engine's lower tier and the link to it."""

    free_tokens: int
    tokens_s: float
    busy_until_s: float = 0.0

    def back_s(self, tokens: int, now_s: float) -> float:
        """From now until `tokens` are out and back, after what the link has to move before."""
        return max(0.0, self.busy_until_s - now_s) + 2 * tokens / self.tokens_s


class InferCept(PinnedQueue):
    """Preserve, swap or discard."""

    def __init__(self, settings: SchedulerSettings | None = None) -> None:
        super().__init__(settings)
        self._tiers: dict[EngineId, _Tier] = {}
        self._swapped: dict[ProgramId, tuple[_Tier, int]] = {}
        self._calls: dict[str, tuple[int, float]] = {}
        """By tool: how many, and their seconds."""

    def _key(self, program: Program, now_s: float) -> Key:
        return program.rank, 0

    def _new_seat(self, event: EngineJoined) -> EngineSeat:
        if event.host_tokens:
            self._tiers[event.engine_id] = _Tier(event.host_tokens, event.host_tokens_s)
        else:
            self._tiers.pop(event.engine_id, None)
        return super()._new_seat(event)

    def _keep_s(self, program: Program, seat: EngineSeat, now_s: float) -> float:
        tokens = program.footprint.tokens
        others = sum(self._programs[id_].footprint.tokens for id_ in seat.decoding)
        break_even_s = self._reload_s(tokens) * (tokens + others) / (2 * max(1, tokens))
        count, total_s = self._calls.get(program.tool, (0, 0.0))
        expected_s = total_s / count if count else break_even_s
        if self._swap(program, seat, expected_s, now_s):
            return 0.0
        return break_even_s if expected_s <= break_even_s else 0.0

    def _swap(self, program: Program, seat: EngineSeat, expected_s: float, now_s: float) -> bool:
        tier, tokens = self._tiers.get(seat.id), program.footprint.private_tokens
        if tier is None or tokens > tier.free_tokens or tier.back_s(tokens, now_s) > expected_s:
            return False
        tier.free_tokens -= tokens
        tier.busy_until_s = now_s + tier.back_s(tokens, now_s)
        self._swapped[program.id] = tier, tokens
        return True

    def _unpin(self, program: Program, seat: EngineSeat, now_s: float) -> None:
        if program.id not in self._swapped:
            super()._unpin(program, seat, now_s)
            return
        self._said.append(Offload(program.id, seat.id))
        self._give_up_kv(program, Move.EVICT, now_s)

    def _will_start(self, program: Program, seat: EngineSeat, now_s: float) -> None:
        super()._will_start(program, seat, now_s)
        self._comes_back(program)

    def _tool_is_known(self, program: Program, acted_s: float, queued_s: float, now_s: float) -> None:
        del queued_s  # whoever schedules requests sees the whole gap
        count, total_s = self._calls.get(program.tool, (0, 0.0))
        self._calls[program.tool] = count + 1, total_s + acted_s

    def _has_finished(self, program: Program, now_s: float) -> None:
        self._comes_back(program)

    def _comes_back(self, program: Program) -> None:
        tier, tokens = self._swapped.pop(program.id, (None, 0))
        if tier is not None:
            tier.free_tokens += tokens
