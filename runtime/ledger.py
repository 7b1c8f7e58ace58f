"""The count that closes: every submitted program is running, sealed, or in exactly one outcome.

A sealed program has run to its end and waits for the trainer.  Written by the event loop of the runtime
alone; the journal keeps the same facts on disk, and `Ledger.replay` makes the one from the other.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from sostenuto.errors import SostenutoError
from sostenuto.types import Outcome, OutcomeKind, ProgramId


class LedgerError(SostenutoError):
    """A program was to end twice, or to end without having been submitted: a bug."""


class Stage(StrEnum):
    RUNNING = "running"
    SEALED = "sealed"


@dataclass(frozen=True, slots=True)
class LedgerStatistics:
    """`submitted` is always the sum of all the others."""

    submitted: int
    running: int
    sealed: int
    outcomes: dict[str, int]
    """By outcome with its reason, such as `dropped(stale)`."""

    @property
    def closes(self) -> bool:
        return self.submitted == self.running + self.sealed + sum(self.outcomes.values())


class Ledger:
    def __init__(self) -> None:
        self._open: dict[ProgramId, Stage] = {}
        self._ended: dict[ProgramId, Outcome] = {}
        self._served = 0
        """Counted and not kept: a gateway that runs for long has no end of them."""

    def __repr__(self) -> str:
        s = self.statistics()
        ends = " ".join(f"{name}={count}" for name, count in sorted(s.outcomes.items()))
        return f"<Ledger submitted={s.submitted} running={s.running} sealed={s.sealed} {ends}>"

    @classmethod
    def replay(cls, rows: Iterable[tuple[ProgramId, Stage | Outcome]]) -> "Ledger":
        """From what a journal holds of each program."""
        ledger = cls()
        for program_id, state in rows:
            if isinstance(state, Outcome):
                ledger._keep(program_id, state)
            else:
                ledger._open[program_id] = state
        return ledger

    def submit(self, program_id: ProgramId) -> None:
        if program_id in self._open or program_id in self._ended:
            raise LedgerError(f"{program_id} was submitted before")
        self._open[program_id] = Stage.RUNNING

    def seal(self, program_id: ProgramId) -> None:
        if self._open.get(program_id) is not Stage.RUNNING:
            raise LedgerError(f"{program_id} is sealed, and is not running")
        self._open[program_id] = Stage.SEALED

    def end(self, program_id: ProgramId, outcome: Outcome) -> None:
        if self._open.pop(program_id, None) is None:
            raise LedgerError(f"{program_id} ends as {outcome}, it was {self._ended.get(program_id)}")
        self._keep(program_id, outcome)

    def reopen(self, program_id: ProgramId) -> None:
        """What became of it is void: it has a record, and waits for the trainer again."""
        if program_id not in self._ended:
            raise LedgerError(f"{program_id} has not ended")
        del self._ended[program_id]
        self._open[program_id] = Stage.SEALED

    def _keep(self, program_id: ProgramId, outcome: Outcome) -> None:
        if outcome.kind is OutcomeKind.SERVED:
            self._served += 1
        else:
            self._ended[program_id] = outcome

    def open_programs(self) -> dict[ProgramId, Stage]:
        return dict(self._open)

    def statistics(self) -> LedgerStatistics:
        stages = Counter(self._open.values())
        outcomes = Counter(str(outcome) for outcome in self._ended.values())
        if self._served:
            outcomes[OutcomeKind.SERVED.value] = self._served
        return LedgerStatistics(
            submitted=len(self._open) + len(self._ended) + self._served,
            running=stages[Stage.RUNNING],
            sealed=stages[Stage.SEALED],
            outcomes=dict(outcomes),
        )
