"""What a simulated program will do, fixed before it starts: the same for every policy.

Nothing in a plan depends on the scheduler, so two policies are compared on equal work.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from sostenuto.scheduler.events import NO_CLAIM, SandboxClaim
from sostenuto.scheduler.kv import Segment
from sostenuto.types import GroupId, ProgramId


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """One model call and the tool call that follows it."""

    output_tokens: int
    """Generated; at least 1."""
    tool: str | None = None
    """None: the turn answers, and is the last."""
    tool_s: float = 0.0
    """From the start of the call to its result, queues not included."""
    result_tokens: int = 0
    """Appended to the context before the next turn."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One program.  The last of `turns` has no tool, all others have one."""

    id: ProgramId
    group: GroupId
    group_size: int
    shared: tuple[Segment, ...]
    """Prefixes in common with others, outermost first (all programs, then the group)."""
    prompt_tokens: int
    """Its own, after the shared prefixes."""
    turns: tuple[PlannedTurn, ...]
    arrival_s: float = 0.0
    """Used by workloads without `concurrency`."""
    prepare_s: float = 0.0
    """From the start of the environment to its first prompt, queues not included."""
    sandbox: SandboxClaim = NO_CLAIM
    spike_bytes: int = 0
    """Memory beyond the sandbox's claim while a tool runs."""

    @property
    def shared_tokens(self) -> int:
        return sum(segment.tokens for segment in self.shared)

    @property
    def peak_tokens(self) -> int:
        """Of its context, shared prefixes included."""
        appended = sum(turn.output_tokens + turn.result_tokens for turn in self.turns)
        return self.shared_tokens + self.prompt_tokens + appended


@dataclass(frozen=True, slots=True)
class Workload:
    """Programs in the order in which they come."""

    name: str
    programs: tuple[Plan, ...]
    concurrency: int | None = None
    """Closed: the next program comes when one of so many is over.  None: open, at `arrival_s`."""
    tool_concurrency: Mapping[str, int] = field(default_factory=dict[str, int])
    """Calls of that tool which run together; the others wait at the tool server."""
