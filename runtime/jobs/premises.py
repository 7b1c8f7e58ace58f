"""What all jobs of a run share, and what they say."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from sostenuto.runtime.config import RuntimeConfig
from sostenuto.runtime.dispatcher import Dispatcher
from sostenuto.runtime.engine_pool import EnginePool
from sostenuto.runtime.engines.client import Tap
from sostenuto.runtime.jobs.events import JobEvent
from sostenuto.runtime.jobs.late import AwaitedRewards
from sostenuto.runtime.jobs.rewarding import LateRewards
from sostenuto.runtime.journal import Journal
from sostenuto.runtime.ledger import Ledger
from sostenuto.runtime.program import ToolServer
from sostenuto.runtime.rollouts import Runner
from sostenuto.runtime.run_directory import RunDirectory
from sostenuto.scheduler.events import ToolServerJoined
from sostenuto.types import Version

Say = Callable[[JobEvent], None]
Around = Callable[[Runner, Dispatcher], Runner]
"""Wraps whoever runs a job's programs."""


@dataclass(frozen=True, slots=True)
class Premises:
    """What all jobs of a run share."""

    config: RuntimeConfig
    run: RunDirectory
    journal: Journal
    ledger: Ledger
    tools: ToolServer
    isolation: str
    limiting: Callable[[Callable[[ToolServerJoined], None]], AbstractContextManager[None]]
    """Tells, within the block, what sandboxes may take together, whenever that changes."""
    new_version: Callable[[], Version]
    """A version that was never used in this run."""
    engines: EnginePool
    awaited: AwaitedRewards = field(default_factory=AwaitedRewards)
    """Programs whose rewards come after their end."""
    tap: Tap | None = None
    """Sees the bytes on the engine's socket; for checks that compare records with them."""

    def awaiting(self, rule: LateRewards | None, say: Say, around: Around | None = None) -> Around:
        """`around`, and beyond it the wait for rewards that come after a program's end."""

        def awaiting(runner: Runner, dispatcher: Dispatcher) -> Runner:
            inner = around(runner, dispatcher) if around else runner
            return self.awaited.around(inner, rule, dispatcher.around.renderer, say)

        return awaiting
