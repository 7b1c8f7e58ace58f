"""CONCUR (2601.22705): the admission window of congestion control, on KV use and hit rate.

At every report of an engine, with U the share of its pool in use by requests that run and H the hit rate:

    U < 0.2              window + 2
    U > 0.5 and H < 0.2  window * 0.5
    otherwise            as it is

The thresholds and steps are the published ones.  Where the window starts is not published: here at 2.
Every engine has a window of its own, starting when it joins; a program may go in while fewer are inside
than the windows add up to, to the least loaded engine.  A window that closes interrupts nobody: those
inside stay to their last turn.  An engine that does not say how full it is keeps its window.
"""

from sostenuto.scheduler.actions import Action
from sostenuto.scheduler.baselines.window import AdmissionWindow
from sostenuto.scheduler.events import EngineLoaded
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.types import EngineId

LOW_SHARE = 0.2
HIGH_SHARE = 0.5
LOW_HIT_RATE = 0.2
INCREASE = 2.0
DECREASE = 0.5
START = 2.0


class Aimd(AdmissionWindow):
    """Additive increase, multiplicative decrease."""

    def __init__(self, settings: SchedulerSettings | None = None) -> None:
        super().__init__(settings)
        self._windows: dict[EngineId, float] = {}

    def _window(self) -> int:
        return int(sum(self._windows.get(engine_id, START) for engine_id in self._engines))

    def _on_engine_loaded(self, event: EngineLoaded, now_s: float) -> list[Action]:
        del now_s
        if event.used_share is None or event.engine_id not in self._engines:
            return []
        window = self._windows.get(event.engine_id, START)
        if event.used_share < LOW_SHARE:
            window = min(window + INCREASE, float(self._settings.live_programs))
        elif event.used_share > HIGH_SHARE and event.hit_rate is not None and event.hit_rate < LOW_HIT_RATE:
            window = max(1.0, window * DECREASE)
        self._windows[event.engine_id] = window
        return []
