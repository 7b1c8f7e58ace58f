"""Calls of a whole tool server that wait for their turn: in its program table, and over HTTP."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import pytest
from anyio.abc import TaskGroup

from fakes_tools import FORM, TOKEN, FakeBackend, FakeHost, FakeHosts, FakeSandbox, config
from serving import calling, preparing
from sostenuto.errors import Overloaded
from sostenuto.sandbox.protocol import Sandbox, SandboxUsage
from sostenuto.tools.client import ToolServerClient
from sostenuto.tools.edge import Edge
from sostenuto.tools.programs import Programs, open_programs
from sostenuto.tools.refused import Refused
from sostenuto.tools.secrets import Secrets
from sostenuto.tools.server import listen
from sostenuto.tools.wire import Prepared, PrepareRequest, State, ToolLimits, ToolSchema
from sostenuto.types import CallId, ProgramId, ToolCall, ToolResult, ToolStatus

A, B, C = ProgramId("a"), ProgramId("b"), ProgramId("c")


@dataclass
class LimitedHost(FakeHost):
    """Its one tool, `sleep`, has limits.  `peaks_bytes` are what its sandboxes say, look by look."""

    limits: ToolLimits = field(default_factory=ToolLimits)
    peaks_bytes: list[int] = field(default_factory=list[int])

    async def prepare(
        self,
        program_id: ProgramId,
        request: PrepareRequest,
        sandbox: Sandbox | None,
        *,
        state: bytes | None = None,
    ) -> Prepared:
        prepared = await super().prepare(program_id, request, sandbox, state=state)
        if self.peaks_bytes and isinstance(sandbox, FakeSandbox):
            vars(sandbox)["usage"] = self._usage
        sleep = ToolSchema(name="sleep", description="", parameters={}, timeout_s=99, limits=self.limits)
        return prepared.model_copy(update={"tools": (sleep,)})

    async def _usage(self) -> SandboxUsage:
        peak_bytes = self.peaks_bytes.pop(0) if self.peaks_bytes else 0
        return SandboxUsage(peak_bytes // 2, peak_bytes, 0.0, 1, 0)


@asynccontextmanager
async def serving(host: LimitedHost, **changes: object) -> AsyncGenerator[Programs]:
    edge = Edge(Secrets({}), 16384)
    async with open_programs(config(**changes), FakeBackend(), FakeHosts(host), edge) as programs:
        for program in (A, B, C):
            await programs.prepare(program, preparing())
        yield programs


async def sleep_s(
    programs: Programs, program: ProgramId, seconds: float, results: dict[str, ToolResult], **more: float
) -> None:
    call_id = f"c{len(results)}-{program}-{seconds}"
    request = calling("sleep", str(seconds), call_id).model_copy(update=more)
    results[program] = await programs.call(program, request)


@pytest.mark.looptime
async def test_calls_of_all_programs_keep_to_the_limit_of_their_tool_and_say_what_they_waited():
    results = dict[str, ToolResult]()
    async with serving(LimitedHost(limits=ToolLimits(concurrency=2))) as programs:
        started_s = anyio.current_time()
        async with anyio.create_task_group() as group:
            for program in (A, B, C):
                group.start_soon(sleep_s, programs, program, 3.0, results)
        assert anyio.current_time() - started_s == pytest.approx(6)
    assert [results[p].queued_s for p in (A, B, C)] == pytest.approx([0, 0, 3])


@pytest.mark.looptime
async def test_the_more_urgent_program_goes_first():
    results = dict[str, ToolResult]()
    async with serving(LimitedHost(limits=ToolLimits(concurrency=1))) as programs:
        async with anyio.create_task_group() as group:
            group.start_soon(sleep_s, programs, A, 1.0, results)
            await anyio.sleep(0.1)
            group.start_soon(sleep_s, programs, B, 1.0, results)
            await anyio.sleep(0.1)
            await sleep_s(programs, C, 1.0, results, priority=-1)
            assert B not in results
        assert results[C].queued_s == pytest.approx(0.8)


@pytest.mark.looptime
async def test_a_call_whose_deadline_passes_while_it_waits_never_runs():
    results = dict[str, ToolResult]()
    host = LimitedHost(limits=ToolLimits(concurrency=1))
    async with serving(host) as programs, anyio.create_task_group() as group:
        group.start_soon(sleep_s, programs, A, 10.0, results)
        await anyio.sleep(1)
        late = await programs.call(B, calling("sleep", "5", timeout_s=2))
        assert late.status is ToolStatus.TIMEOUT
        assert "did not begin: it waited 2 s for its turn" in late.content
        assert host.runs["5"] == 0
        group.cancel_scope.cancel()


@pytest.mark.looptime
async def test_the_turns_of_a_program_that_is_released_pass_on():
    results = dict[str, ToolResult]()
    host = LimitedHost(limits=ToolLimits(concurrency=1))
    async with serving(host) as programs, anyio.create_task_group() as group:
        group.start_soon(_refused, programs, A, "100")
        group.start_soon(_refused, programs, A, "101")
        await anyio.sleep(1)
        group.start_soon(sleep_s, programs, B, 1.0, results)
        await anyio.sleep(1)
        await programs.release(A)
    assert results[B].queued_s == pytest.approx(1, abs=0.1)


async def _refused(programs: Programs, program: ProgramId, arguments: str) -> None:
    with pytest.raises(Refused, match="was released"):
        await programs.call(program, calling("sleep", arguments, arguments))


@pytest.mark.looptime
async def test_a_call_that_is_refused_for_its_phase_leaves_no_turn():
    async with serving(LimitedHost(limits=ToolLimits(concurrency=1))) as programs:
        async with anyio.create_task_group() as group:
            group.start_soon(programs.release, A)
            await anyio.lowlevel.checkpoint()
            with pytest.raises(Refused):
                await programs.call(A, calling("sleep", "1"))
        assert (await programs.call(B, calling("sleep", "1", timeout_s=2))).status is ToolStatus.OK


@pytest.mark.looptime
async def test_memory_that_a_call_took_keeps_the_next_ones_apart():
    results = dict[str, ToolResult]()
    host = LimitedHost(peaks_bytes=[100, 700])
    async with serving(host, memory_bytes=1000) as programs:
        await sleep_s(programs, A, 2.0, results)
        async with anyio.create_task_group() as group:
            for program in (B, C):
                group.start_soon(sleep_s, programs, program, 1.0, results)
    assert sorted(results[p].queued_s for p in (B, C)) == pytest.approx([0, 1])


@pytest.mark.looptime
async def test_a_repeated_id_of_a_call_that_was_refused_for_the_crowd_runs():
    results = dict[str, ToolResult]()
    host = LimitedHost(limits=ToolLimits(concurrency=1))
    async with serving(host, queue_limit=1) as programs, anyio.create_task_group() as group:
        group.start_soon(sleep_s, programs, A, 2.0, results)
        await anyio.sleep(0.1)
        group.start_soon(sleep_s, programs, B, 2.0, results)
        await anyio.sleep(0.1)
        with pytest.raises(Overloaded) as refused:
            await programs.call(C, calling("sleep", "3", "again"))
        assert refused.value.retry_after_s == 1.0
        await anyio.sleep(2)
        assert (await programs.call(C, calling("sleep", "3", "again"))).status is ToolStatus.OK


@asynccontextmanager
async def over_http(host: LimitedHost, **changes: object) -> AsyncGenerator[ToolServerClient]:
    async with (
        listen(config(**changes), FakeBackend(), FakeHosts(host), Secrets({})) as url,
        ToolServerClient(url, TOKEN, "owner/1") as client,
    ):
        for program in (A, B, C):
            await client.prepare(program, FORM, {})
        yield client


async def _fill(group: TaskGroup, client: ToolServerClient, seconds: str) -> None:
    """One call runs for so long, and another waits."""
    for waiting, program in enumerate((A, B)):
        group.start_soon(client.call, program, CallId("c"), ToolCall("sleep", seconds))
        with anyio.fail_after(20):
            while (state := await client.state()).queued < waiting or not _is_calling(state, program):  # noqa: ASYNC110
                await anyio.sleep(0.01)


def _is_calling(state: State, program: ProgramId) -> bool:
    return any(one.program_id == program and one.phase == "calling" for one in state.programs)


async def test_a_client_that_is_told_to_come_again_does_so_within_its_deadline():
    host = LimitedHost(limits=ToolLimits(concurrency=1))
    async with over_http(host, queue_limit=1) as client, anyio.create_task_group() as group:
        await _fill(group, client, "1")
        result = await client.call(C, CallId("c"), ToolCall("sleep", "0"), timeout_s=20)
        assert result.status is ToolStatus.OK
        assert result.queued_s >= 1
        assert host.runs["0"] == 1


async def test_a_client_without_the_time_for_it_is_told_that_the_server_is_overloaded():
    host = LimitedHost(limits=ToolLimits(concurrency=1))
    async with over_http(host, queue_limit=1) as client, anyio.create_task_group() as group:
        await _fill(group, client, "60")
        with pytest.raises(Overloaded, match=r"1 calls wait for Form\.sleep already; try again in 1 s"):
            await client.call(C, CallId("c"), ToolCall("sleep", "0"), timeout_s=0.9)
        group.cancel_scope.cancel()
