"""Turns on virtual time, and what tools may declare of them."""

from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from sostenuto.errors import ConfigError, Overloaded
from sostenuto.tools.config import ServerConfig
from sostenuto.tools.decorator import tool
from sostenuto.tools.machine import budget, cpus_here, memory_here
from sostenuto.tools.refused import raised, refusal, status_of
from sostenuto.tools.schema import read_tool
from sostenuto.tools.turns import Turns
from sostenuto.tools.wire import CallRequest, ToolLimits, ToolSchema
from sostenuto.types import ProgramId, ToolStatus

A, B = ProgramId("a"), ProgramId("b")
GIB = 1 << 30


def config(**changes: object) -> ServerConfig:
    return ServerConfig.model_validate({"token": "a-token-for-tests-only", **changes})


def turns(limits: ToolLimits, **changes: object) -> Turns:
    made = Turns(config(cpus=1.0, memory_bytes=GIB, **changes))
    for program in (A, B):
        made.know(program, "Env", [schema(limits)])
    return made


def schema(limits: ToolLimits) -> ToolSchema:
    return ToolSchema(name="t", description="", parameters={}, timeout_s=1, limits=limits)


def request(name: str = "t", timeout_s: float = 60) -> CallRequest:
    return CallRequest(call_id="c", name=name, arguments="{}", timeout_s=timeout_s)


async def hold(made: Turns, program: ProgramId, seconds: float, waited_s: list[float]) -> None:
    turn = made.enter(program, request())
    async with turn:
        waited_s.append(turn.queued_s)
        await anyio.sleep(seconds)


@pytest.mark.looptime
async def test_calls_wait_for_each_other_and_know_how_long():
    made, waited_s = turns(ToolLimits(concurrency=1)), list[float]()
    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(hold, made, A, 2.0, waited_s)
    assert waited_s == pytest.approx([0, 2, 4, 6])
    assert not made.waiting()
    assert not made.running()


@pytest.mark.looptime
async def test_a_rate_wakes_by_itself():
    made, waited_s = turns(ToolLimits(rate_per_s=0.5)), list[float]()
    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(hold, made, A, 0.0, waited_s)
    assert waited_s == pytest.approx([0, 2, 4])


@pytest.mark.looptime
@pytest.mark.parametrize("cancelled_at_s", [0.0, 0.5, 1.0, 1.5])
async def test_a_call_that_is_cancelled_at_any_moment_leaves_its_place(cancelled_at_s: float):
    made, waited_s = turns(ToolLimits(concurrency=1)), list[float]()
    async with anyio.create_task_group() as group:
        group.start_soon(hold, made, A, 1.0, waited_s)
        await anyio.lowlevel.checkpoint()
        with anyio.move_on_after(cancelled_at_s):
            await hold(made, B, 1.0, [])
    with anyio.fail_after(0.1):
        await hold(made, A, 0.0, waited_s)
    assert not made.waiting()
    assert not made.running()


@pytest.mark.looptime
async def test_a_call_that_is_begun_and_cancelled_at_once_leaves_its_place():
    made = turns(ToolLimits(concurrency=1))
    first = made.enter(A, request())
    async with anyio.create_task_group() as group:
        group.start_soon(hold, made, B, 10.0, list[float]())
        await anyio.lowlevel.checkpoint()
        first.leave()
        group.cancel_scope.cancel()
    assert not made.running()


@pytest.mark.looptime
async def test_a_program_that_is_forgotten_gives_up_all_its_turns():
    made, waited_s = turns(ToolLimits(concurrency=1)), list[float]()
    held, given_up = made.enter(A, request()), made.enter(A, request())
    async with anyio.create_task_group() as group:
        group.start_soon(hold, made, B, 0.0, waited_s)
        await anyio.sleep(1)
        made.forget(A)
        made.forget(A)
    assert waited_s == [1.0]
    for turn in (held, given_up):
        turn.leave()
    assert not made.running()


@pytest.mark.looptime
async def test_a_deadline_in_the_queue_says_that_the_call_did_not_begin():
    made = turns(ToolLimits(concurrency=1))
    made.enter(A, request())
    turn = made.enter(B, request(timeout_s=3))
    with anyio.move_on_after(3):
        async with turn:
            pass
    late = turn.late()
    assert late.status is ToolStatus.TIMEOUT
    assert late.content == "t did not begin: it waited 3 s for its turn, until its deadline."
    assert (late.queued_s, late.elapsed_s) == (3.0, 0.0)


@pytest.mark.looptime
async def test_a_deadline_while_it_runs_says_how_much_of_it_was_waiting():
    made = turns(ToolLimits(concurrency=1))
    first, turn = made.enter(A, request()), made.enter(B, request(timeout_s=3))
    with anyio.move_on_after(3):
        await anyio.sleep(1)
        first.leave()
        async with turn:
            await anyio.sleep(10)
    late = turn.late()
    assert late.content == "t was ended after 3 s, its deadline, 1 s of which it waited for its turn."
    assert (late.queued_s, late.elapsed_s) == (1.0, 2.0)


