"""When a program that holds something was last heard of, and for how long that is enough."""

import heapq
from collections.abc import Mapping

from sostenuto.scheduler.program import NEVER, Program
from sostenuto.types import ProgramId


class Leases:
    """A heap of ends; one that was renewed is entered anew when its old end comes up."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, ProgramId]] = []

    @property
    def next_s(self) -> float:
        """When to look again."""
        return self._ends[0][0] if self._ends else NEVER

    def begin(self, program: Program, now_s: float) -> None:
        program.expires_s = now_s + program.lease_s
        heapq.heappush(self._ends, (program.expires_s, program.id))

    def renew(self, program: Program, now_s: float) -> None:
        """Nothing to do for one that has no lease yet, or whose end was said."""
        if program.expires_s != NEVER:
            program.expires_s = now_s + program.lease_s

    def expired(self, programs: Mapping[ProgramId, Program], now_s: float) -> list[ProgramId]:
        """Those whose lease has ended, each said once."""
        expired: list[ProgramId] = []
        while self.next_s <= now_s:
            _, program_id = heapq.heappop(self._ends)
            program = programs.get(program_id)
            if program is None:
                continue
            if program.expires_s <= now_s:
                program.expires_s = NEVER
                expired.append(program_id)
            elif program.expires_s != NEVER:
                heapq.heappush(self._ends, (program.expires_s, program_id))
        return expired
