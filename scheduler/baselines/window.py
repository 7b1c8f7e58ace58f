"""Admission of whole programs through a window.

A program inside the window has an engine from its first turn to its last; its turns go to its home at
once.  Outside, programs wait in the order of submission.
"""

from abc import abstractmethod

from sostenuto.scheduler.actions import Action
from sostenuto.scheduler.baselines.baseline import Baseline, is_over
from sostenuto.scheduler.fleet import AgeQueue
from sostenuto.scheduler.program import Program, Reason
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.types import ProgramId


class AdmissionWindow(Baseline):
    """How wide the window is, is what a subclass says."""

    def __init__(self, settings: SchedulerSettings | None = None) -> None:
        super().__init__(settings)
        self._inside: set[ProgramId] = set()
        self._turns: dict[ProgramId, None] = {}
        """Of programs inside; empty while an engine takes requests."""
        self._outside = AgeQueue()

    @abstractmethod
    def _window(self) -> int:
        """Programs that may be inside now."""

    def _waiting_count(self) -> int:
        return len(self._outside) + len(self._turns)

    def _became_runnable(self, program: Program, now_s: float) -> None:
        if program.id in self._inside:
            self._turns[program.id] = None
            self._note(program, Reason.VERSION, now_s)
        else:
            self._outside.add(program.rank, program.id)
            self._note(program, Reason.SLOTS, now_s)

    def _leaves(self, program: Program, now_s: float) -> None:
        super()._leaves(program, now_s)
        self._turns.pop(program.id, None)
        self._outside.discard(program.id)
        if is_over(program):
            self._inside.discard(program.id)

    def _decide(self, now_s: float) -> list[Action]:
        return self._go_on(now_s) + self._let_in(now_s)

    def _go_on(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        for program_id in list(self._turns):
            sent = self._dispatch(self._programs[program_id], now_s)
            if sent:
                del self._turns[program_id]
            actions += sent
        return actions

    def _let_in(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        while len(self._inside) < self._window() and (entry := self._outside.oldest()):
            program = self._programs[entry[1]]
            sent = self._dispatch(program, now_s)
            if not sent:
                break
            self._outside.discard(program.id)
            self._inside.add(program.id)
            actions += sent
        return actions
