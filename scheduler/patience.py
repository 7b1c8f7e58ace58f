"""How long a program may be passed by others, and the bound on its wait that follows.

Runnable programs are kept in the order in which they became runnable.  One that has waited for `patience_s`
is due: an engine is kept clear for it, nothing else starts there, and KV is taken for it whatever that costs.

    bound = patience + (ceil(ahead / engines) + 1) * longest turn

`ahead` were runnable before it.  In the worst case each of them is due, needs an engine of its own, and runs
one turn there; what decodes when the engine is claimed ends its turn first.
"""

from itertools import islice
from math import ceil

from sortedcontainers import SortedDict

from sostenuto.scheduler.program import Program
from sostenuto.types import ProgramId


class Patience:
    """Everybody who is runnable, longest waiting first."""

    def __init__(self) -> None:
        # Not a dict: it passes over gaps to find its first, and is copied whole when it grows.
        self._line = SortedDict[int, Program]()
        self._places: dict[ProgramId, tuple[int, int]] = {}
        """Place in the line, and how many stood before it."""
        self._came = 0
        self.longest_turn_s = 0.0
        self.longest_bound_s = 0.0
        """Of the programs that were served so far."""
        self.longest_wait_s = 0.0

    def __len__(self) -> int:
        return len(self._line)

    def __contains__(self, program: Program) -> bool:
        return program.id in self._places

    def everybody(self) -> list[Program]:
        return list(self._line.values())

    def began_to_wait(self, program: Program) -> None:
        """Nothing to do for one that waits already: it keeps its place."""
        if program.id not in self._places:
            self._came += 1
            self._places[program.id] = self._came, len(self._line)
            self._line[self._came] = program

    def stopped_waiting(self, program: Program) -> None:
        place = self._places.pop(program.id, None)
        if place is not None:
            del self._line[place[0]]

    def is_anybody_due(self, until_s: float) -> bool:
        return len(self._line) > 0 and self._line.peekitem(0)[1].runnable_since_s <= until_s

    def due(self, until_s: float, most: int) -> list[Program]:
        """Those who have been runnable since `until_s` or longer, longest first."""
        longest = islice(self._line.values(), most)
        return [program for program in longest if program.runnable_since_s <= until_s]

    def served(self, program: Program, now_s: float, patience_s: float, engines: int) -> None:
        """It stops waiting because its turn begins: keep the bound, and the wait itself."""
        self.longest_bound_s = max(self.longest_bound_s, self.bound_s(program, patience_s, engines))
        self.longest_wait_s = max(self.longest_wait_s, now_s - program.runnable_since_s)

    def bound_s(self, program: Program, patience_s: float, engines: int) -> float:
        """The longest that `program`, which waits, may have to."""
        return patience_s + (ceil(self._places[program.id][1] / engines) + 1) * self.longest_turn_s

    def turn_took(self, seconds: float) -> None:
        self.longest_turn_s = max(self.longest_turn_s, seconds)
