"""What the tool server needs of the processes that run environment code.

A host is one worker process.  It runs the environments of some programs, next to sandboxes that the
server owns and lends to it.  `envs` implements this; `runtime` composes the two.

A host that dies takes its own programs with it and nothing else: every call in flight raises
EnvironmentFailure when its own deadline ended the worker, ToolServerError when a neighbour's did.
"""

from dataclasses import dataclass, field
from typing import Protocol

from sostenuto.sandbox.protocol import Blueprint, Sandbox
from sostenuto.tools.remote.declared import Remote
from sostenuto.tools.setup import Setup
from sostenuto.tools.wire import (
    CallRequest,
    EnvironmentRef,
    Prepared,
    PrepareRequest,
    Reward,
    RewardRequest,
    ToolSchema,
)
from sostenuto.types import ProgramId, ToolResult


@dataclass(frozen=True, slots=True)
class EnvironmentFacts:
    """What an environment class declares before anything of it runs."""

    blueprint: Blueprint | None
    """None: the environment has no sandbox."""
    tools: tuple[ToolSchema, ...]
    remote: tuple[Remote, ...] = ()
    """Tools that other services offer; the tool server calls them itself."""
    setup: Setup = field(default_factory=Setup)
    """What is done in its sandbox first."""


class Host(Protocol):
    """One worker process."""

    @property
    def alive(self) -> bool: ...

    async def prepare(
        self,
        program_id: ProgramId,
        request: PrepareRequest,
        sandbox: Sandbox | None,
        *,
        state: bytes | None = None,
    ) -> Prepared:
        """Make the program's environment and run its `reset`, or its `resume` with what `save` returned."""
        ...

    async def save(self, program_id: ProgramId) -> bytes:
        """What its environment goes on from in another worker; Unsupported when it says that it cannot."""
        ...

    async def call(self, program_id: ProgramId, request: CallRequest) -> ToolResult:
        """Run one tool.  Tool errors, bad arguments and timeouts are results, not exceptions."""
        ...

    async def reward(self, program_id: ProgramId, request: RewardRequest) -> Reward:
        """Score the episode, or raise EnvironmentFailure."""
        ...

    async def release(self, program_id: ProgramId) -> None:
        """Close the program's environment and forget it.  Idempotent."""
        ...


class Hosts(Protocol):
    """The pool of workers; an async context manager that ends them all."""

    async def describe(self, environment: EnvironmentRef) -> EnvironmentFacts:
        """Load the class in a worker and read what it declares; ConfigError names what is wrong with it."""
        ...

    async def choose(self, environment: EnvironmentRef) -> Host:
        """The worker that shall run the next program of this environment; starts one when needed."""
        ...

    @property
    def count(self) -> int: ...
