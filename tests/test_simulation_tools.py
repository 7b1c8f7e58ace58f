"""The simulated tool server: queues, rungs, and what sandboxes take of the machine."""

import pytest

from simulated import plan
from sostenuto.runtime.simulation.clock import EventClock
from sostenuto.runtime.simulation.plan import PlannedTurn
from sostenuto.runtime.simulation.profile import ToolServerProfile
from sostenuto.runtime.simulation.tools import SimulatedTools
from sostenuto.scheduler.events import SandboxClaim
from sostenuto.types import ProgramId, SandboxRung

A, B = ProgramId("a"), ProgramId("b")
CALL = PlannedTurn(10, "bash", 2.0)


class Server:
    """A tool server on a clock of its own; `log` says what was told, and when."""

    def __init__(self, *, bash: int = 8, **figures: float) -> None:
        self.clock = EventClock()
        profile = ToolServerProfile.model_validate(figures)
        self.tools = SimulatedTools(profile, {"bash": bash}, self.clock)
        self.log: list[tuple[str, float, float]] = []

    def told(self, what: str):
        def note(seconds: float) -> None:
            self.log.append((what, self.clock.now_s(), seconds))

        return note

    def prepare(self, *programs: ProgramId, spike: int = 0) -> None:
        claim = SandboxClaim(memory_bytes=100, disk_bytes=7)
        for program in programs:
            one = plan(program, prepare_s=1.0, sandbox=claim, spike_bytes=spike)
            self.tools.prepare(one, self.told(f"prepared {program}"))

    def call(self, program: ProgramId, spike: int = 0) -> None:
        self.tools.call(plan(program, spike_bytes=spike), CALL, self.told(f"returned {program}"))

    def move(self, program: ProgramId, rung: SandboxRung) -> None:
        self.tools.move(program, rung, self.told(f"{rung} {program}"))


def test_environments_are_made_so_many_at_a_time():
    server = Server(prepare_concurrency=1)
    server.prepare(A, B)
    server.clock.run()
    assert server.log == [("prepared a", 1.0, 0.0), ("prepared b", 2.0, 1.0)]


def test_calls_of_a_tool_wait_for_one_another_and_say_how_long():
    server = Server(bash=1)
    server.prepare(A, B)
    server.clock.run()
    server.call(A)
    server.call(B)
    server.clock.run()
    assert server.log[2:] == [("returned a", 3.0, 0.0), ("returned b", 5.0, 2.0)]


def test_a_place_that_was_waited_for_in_vain_is_given_on():
    server = Server(bash=1)
    server.prepare(A, B, ProgramId("c"))
    server.clock.run()
    for program in (A, B, ProgramId("c")):
        server.call(program)
    server.tools.release(B)
    server.tools.cancel(A)
    server.clock.run()
    assert server.log[3:] == [("returned c", 3.0, 0.0)]


def test_a_sandbox_takes_its_memory_until_it_is_released():
    server = Server()
    server.prepare(A, B)
    server.clock.run()
    assert (server.tools.usage.memory_bytes, server.tools.usage.disk_bytes) == (200, 14)
    assert server.tools.release(A) == 1.0
    assert server.tools.release(A) == 0.0
    usage = server.tools.usage
    assert (usage.sandboxes, usage.memory_bytes, usage.disk_bytes) == (1, 100, 7)
    assert (usage.peak_sandboxes, usage.peak_memory_bytes, usage.peak_disk_bytes) == (2, 200, 14)


def test_a_tool_takes_more_memory_while_it_runs():
    server = Server()
    server.prepare(A)
    server.clock.run()
    server.call(A, spike=50)
    server.clock.run()
    assert (server.tools.usage.memory_bytes, server.tools.usage.peak_memory_bytes) == (100, 150)


def test_one_released_before_it_was_made_took_nothing():
    server = Server(prepare_concurrency=1)
    server.prepare(A, B)
    assert server.tools.release(B) == 0.0
    server.clock.run()
    assert server.log == [("prepared a", 1.0, 0.0)]
    assert server.tools.usage.peak_sandboxes == 1


@pytest.mark.parametrize(
    ("rung", "sandboxes", "memory"),
    [(SandboxRung.PAUSED, 1, 100), (SandboxRung.RECLAIMED, 1, 0), (SandboxRung.SNAPSHOTTED, 0, 0)],
)
def test_each_rung_frees_what_it_says(rung: SandboxRung, sandboxes: int, memory: int):
    server = Server()
    server.prepare(A)
    server.clock.run()
    server.move(A, rung)
    server.clock.run()
    usage = server.tools.usage
    assert (usage.sandboxes, usage.memory_bytes, usage.disk_bytes) == (sandboxes, memory, 7)


def test_a_move_takes_its_time():
    server = Server(snapshot_s=3.0, restore_s=5.0)
    server.prepare(A)
    server.clock.run()
    server.move(A, SandboxRung.SNAPSHOTTED)
    server.move(A, SandboxRung.RUNNING)
    server.clock.run()
    assert server.log[1:] == [("snapshotted a", 4.0, 3.0), ("running a", 9.0, 5.0)]


def test_a_call_brings_the_sandbox_back_first():
    server = Server(snapshot_s=3.0, restore_s=5.0)
    server.prepare(A)
    server.clock.run()
    server.move(A, SandboxRung.SNAPSHOTTED)
    server.call(A)
    server.clock.run()
    assert server.log[2:] == [("returned a", 11.0, 8.0)]
    assert server.tools.usage.memory_bytes == 100


def test_a_sandbox_moves_only_after_its_tool_has_returned():
    server = Server(pause_s=1.0)
    server.prepare(A)
    server.clock.run()
    server.call(A)
    server.move(A, SandboxRung.PAUSED)
    server.clock.run()
    assert server.log[1:] == [("returned a", 3.0, 0.0), ("paused a", 4.0, 1.0)]
