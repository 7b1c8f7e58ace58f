"""A fixed cap: at most N programs on the fleet at one time, first come first served.

What anybody does by hand, and what no published system has been compared with.  The right N depends on
models, engines and programs, and is found by a sweep: the benchmark reports the best one of each cell.
A program that is refused keeps its place until its shell ends it.
"""

from sostenuto.scheduler.baselines.window import AdmissionWindow
from sostenuto.scheduler.settings import SchedulerSettings


class FixedCap(AdmissionWindow):
    """`cap` programs hold an engine, from their first turn to their last."""

    def __init__(self, cap: int, settings: SchedulerSettings | None = None) -> None:
        super().__init__(settings)
        self._cap = cap

    def _window(self) -> int:
        return self._cap
