"""Queues of tools, their clock, and what runs."""

from dataclasses import dataclass, field

from sostenuto.tools.claims import Claim
from sostenuto.tools.queues import Call, Queues
from sostenuto.tools.wire import ToolLimits

MIB = 1 << 20
PATIENCE_S = 10.0


@dataclass
class World:
    """Queues, their clock, and what runs."""

    queues: Queues
    now_s: float = 0.0
    order: list[str] = field(default_factory=list[str])
    running: list[Call] = field(default_factory=list[Call])

    def enter(self, program: str, tool: str = "t", priority: int = 0) -> Call:
        call = self.queues.enter(program, tool, priority, now_s=self.now_s)
        self.start()
        return call

    def start(self) -> None:
        started = self.queues.start(self.now_s)
        self.running += started
        self.order += [call.program_id for call in started]

    def finish(self, call: Call | None = None) -> None:
        call = call or self.running[0]
        if call in self.running:
            self.running.remove(call)
        self.queues.leave(call)
        self.start()

    def later(self, seconds: float) -> None:
        self.now_s += seconds
        self.start()


def world(
    *, cpus: float = 4, memory_bytes: int = 1024 * MIB, queue_limit: int = 10_000, **tools: ToolLimits
) -> World:
    budget = Claim(round(cpus * 1000), memory_bytes)
    queues = Queues(budget, patience_s=PATIENCE_S, queue_limit=queue_limit)
    for name, limits in tools.items():
        queues.declare(name, limits)
    return World(queues)
