"""Which of several tools that were called together is waited for longest, as far as it is known."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class _Times:
    calls: int = 0
    total_s: float = 0.0


class ToolPace:
    """Mean time of a call, by tool."""

    def __init__(self) -> None:
        self._times: dict[str, _Times] = {}

    def took(self, tool: str, elapsed_s: float) -> None:
        times = self._times.setdefault(tool, _Times())
        times.calls += 1
        times.total_s += elapsed_s

    def slowest(self, tools: Iterable[str]) -> str:
        """The first of the slowest; "" for none.  One that was never called counts as fast."""
        return max(tools, key=self._mean_s, default="")

    def _mean_s(self, tool: str) -> float:
        times = self._times.get(tool)
        return times.total_s / times.calls if times else 0.0
