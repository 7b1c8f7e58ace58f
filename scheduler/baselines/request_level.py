"""Scheduling by request: what a plain proxy or gateway in front of inference engines does.

Every turn goes to an engine at once.  The engine queues it, first come first served, and evicts the
least recently used KV; nobody knows that turns belong to programs.  Three placements:

    round robin   turn by turn, whatever the engines hold
    hash          by the session's key on a hash ring, as the SGLang gateway's `consistent_hashing` does
                  with the routing keys of slime and miles; load plays no part
    sticky        a session's first turn goes to the least loaded engine, and the others follow it there

The session is the program.  An engine that cannot take a turn (no verified version, too small) is
passed over; a gateway leaves it out as unhealthy.
"""

from hashlib import blake2b

from sostenuto.scheduler.actions import Action
from sostenuto.scheduler.baselines.baseline import Baseline
from sostenuto.scheduler.fleet import EngineSeat
from sostenuto.scheduler.program import Program, Reason
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.types import ProgramId


class RequestSticky(Baseline):
    """The least loaded engine at the first turn; the same one from then on."""

    def __init__(self, settings: SchedulerSettings | None = None) -> None:
        super().__init__(settings)
        self._runnable: dict[ProgramId, None] = {}
        """In the order of arrival; empty while an engine takes requests."""

    def _waiting_count(self) -> int:
        return len(self._runnable)

    def _became_runnable(self, program: Program, now_s: float) -> None:
        self._runnable[program.id] = None
        self._note(program, Reason.VERSION, now_s)

    def _leaves(self, program: Program, now_s: float) -> None:
        super()._leaves(program, now_s)
        self._runnable.pop(program.id, None)

    def _decide(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        for program_id in list(self._runnable):
            sent = self._dispatch(self._programs[program_id], now_s)
            if sent:
                del self._runnable[program_id]
            actions += sent
        return actions


class RequestRoundRobin(RequestSticky):
    """Each turn on the next engine."""

    def __init__(self, settings: SchedulerSettings | None = None) -> None:
        super().__init__(settings)
        self._sent = 0

    def _choose(self, program: Program, able: list[EngineSeat]) -> EngineSeat:
        self._sent += 1
        return able[(self._sent - 1) % len(able)]


class RequestHash(RequestSticky):
    """The engine of the session's key; when an engine goes, only its own sessions move."""

    def _choose(self, program: Program, able: list[EngineSeat]) -> EngineSeat:
        return max(able, key=lambda seat: _mixed(program.id, seat.id))


def _mixed(session: str, engine: str) -> bytes:
    return blake2b(f"{session}\0{engine}".encode(), digest_size=8).digest()
