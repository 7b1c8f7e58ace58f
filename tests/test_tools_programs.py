"""The tool server's program table on virtual time."""

import anyio
import pytest

from fakes_tools import FakeBackend
from serving import A, calling, preparing, scoring, serving
from sostenuto.errors import ConfigError, EnvironmentFailure, SandboxError, ToolServerError
from sostenuto.tools.refused import Refused
from sostenuto.tools.wire import PrepareRequest
from sostenuto.types import ProgramId, ToolStatus

pytestmark = pytest.mark.looptime


async def test_an_environment_is_described_once_for_all_its_programs():
    async with serving() as served:
        async with anyio.create_task_group() as group:
            for n in range(8):
                group.start_soon(served.programs.prepare, ProgramId(f"p{n}"), preparing())
        assert served.hosts.described == {"Form": 1}
        assert len(served.backend.live) == 8


async def test_starts_of_sandboxes_keep_to_the_limit():
    async with serving(FakeBackend(start_s=1), starts_at_once=3) as served:
        async with anyio.create_task_group() as group:
            for n in range(10):
                group.start_soon(served.programs.prepare, ProgramId(f"p{n}"), preparing())
        assert served.backend.most_starting == 3
        assert served.programs.state().counters["prepared"] == 10


async def test_an_environment_without_a_sandbox_has_none():
    async with serving() as served:
        await served.programs.prepare(A, preparing("Plain"))
        assert served.programs.state().programs[0].sandbox is None
        with pytest.raises(Refused, match="has no sandbox"):
            await served.programs.in_sandbox(A, lambda sandbox: sandbox.pause())


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (preparing("Broken"), ConfigError, "no method `reward`"),
        (preparing(fail="x"), EnvironmentFailure, "reset raised ValueError"),
        (preparing("Stuck", timeout_s=5), EnvironmentFailure, "preparing Stuck: not done within"),
    ],
)
async def test_a_failed_prepare_says_why_and_leaves_nothing(
    request_: PrepareRequest, error: type[Exception], words: str
):
    async with serving() as served:
        with pytest.raises(error, match=words):
            await served.programs.prepare(A, request_)
        served.assert_nothing_left()
        assert served.programs.state().counters["prepare_failures"] == 1
        await served.programs.prepare(A, preparing())


async def test_a_sandbox_that_does_not_start_in_time_is_blamed_on_the_sandbox():
    async with serving(FakeBackend(start_s=100)) as served:
        with pytest.raises(SandboxError, match="starting a fake sandbox: not done within 2 s"):
            await served.programs.prepare(A, preparing(timeout_s=2))
        served.assert_nothing_left()


async def test_a_blueprint_that_the_backend_refuses_stays_an_error_of_configuration():
    async with serving(FakeBackend(refusal="shell 'fish'; known: bash, sh")) as served:
        with pytest.raises(ConfigError, match="shell 'fish'"):
            await served.programs.prepare(A, preparing())
        served.assert_nothing_left()


async def test_a_program_cannot_be_prepared_twice_until_it_is_released():
    async with serving(FakeBackend(stop_s=1)) as served:
        await served.programs.prepare(A, preparing())
        with pytest.raises(Refused, match="here already"):
            await served.programs.prepare(A, preparing())
        async with anyio.create_task_group() as group:
            group.start_soon(served.programs.release, A)
            await anyio.sleep(0.5)
            await served.programs.prepare(A, preparing())
        assert len(served.backend.live) == 1


async def test_a_repeated_id_joins_the_running_call_and_later_gets_its_result():
    async with serving() as served:
        await served.programs.prepare(A, preparing())
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(served.programs.call, A, calling("sleep", "5"))
        again = await served.programs.call(A, calling("sleep", "5"))
        assert again.content == "5"
        assert served.hosts.host.runs == {"5": 1}
        assert served.programs.state().counters["repeated_ids"] == 3


