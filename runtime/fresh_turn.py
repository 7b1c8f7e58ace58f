"""A program that continues a history of others by one turn of the policy.

- There is no environment: what the turn calls is in its record and is not run, and nobody scores it.
- The history is context alone, token by token as it was given; only the turn is trained.
- In scheduler and ledger it is a program like any other, which needs an engine and no environment.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace

from sostenuto.records import Trajectory
from sostenuto.runtime.drive import Drive, Grant, Surroundings
from sostenuto.runtime.program import History, ProgramSpec
from sostenuto.runtime.turn_stream import TurnSpans
from sostenuto.types import StopReason


class FreshTurn(Drive):
    """`run` once, then `close`, as of any drive."""

    def __init__(
        self,
        spec: ProgramSpec,
        history: History,
        around: Surroundings,
        grant: Callable[[], Awaitable[Grant]],
        spans: TurnSpans | None = None,
    ) -> None:
        one_turn = replace(spec, limits=replace(spec.limits, turns=1))
        super().__init__(one_turn, around, grant, spans)
        self._history = history

    async def run(self) -> Trajectory:
        """Sample the turn; ProgramError when that fails."""
        return self.record(await self._until_stopped())

    def record(
        self, stop: StopReason, reward: float | None = None, metrics: dict[str, float] | None = None
    ) -> Trajectory:
        return replace(super().record(stop, reward, metrics), history=self._history.id)

    async def _begin(self) -> None:
        self._conversation.go_on(self._history.pieces, at_s=self._around.now_s())
