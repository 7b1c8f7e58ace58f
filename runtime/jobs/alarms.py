"""What goes wrong in training, said with its number, its threshold and a remedy.  No I/O, no clock."""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from sostenuto.errors import ConfigError
from sostenuto.runtime.jobs.events import Alarm, StepTrained

_AGAIN_AFTER = 10
"""Steps for which an alarm that lasts is not repeated."""


@dataclass(frozen=True, slots=True)
class AlarmSettings:
    """Thresholds.  Shares are means over the last `steps` steps."""

    steps: int = 5
    zero_spread: float = 0.8
    """Share of groups with equal rewards."""
    cut_short: float = 0.5
    """Share of programs that a limit on tokens ended."""
    ratio: float = 10.0
    """The largest ratio of a token's probability, trainer over engine or the other way round."""
    mismatch_k3: float = 0.1
    """Mean estimate of KL(engine || trainer), in nats a token."""
    left_out: float = 0.5
    """Share of tokens that a correction left out or held back."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"alarms: steps is {self.steps}; give at least 1")
        if self.ratio <= 1:
            raise ConfigError(f"alarms: ratio is {self.ratio}; give more than 1")


@dataclass(frozen=True, slots=True)
class _Reading:
    name: str
    value: float
    threshold: float
    remedy: str

    @property
    def rings(self) -> bool:
        return not math.isfinite(self.value) or self.value > self.threshold


class Alarms:
    """Of one job; shown its steps in turn."""

    def __init__(self, settings: AlarmSettings) -> None:
        self._settings = settings
        self._last: deque[StepTrained] = deque(maxlen=settings.steps)
        self._rang: dict[str, int] = {}
        """The step, by name, of those that last."""

    def look(self, step: StepTrained) -> list[Alarm]:
        """Those that begin with this step, or have lasted since ten steps."""
        self._last.append(step)
        readings = [*self._of_step(step)]
        if len(self._last) == self._settings.steps:
            readings += self._of_last()
        ringing = {reading.name: reading for reading in readings if reading.rings}
        self._rang = {name: at for name, at in self._rang.items() if name in ringing}
        new = [r for r in ringing.values() if step.step - self._rang.get(r.name, -math.inf) >= _AGAIN_AFTER]
        self._rang |= {reading.name: step.step for reading in new}
        return [Alarm(step.step, r.name, r.value, r.threshold, r.remedy) for r in new]

    def _of_step(self, step: StepTrained) -> Iterator[_Reading]:
        report, settings = step.report, self._settings
        lower = "lower learner.schedule.learning_rate or clip_norm, and look at the rewards of this step"
        yield _Reading("refused_step", float(bool(report.refused)), 0.0, lower)
        yield _Reading("loss_not_finite", 0.0 if math.isfinite(report.loss) else math.nan, 0.0, lower)
        if report.max_abs_dlogp is not None:
            yield _Reading(
                "ratio", math.exp(min(report.max_abs_dlogp, 50.0)), settings.ratio,
                "compare dtype and quantization of engine and learner; add rejection, or lower max_staleness",
            )  # fmt: skip
        if report.mismatch_k3 is not None:
            yield _Reading(
                "mismatch_k3", report.mismatch_k3, settings.mismatch_k3,
                "engine and trainer disagree on the whole; give a correction, or one dtype for both",
            )  # fmt: skip

    def _of_last(self) -> Iterator[_Reading]:
        settings = self._settings
        seen = [step.flow for step in self._last if step.flow is not None]
        reports = [step.report for step in self._last]
        if seen:
            yield _Reading(
                "zero_spread", sum(flow.zero_spread for flow in seen) / len(seen), settings.zero_spread,
                "tasks are too easy or too hard: change them, raise group_size, or zero_spread = 'replace'",
            )  # fmt: skip
            yield _Reading(
                "cut_short", sum(flow.cut_short for flow in seen) / len(seen), settings.cut_short,
                "raise limits.turn_tokens or total_tokens, or reward shorter answers",
            )  # fmt: skip
        left_out = [report.truncated_share + report.rejected_share for report in reports]
        yield _Reading(
            "left_out", sum(left_out) / len(left_out), settings.left_out,
            "most tokens meet the correction's bounds: lower max_staleness, or find why the engine differs",
        )  # fmt: skip
