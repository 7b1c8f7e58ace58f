"""Programs of a server that died, as far as anyone may still ask for them.

Their environments and sandboxes ended with the server.  What is left is what their calls came to: until the
program is released or prepared anew, its owner's lease ends, or the time for which results are kept is over.
"""

from collections import defaultdict
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from sostenuto.errors import SostenutoError
from sostenuto.tools.edge import Edge
from sostenuto.tools.journal import Journal, Kind, ResultRow
from sostenuto.tools.keeping import calls_of, scores_of
from sostenuto.tools.program import Program
from sostenuto.tools.results import ResultLog
from sostenuto.tools.wire import Reward
from sostenuto.types import ProgramId, ToolResult


@dataclass(frozen=True, slots=True)
class Logs:
    """Makes the result logs of programs."""

    journal: Journal
    edge: Edge
    max_bytes: int

    def calls(self, program_id: ProgramId) -> ResultLog[ToolResult]:
        return ResultLog(self.max_bytes, _result_bytes, calls_of(program_id, self.journal, self.edge))

    def scores(self, program_id: ProgramId) -> ResultLog[Reward]:
        return ResultLog(self.max_bytes, _reward_bytes, scores_of(program_id, self.journal, self.edge))


@dataclass(frozen=True, slots=True)
class Remainder:
    """What is left of one program."""

    id: ProgramId
    owner: str
    calls: ResultLog[ToolResult]
    scores: ResultLog[Reward]


class Remains:
    """Read from the journal once.  Written by the program table alone."""

    def __init__(self, journal: Journal, logs: Logs) -> None:
        self._journal = journal
        rows = defaultdict[tuple[str, Kind], list[ResultRow]](list)
        for row in journal.left.results:
            rows[row.program, row.kind].append(row)
        self._left = {
            (program_id := ProgramId(name)): Remainder(
                program_id, owner, logs.calls(program_id), logs.scores(program_id)
            )
            for name, owner in journal.left.programs.items()
        }
        for remainder in self._left.values():
            remainder.calls.restore(rows[remainder.id, Kind.CALL])
            remainder.scores.restore(rows[remainder.id, Kind.REWARD])

    @property
    def owners(self) -> AbstractSet[str]:
        return {remainder.owner for remainder in self._left.values()}

    def get(self, program_id: ProgramId) -> Remainder | None:
        return self._left.get(program_id)

    def hand_over(self, program: Program, *, continues: bool) -> None:
        """A program comes under an id that may be here: it takes up what is recorded, or that is dropped."""
        remainder = self._left.get(program.id)
        if remainder is None:
            return
        if continues and remainder.owner == program.owner:
            del self._left[program.id]
            program.calls, program.scores = remainder.calls, remainder.scores
        else:
            self.drop(program.id)

    def drop(self, program_id: ProgramId) -> None:
        """Forget the program; fine when it is not here."""
        if self._left.pop(program_id, None) is not None:
            self._journal.program_went(program_id)

    def drop_of(self, owner: str) -> None:
        for program_id in [one.id for one in self._left.values() if one.owner == owner]:
            self.drop(program_id)

    def drop_all(self) -> None:
        for program_id in list(self._left):
            self.drop(program_id)


def _result_bytes(outcome: ToolResult | SostenutoError) -> int:
    return len(outcome.content.encode()) if isinstance(outcome, ToolResult) else len(str(outcome))


def _reward_bytes(outcome: Reward | SostenutoError) -> int:
    return sum(map(len, outcome.metrics)) if isinstance(outcome, Reward) else len(str(outcome))