@pytest.mark.looptime
async def test_a_name_that_is_no_tool_needs_no_turn():
    made = turns(ToolLimits(concurrency=1))
    async with made.enter(A, request()), made.enter(A, request("made_up")), made.enter(A, request("made_up")):
        assert made.running() == {"Env.t": 1}


@pytest.mark.looptime
async def test_a_queue_that_is_full_refuses_with_429_and_a_time_and_keeps_that_across_the_wire():
    made = turns(ToolLimits(concurrency=1), queue_limit=1)
    made.enter(A, request())
    made.enter(A, request())
    with pytest.raises(Overloaded) as refused:
        made.enter(B, request())
    assert status_of(refused.value) == 429
    again = raised(refusal(refused.value))
    assert isinstance(again, Overloaded)
    assert again.retry_after_s == refused.value.retry_after_s == 1.0


@pytest.mark.looptime
async def test_the_memory_of_a_tool_is_asked_for_now_and_then_and_counts_from_then_on():
    made = turns(ToolLimits())
    assert made.asks_for_memory(A, "t")
    assert not made.asks_for_memory(B, "t")
    assert not made.asks_for_memory(A, "made_up")
    await anyio.sleep(1)
    assert made.asks_for_memory(B, "t")
    made.took(B, "t", 600 << 20)
    made.enter(A, request())
    made.enter(B, request())
    assert made.running() == made.waiting() == {"Env.t": 1}


def test_limits_travel_in_the_schema_and_are_not_shown_to_the_model():
    @tool(concurrency=8, rate_per_s=2.0, burst=4, cpus=0.5, memory_bytes=512 << 20, queue="search")
    def find(query: str) -> str:
        """Find."""
        return query

    made = read_tool(find).schema
    assert made.limits == ToolLimits(
        queue="search", concurrency=8, rate_per_s=2.0, burst=4, cpus=0.5, memory_bytes=512 << 20
    )
    assert ToolSchema.model_validate_json(made.model_dump_json()) == made
    assert "limits" not in str(made.as_function())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"concurrency": 0}, "find: concurrency is 0: Input should be greater than 0"),
        ({"concurrency": 1.5}, "concurrency is 1.5: Input should be a valid integer"),
        ({"rate_per_s": -1.0}, "rate_per_s is -1.0"),
        ({"rate_per_s": float("inf")}, "rate_per_s is inf: Input should be a finite number"),
        ({"burst": 3}, "burst is 3 without a rate; give rate_per_s, too"),
        ({"cpus": -0.5}, "cpus is -0.5"),
        ({"memory_bytes": "1 GB"}, "memory_bytes is '1 GB'"),
        ({"queue": "a b"}, "queue 'a b' is not made of letters"),
        ({"concurency": 3}, "there is no option 'concurency'; did you mean 'concurrency'?"),
        ({"timeout": 3}, "there is no option 'timeout'; did you mean 'timeout_s'?"),
    ],
)
def test_limits_are_checked_at_definition(options: dict[str, object], words: str):
    def find(query: str) -> str:
        """Find."""
        return query

    with pytest.raises(ConfigError) as refused:
        tool(**options)(find)  # pyright: ignore[reportCallIssue, reportArgumentType]
    assert words in str(refused.value)


def test_the_budget_is_what_is_configured_else_what_the_machine_gives():
    given = budget(config(cpus=2.5, memory_bytes=GIB))
    assert (given.millicpus, given.memory_bytes) == (2500, GIB)
    found = budget(config())
    assert found.millicpus > 0
    assert found.memory_bytes > 0


def test_limits_of_cgroups_of_either_version_and_of_those_above_count(tmp_path: Path):
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    v2, v1 = root / "system" / "job", root / "memory" / "pod"
    for folder in (proc, v2, v1, root / "cpu" / "pod"):
        folder.mkdir(parents=True)
    (proc / "cgroup").write_text("5:cpu,cpuacct:/pod\n4:memory:/pod\n3:freezer:/pod\n0::/system/job\n")
    (v2 / "cpu.max").write_text("max 100000\n")
    (root / "system" / "cpu.max").write_text("50000 100000\n")
    (root / "system" / "memory.max").write_text("300000000\n")
    (v2 / "memory.max").write_text("max\n")
    assert cpus_here(proc, root) == 0.5
    assert memory_here(proc, root) == 300_000_000
    (v1 / "memory.limit_in_bytes").write_text("200000000\n")
    (root / "cpu" / "pod" / "cpu.cfs_quota_us").write_text("20000\n")
    (root / "cpu" / "pod" / "cpu.cfs_period_us").write_text("100000\n")
    assert cpus_here(proc, root) == 0.2
    assert memory_here(proc, root) == 200_000_000


def test_a_machine_without_cgroups_has_what_it_has(tmp_path: Path):
    assert cpus_here(tmp_path, tmp_path) >= 1
    assert memory_here(tmp_path, tmp_path) > 1 << 20
