"""Programs of a server that died, as far as anyone may still ask for them.

Their environments and sandboxes ended with the server.  What is left is what their calls came to and, for
those whose sandbox was snapshotted, what they can go on from: until the program is released or prepared anew,
its owner's lease ends, or the time for which results are kept is over.

A newer epoch of the owner's name takes over what can go on, and nobody else does.
"""

from collections import defaultdict
from collections.abc import Callable, Collection
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from sostenuto.errors import SostenutoError, ToolServerError
from sostenuto.sandbox.protocol import Snapshot
from sostenuto.tools.edge import Edge
from sostenuto.tools.journal import Journal, Kind, RestRow, ResultRow
from sostenuto.tools.keeping import calls_of, scores_of
from sostenuto.tools.leases import split_owner
from sostenuto.tools.program import Program
from sostenuto.tools.refused import Refused
from sostenuto.tools.rests import Rest, rest_of
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


@dataclass(slots=True, eq=False)
class Remainder:
    """What is left of one program."""

    id: ProgramId
    owner: str
    calls: ResultLog[ToolResult]
    scores: ResultLog[Reward]
    rest: RestRow | None = None


class Remains:
    """Read from the journal once.  Written by the program table alone."""

    def __init__(self, journal: Journal, logs: Logs, forget: Callable[[Snapshot], None]) -> None:
        """`forget` begins to remove a snapshot, and sees to it that it is."""
        self._journal = journal
        self._forget = forget
        rows = defaultdict[tuple[str, Kind], list[ResultRow]](list)
        for row in journal.left.results:
            rows[row.program, row.kind].append(row)
        self._left = {
            (program_id := ProgramId(name)): Remainder(
                program_id,
                owner,
                logs.calls(program_id),
                logs.scores(program_id),
                journal.left.rests.get(name),
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
            self._forget_rest(remainder)
            self._take_up(program, remainder)
        else:
            self.drop(program.id)

    def rest(self, program_id: ProgramId, owner: str, seen: Collection[str]) -> Rest:
        """What the owner's program can go on from; ToolServerError, with the reason, when it cannot."""
        remainder = self._left.get(program_id)
        if remainder is None:
            raise Refused(f"program {program_id}: nothing of it is left here to go on from", status=404)
        if remainder.owner != owner:
            raise Refused(f"program {program_id} belongs to {remainder.owner}", status=409)
        try:
            calls = remainder.calls
            return rest_of(remainder.rest, calls.ended, calls.unknown | remainder.scores.unknown, seen)
        except ToolServerError as error:
            raise Refused(f"program {program_id} cannot go on: {error}", status=410) from error

    def go_on(self, program: Program) -> None:
        """A program goes on from its `rest`: it takes up all that is left of it."""
        self._take_up(program, self._left[program.id])
        program.standing.may_be_there = True

    def _take_up(self, program: Program, remainder: Remainder) -> None:
        del self._left[program.id]
        program.calls, program.scores = remainder.calls, remainder.scores

    def _forget_rest(self, remainder: Remainder) -> None:
        rest, remainder.rest = remainder.rest, None
        if rest is not None:
            self._journal.rest_went(remainder.id)
            if not rest.why_not:
                self._forget(Rest.model_validate_json(rest.content).snapshot)

    def pass_on(self, owner: str, heir: str) -> None:
        """What the owner's programs could go on from is the heir's, of the same name, from now on."""
        assert split_owner(owner)[0] == split_owner(heir)[0]
        for remainder in self._left.values():
            if remainder.owner == owner and remainder.rest is not None:
                remainder.owner = heir
                self._journal.program_came(remainder.id, heir)

    def drop(self, program_id: ProgramId) -> None:
        """Forget the program; fine when it is not here."""
        remainder = self._left.pop(program_id, None)
        if remainder is not None:
            self._forget_rest(remainder)
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
