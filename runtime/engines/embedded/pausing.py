"""Standing still: for whom a pause holds, how long it lasted, and when it is answered.

A request is new until it was admitted once; one that lost its row since then still counts as running.
"""

from collections.abc import Callable, Iterable

from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.runtime.engines.embedded.turn import Turn
from sostenuto.runtime.engines.wire import PauseMode

Paused = Callable[[Refusal | None], None]


class Pausing:
    """Whether an engine is paused, and how.  The core does with its requests what the mode says."""

    def __init__(self) -> None:
        self._mode: PauseMode | None = None
        self._since_s = 0.0
        self._unanswered: list[Paused] = []
        """Calls that wait for the last request that runs."""

    def __repr__(self) -> str:
        return f"<Pausing {self._mode or 'off'}>"

    @property
    def is_paused(self) -> bool:
        return self._mode is not None

    @property
    def is_still(self) -> bool:
        """Whether nothing at all may be computed."""
        return self._mode not in (None, PauseMode.FINISH)

    def holds(self, turn: Turn) -> bool:
        """Whether the request stands still."""
        return self.is_still or (self._mode is PauseMode.FINISH and not turn.is_started)

    def begin(self, mode: PauseMode, answer: Paused, now_s: float) -> None:
        """Pause in `mode`, also when it is paused already."""
        if mode is not PauseMode.FINISH:
            self._overtake(f"the engine was paused with mode {mode.value} meanwhile")
        self._mode, self._since_s = mode, now_s
        self._unanswered.append(answer)

    def end(self) -> None:
        """Idempotent."""
        self._overtake("the engine was resumed meanwhile")
        self._mode = None

    def settle(self, known: Iterable[Turn]) -> None:
        """Answer who waits for the pause, when none of the `known` requests has to run to its end first."""
        if self._unanswered and (self.is_still or not any(turn.is_started for turn in known)):
            answers, self._unanswered = self._unanswered, []
            for answer in answers:
                answer(None)

    def take_s(self, turns: Iterable[Turn], now_s: float) -> float:
        """Add to each request how long it has stood still, and begin to count anew.

        Returns how long the whole engine has.
        """
        for turn in turns:
            self.add_s(turn, now_s)
        stood_s = now_s - self._since_s if self.is_still else 0.0
        self._since_s = now_s
        return stood_s

    def add_s(self, turn: Turn, now_s: float) -> None:
        """Add to the request how long it has stood still since that was last counted."""
        if self.holds(turn):
            turn.pause_s += now_s - max(self._since_s, turn.submitted_s)

    def _overtake(self, why: str) -> None:
        answers, self._unanswered = self._unanswered, []
        for answer in answers:
            answer(Refusal(409, "not_paused", f"mode: finish: {why}", "pause it again"))
