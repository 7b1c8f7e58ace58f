"""A shell that feeds one policy events by hand and remembers what it was told."""

from sostenuto.scheduler.actions import Action, Decode, Prepare
from sostenuto.scheduler.events import (
    Answered,
    EngineJoined,
    Event,
    Prepared,
    Submitted,
    Tick,
    ToolReturned,
    TurnCost,
    TurnEnded,
)
from sostenuto.scheduler.frame import Frame
from sostenuto.scheduler.kv import Footprint, Segment
from sostenuto.types import EngineId, ProgramId, Version


class Hand:
    """Programs are named by short words; every one keeps its context between events."""

    def __init__(
        self, policy: Frame, *pools: int | None, concurrency: int = 256, host: tuple[int, float] = (0, 0.0)
    ) -> None:
        self.policy = policy
        self.now_s = 0.0
        self.told: list[Action] = []
        self.where: dict[str, str] = {}
        self.turn: dict[str, int] = {}
        for index, pool in enumerate(pools):
            engine = EngineId(f"e{index}")
            self.feed(
                EngineJoined(
                    engine,
                    Version(0, 0),
                    pool,
                    concurrency,
                    prefill_tokens_s=1000.0,
                    host_tokens=host[0],
                    host_tokens_s=host[1],
                )
            )

    def feed(self, event: Event, at_s: float | None = None) -> list[Action]:
        """What the policy says to it, after every Tick that is due before."""
        if at_s is not None:
            self.wakes(at_s)
        return self._apply(event)

    def _apply(self, event: Event) -> list[Action]:
        actions = self.policy.apply(event, self.now_s)
        for action in actions:
            if isinstance(action, Decode):
                self.where[action.program_id] = action.engine_id
                self.turn[action.program_id] = action.turn
        self.told += actions
        return actions

    def come(
        self,
        name: str,
        tokens: int,
        *,
        shared: tuple[Segment, ...] = (),
        turn_tokens: int = 0,
        at_s: float | None = None,
    ) -> list[Action]:
        """Submitted, and its environment is ready at once."""
        footprint = Footprint(tokens - sum(s.tokens for s in shared), shared)
        submitted = self.feed(Submitted(ProgramId(name), 1e9), at_s)
        assert Prepare(ProgramId(name)) in submitted
        return self.feed(Prepared(ProgramId(name), footprint, turn_tokens))

    def acts(
        self,
        name: str,
        tokens: int,
        *,
        tool: str = "bash",
        cost: TurnCost | None = None,
        at_s: float | None = None,
    ) -> list[Action]:
        event = TurnEnded(ProgramId(name), self.turn[name], Footprint(tokens), (tool,), cost)
        return self.feed(event, at_s)

    def returns(self, name: str, tokens: int, *, at_s: float | None = None) -> list[Action]:
        return self.feed(ToolReturned(ProgramId(name), self.turn[name], Footprint(tokens), 0), at_s)

    def answers(self, name: str, *, at_s: float | None = None) -> list[Action]:
        return self.feed(Answered(ProgramId(name)), at_s)

    def wakes(self, until_s: float) -> list[Action]:
        """Every Tick that the policy asks for up to `until_s`; returns what it said at them."""
        said: list[Action] = []
        while (due_s := self.policy.wake_at_s()) is not None and due_s <= until_s:
            self.now_s = max(due_s, self.now_s)
            said += self._apply(Tick())
        self.now_s = until_s
        return said


def decoded(actions: list[Action]) -> list[str]:
    return [action.program_id for action in actions if isinstance(action, Decode)]