async def test_a_call_goes_on_when_its_client_is_gone_and_the_retry_gets_the_result():
    async with serving() as served:
        await served.programs.prepare(A, preparing())
        with anyio.move_on_after(1):
            await served.programs.call(A, calling("sleep", "5"))
        assert served.programs.state().programs[0].phase == "calling"
        result = await served.programs.call(A, calling("sleep", "5"))
        assert (result.content, served.hosts.host.runs["5"]) == ("5", 1)


async def test_calls_of_one_program_run_together_and_scoring_waits_for_none_of_them():
    async with serving() as served:
        await served.programs.prepare(A, preparing())
        started_s = anyio.current_time()
        async with anyio.create_task_group() as group:
            for n in range(4):
                group.start_soon(served.programs.call, A, calling("sleep", "3", f"c{n}"))
            await anyio.sleep(1)
            with pytest.raises(Refused, match="score refused while it is calling"):
                await served.programs.reward(A, scoring())
        assert anyio.current_time() - started_s == pytest.approx(3)
        assert (await served.programs.reward(A, scoring())).value == 1.0
        assert served.programs.state().programs[0].phase == "ready"


async def test_a_call_ends_at_its_deadline_with_a_result_that_is_recorded():
    async with serving(lease_s=100) as served:
        await served.programs.prepare(A, preparing())
        for _ in range(2):
            result = await served.programs.call(A, calling("sleep", "50", timeout_s=2))
            assert result.status is ToolStatus.TIMEOUT
            assert result.elapsed_s == pytest.approx(2)
        assert served.hosts.host.runs["50"] == 1


async def test_an_error_of_a_call_is_recorded_like_a_result():
    async with serving() as served:
        await served.programs.prepare(A, preparing())
        for _ in range(2):
            with pytest.raises(EnvironmentFailure, match="tool crash raised KeyError"):
                await served.programs.call(A, calling("crash", "once"))
        assert served.hosts.host.runs["once"] == 1


async def test_a_fault_of_the_host_itself_fails_the_call_and_nothing_else():
    async with serving() as served:
        await served.programs.prepare(A, preparing())
        with pytest.raises(ToolServerError, match="the host itself is at fault"):
            await served.programs.call(A, calling("bug", "1"))
        assert (await served.programs.call(A, calling("echo", "2", "c2"))).content == "2"


async def test_results_beyond_the_bound_are_refused_and_never_run_again():
    async with serving(results_bytes=1000) as served:
        await served.programs.prepare(A, preparing())
        for n in range(3):
            await served.programs.call(A, calling("flood", "400", f"c{n}"))
        with pytest.raises(Refused, match="no longer kept"):
            await served.programs.call(A, calling("flood", "400", "c0"))
        assert served.hosts.host.runs["400"] == 3


async def test_an_observation_keeps_to_the_cap_of_its_tool():
    async with serving() as served:
        await served.programs.prepare(A, preparing())
        long = await served.programs.call(A, calling("flood", "20000"))
        short = await served.programs.call(A, calling("small_flood", "20000", "c2"))
        assert len(long.content) <= 16384
        assert len(short.content) <= 100
        gone = short.cut_bytes - 7
        assert short.content.count("x") + gone == 20000


async def test_a_reward_that_is_no_number_is_the_environments_failure():
    async with serving() as served:
        await served.programs.prepare(A, preparing())
        with pytest.raises(EnvironmentFailure, match="reward: value is nan"):
            await served.programs.reward(A, scoring(-1))


async def test_a_release_cancels_what_runs_and_tells_its_waiters():
    async with serving() as served:
        await served.programs.prepare(A, preparing())

        async def call() -> None:
            with pytest.raises(Refused, match="was released before"):
                await served.programs.call(A, calling("sleep", "1000"))

        async with anyio.create_task_group() as group:
            group.start_soon(call)
            await anyio.sleep(1)
            await served.programs.release(A)
            await served.programs.release(A)
        assert served.hosts.host.ended_calls == 1
        served.assert_nothing_left()
        with pytest.raises(Refused, match="no program a here"):
            await served.programs.call(A, calling("echo", "1"))


