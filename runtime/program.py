"""What one program is started with, and what it needs of a tool server."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pydantic import JsonValue

from sostenuto.runtime.rendering.renderer import Piece
from sostenuto.scheduler.requirements import ANY, Requirement
from sostenuto.tools.wire import EnvironmentRef, Moved, Prepared, Reward
from sostenuto.types import (
    CallId,
    Episode,
    GroupId,
    Limits,
    ProgramId,
    Purpose,
    SandboxRung,
    ToolCall,
    ToolResult,
    Truncation,
    Version,
)


class ToolServer(Protocol):
    """What a program needs of the tool server."""

    async def prepare(
        self,
        program_id: ProgramId,
        environment: EnvironmentRef,
        task: dict[str, JsonValue],
        *,
        seed: int,
        timeout_s: float,
    ) -> Prepared: ...

    async def call(
        self, program_id: ProgramId, call_id: CallId, call: ToolCall, *, timeout_s: float, priority: int = 0
    ) -> ToolResult: ...

    async def reward(
        self, program_id: ProgramId, call_id: CallId, episode: Episode, *, timeout_s: float
    ) -> Reward: ...

    async def move(self, program_id: ProgramId, rung: SandboxRung) -> Moved: ...

    async def release(self, program_id: ProgramId) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """What others did, up to where a turn of the policy begins."""

    id: str
    pieces: tuple[Piece, ...]
    teacher: str = ""
    """Who teaches the turn that continues it; empty: as its task says."""
    task: Mapping[str, JsonValue] = field(default_factory=dict[str, JsonValue])

    @property
    def tokens(self) -> int:
        return sum(len(piece.token_ids) for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class ProgramSpec:
    """Everything that one program is started with."""

    id: ProgramId
    group_id: GroupId
    task_id: str
    purpose: Purpose
    environment: EnvironmentRef
    task: dict[str, JsonValue]
    limits: Limits = field(default_factory=Limits)
    temperature: float = 1.0
    truncation: Truncation = field(default_factory=Truncation)
    """Not where `purpose` is TRAIN: ConfigError."""
    seed: int = 0
    """Of the sampling noise."""
    environment_seed: int = 0
    """The same for all members of a group."""
    group_size: int = 1
    priority: int = 0
    """In the queues of tools: smaller ones have their turn first.  Below 0 the scheduler hurries, too."""
    routed_experts: bool = False
    """Record which experts of a mixture-of-experts model each token was routed to."""
    trainable_until: Version | None = None
    """The newest deployed version under which its record can still be trained; None: no such limit."""
    requires: Requirement = ANY
    """Versions that its turns may be of; VersionUnavailable once none is served, or can still come."""
    history: History | None = None
    """It continues this by one turn, without an environment and without a reward."""

    def __post_init__(self) -> None:
        if self.purpose is Purpose.TRAIN:
            self.truncation.refuse_in_training()


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Deadlines of the parts of a program that are not its own turns."""

    prepare_s: float = 120.0
    reward_s: float = 60.0
    call_margin_s: float = 15.0
    """Beyond a tool's own deadline, before the tool server counts as broken."""
    engine_return_s: float = 15.0
    """When the last engine is lost: how long programs wait for one to join."""
    release_s: float = 15.0
    engine_answer_s: float = 15.0
    """Within which an engine has to say how it is, before it counts as lost."""
