"""What a turn in the tool server's queues costs while many programs wait."""

from time import process_time

from benchmarks.figure import Tell
from sostenuto.tools.claims import Claim
from sostenuto.tools.queues import Queues
from sostenuto.tools.wire import ToolLimits

PROGRAMS = 1000
AT_ONCE = 8


def measure_queues(tell: Tell, *, quick: bool) -> None:
    """Enter, start and leave, with 1,000 programs that always wait, at one tool and at fifty."""
    turns = 2_000 if quick else 20_000
    for tools, target in ((1, "<= 100"), (50, "<= 400")):
        name = f"tools_queue_turn_{PROGRAMS}_waiting_{tools}_tool{'s' if tools > 1 else ''}"
        tell(name, _turn_s(turns, tools) * 1e6, "us", target)


def _turn_s(turns: int, tools: int) -> float:
    """Processor seconds for one turn, where every turn waits for the end of another."""
    queues = Queues(Claim(1000 * AT_ONCE, 1 << 40), patience_s=30.0, queue_limit=2 * PROGRAMS)
    for tool in range(tools):
        queues.declare(f"t{tool}", ToolLimits(cpus=1.0, memory_bytes=1 << 20))
    for program in range(PROGRAMS):
        queues.enter(f"p{program}", f"t{program % tools}", program % 3, now_s=0.0)
    running = queues.start(0.0)
    began_s = process_time()
    for turn in range(1, turns + 1):
        now_s = turn * 0.01
        ended = running.pop(0)
        queues.leave(ended)
        running += queues.start(now_s)
        queues.enter(ended.program_id, ended.tool, ended.priority, now_s=now_s)
        running += queues.start(now_s)
    assert len(running) == AT_ONCE, "the budget is in use at any moment"
    return (process_time() - began_s) / turns