async def test_a_release_is_bounded_when_the_host_hangs():
    async with serving(release_s=3) as served:
        served.hosts.host.release_s = 1e6
        await served.programs.prepare(A, preparing())
        started_s = anyio.current_time()
        await served.programs.release(A)
        assert anyio.current_time() - started_s == pytest.approx(3)
        assert not served.backend.live
        assert served.programs.state().counters["release_failures"] == 1
        served.hosts.host.programs.clear()


async def test_programs_are_released_side_by_side():
    async with serving(FakeBackend(stop_s=2)) as served:
        for n in range(5):
            await served.programs.prepare(ProgramId(f"p{n}"), preparing())
        started_s = anyio.current_time()
        async with anyio.create_task_group() as group:
            for n in range(5):
                group.start_soon(served.programs.release, ProgramId(f"p{n}"))
        assert anyio.current_time() - started_s == pytest.approx(2)


async def test_a_lease_that_runs_out_releases_its_owners_programs_and_no_others():
    async with serving(lease_s=10) as served:
        await served.programs.prepare(A, preparing(owner="dead"))
        await served.programs.prepare(ProgramId("b"), preparing(owner="alive"))
        for _ in range(5):
            await anyio.sleep(4)
            served.programs.heartbeat("alive", 10)
        state = served.programs.state()
        assert [program.program_id for program in state.programs] == ["b"]
        assert set(state.owners) == {"alive"}
        assert state.counters["expired_leases"] == state.counters["expired_programs"] == 1
        await anyio.sleep(11)
        served.assert_nothing_left()
        assert not served.programs.state().owners


async def test_a_lease_that_runs_out_ends_a_running_prepare_and_a_running_call():
    async with serving(lease_s=10) as served:
        await served.programs.prepare(A, preparing())
        for work in (
            served.programs.prepare(ProgramId("b"), preparing("Stuck")),
            served.programs.call(A, calling("sleep", "1000")),
        ):
            with pytest.raises((Refused, ToolServerError), match=r"released|no program"):
                await work
        served.assert_nothing_left()


@pytest.mark.parametrize("own_task", [True, False])
async def test_a_shell_ends_with_its_client_and_with_its_program(own_task: bool):
    async with serving() as served:
        await served.programs.prepare(A, preparing())
        run = served.programs.in_sandbox if own_task else served.programs.run_command

        async def shell() -> None:
            with pytest.raises(Refused, match="was released before"):
                await run(A, lambda box: box.shell("sleep 500", timeout_s=900))

        with anyio.move_on_after(1):
            await run(A, lambda box: box.shell("sleep 500", timeout_s=900))
        async with anyio.create_task_group() as group:
            group.start_soon(shell)
            await anyio.sleep(1)
            await served.programs.release(A)


async def test_what_breaks_in_a_command_of_the_shell_is_the_sandbox_s_fault():
    async with serving() as served:
        await served.programs.prepare(A, preparing())

        async def broken(_: object) -> None:
            raise ValueError("no such thing")

        with pytest.raises(SandboxError, match="using the sandbox: ValueError: no such thing"):
            await served.programs.run_command(A, broken)


async def test_a_sandbox_is_given_back_when_its_commands_have_ended_what_they_began():
    async with serving() as served:
        await served.programs.prepare(A, preparing())
        left: list[int] = []

        async def slow_to_end(_: object) -> None:
            try:
                await anyio.sleep(900)
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(5)
                left.append(len(served.backend.live))

        async def command() -> None:
            with pytest.raises(Refused, match="was released before"):
                await served.programs.run_command(A, slow_to_end)

        async with anyio.create_task_group() as group:
            group.start_soon(command)
            await anyio.sleep(1)
            await served.programs.release(A)
        assert left == [1]


async def test_a_table_that_closes_admits_nothing_more():
    async with serving() as served:
        await served.programs.prepare(A, preparing())
        await served.programs.close()
        served.assert_nothing_left()
        with pytest.raises(Refused, match="the tool server is stopping"):
            await served.programs.prepare(A, preparing())
