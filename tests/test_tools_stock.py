"""Starts that fail and set-ups that fail, on virtual time; and what the program table tells of the stock."""

from dataclasses import dataclass, field, replace

import anyio
import pytest

from fakes_tools import FakeBackend, FakeHosts, FakeSandbox, config
from serving import A, preparing
from sostenuto.errors import ConfigError, SandboxError
from sostenuto.sandbox.protocol import Blueprint, Sandbox, ShellResult, Snapshot
from sostenuto.tools.edge import Edge
from sostenuto.tools.host import EnvironmentFacts
from sostenuto.tools.layers import FAILED_S
from sostenuto.tools.metrics import Metrics
from sostenuto.tools.programs import open_programs
from sostenuto.tools.secrets import Secrets
from sostenuto.tools.setup import Setup
from sostenuto.tools.wire import EnvironmentRef
from sostenuto.types import ProgramId
from stocks import stocked
from test_tools_cancellation import cancel_at_step

pytestmark = pytest.mark.looptime
EDGE = Edge(Secrets({}), 16384)
FAILING = Setup(("sleep 60", "fail"))


@dataclass
class FailingSandbox(FakeSandbox):
    """Its command `fail` does."""

    async def shell(self, command: str, *, timeout_s: float, output_bytes: int = 65536) -> ShellResult:
        if command == "fail":
            return ShellResult(1, "no\n")
        return await super().shell(command, timeout_s=timeout_s, output_bytes=output_bytes)


@dataclass
class FlakyBackend(FakeBackend):
    """Its first starts fail."""

    failures: list[Exception] = field(default_factory=list[Exception])
    starts: int = 0

    async def start(self, name: str, blueprint: Blueprint, *, snapshot: Snapshot | None = None) -> Sandbox:
        self.starts += 1
        if self.failures:
            raise self.failures.pop()
        return await super().start(name, blueprint, snapshot=snapshot)

    def make(self, name: str, files: dict[str, bytes]) -> FailingSandbox:
        return FailingSandbox(name, self.live, files, self.snapshots, self.stop_s)


@pytest.mark.parametrize("setup", [Setup(), Setup(("true",))])
@pytest.mark.parametrize("failure", [SandboxError("no room"), OSError("no room")])
async def test_a_start_that_fails_is_tried_once_more(failure: Exception, setup: Setup):
    backend = FlakyBackend(failures=[failure])
    async with stocked(backend) as stock:
        await (await stock.start("p", Blueprint(), setup)).stop()
        backend.failures = [SandboxError("no room either"), SandboxError("no room")]
        with pytest.raises(SandboxError, match="no room either"):
            await stock.start("p", Blueprint(), setup)
        assert not backend.failures
    assert not backend.live
    assert not backend.snapshots


async def test_a_wrong_value_is_not_tried_again():
    backend = FlakyBackend(failures=[ConfigError("shell 'fish'")])
    async with stocked(backend) as stock:
        with pytest.raises(ConfigError, match="fish"):
            await stock.start("p", Blueprint(), Setup())
    assert backend.starts == 1


async def test_a_set_up_that_fails_runs_once_for_all_who_want_it_lately():
    backend = FlakyBackend()
    async with stocked(backend) as stock:

        async def expect_failure() -> None:
            with pytest.raises(SandboxError, match=r"set-up command 'fail' exited with 1; .*\nno"):
                await stock.start("p", Blueprint(), FAILING)

        async with anyio.create_task_group() as group:
            for _ in range(64):
                group.start_soon(expect_failure)
        assert anyio.current_time() == pytest.approx(60)
        await expect_failure()
        assert anyio.current_time() == pytest.approx(60)
        await anyio.sleep(FAILED_S)
        await expect_failure()
        assert anyio.current_time() == pytest.approx(120 + FAILED_S)
        assert backend.starts == stock.counters["layers_failed"] == 2
        assert not backend.live


async def test_builds_hold_up_no_start_of_others():
    async with (
        stocked(FlakyBackend(start_s=1), starts_at_once=1) as stock,
        anyio.create_task_group() as group,
    ):
        group.start_soon(stock.start, "slow", Blueprint(), Setup(("sleep 1000",), timeout_s=2000))
        await anyio.sleep(2)
        await stock.start("quick", Blueprint(), Setup())
        assert anyio.current_time() == pytest.approx(3)
        group.cancel_scope.cancel()


async def test_one_that_nobody_comes_for_is_ended_and_comes_back_with_the_next_program():
    backend = FlakyBackend()
    async with stocked(backend, warm=2, warm_idle_s=100) as stock:
        await stock.start("first", Blueprint(), Setup())
        await anyio.sleep(99)
        assert [one.age_s for one in stock.waiting(anyio.current_time())] == [pytest.approx(99)] * 2
        await anyio.sleep(2)
        assert set(backend.live) == {"first"}
        await stock.start("second", Blueprint(), Setup())
        await anyio.sleep(1)
        assert len(backend.live) == 4
        backend.live.clear()


async def test_what_cannot_be_started_ahead_is_tried_again_with_the_next_program():
    backend = FlakyBackend()
    async with stocked(backend, warm=1) as stock:
        await (await stock.start("p", Blueprint(), Setup())).stop()
        backend.failures = [SandboxError("no room")]
        await anyio.sleep(1)
        assert not stock.waiting(0)
        await (await stock.start("p", Blueprint(), Setup())).stop()
        await anyio.sleep(1)
        assert len(stock.waiting(0)) == 1


@dataclass
class SettingUp(FakeHosts):
    """Every environment has set-up commands."""

    async def describe(self, environment: EnvironmentRef) -> EnvironmentFacts:
        facts = await super().describe(environment)
        return replace(facts, setup=FAILING if environment.name == "Failing" else Setup(("sleep 10",)))


async def test_a_prepare_with_set_up_commands_cancelled_at_any_step_leaves_only_the_layer():
    backend, hosts = FlakyBackend(), SettingUp()
    step, cancelled = 0, True
    async with open_programs(config(), backend, hosts, EDGE) as programs:

        async def prepare() -> None:
            await programs.prepare(A, preparing())

        while cancelled:
            step += 1
            cancelled = await cancel_at_step(step, prepare)
            await programs.release(A)
            await anyio.sleep(20)
            assert not backend.live
            assert len(backend.snapshots) <= 1
        assert programs.state().counters["layers_built"] == 1
    assert not backend.snapshots
    assert step > 5


async def test_a_prepare_that_is_late_for_its_set_up_leaves_it_to_the_next():
    backend = FlakyBackend()
    async with open_programs(config(), backend, SettingUp(), EDGE) as programs:
        with pytest.raises(SandboxError, match="over what its set-up commands make: not done within 5 s"):
            await programs.prepare(A, preparing(timeout_s=5))
        await programs.prepare(A, preparing(timeout_s=6))
        assert anyio.current_time() == pytest.approx(10)
        await programs.release(A)


async def test_a_set_up_that_fails_fails_the_program_as_infrastructure():
    async with open_programs(config(lease_s=3600), FlakyBackend(), SettingUp(), EDGE) as programs:
        with pytest.raises(SandboxError, match="set-up command 'fail'"):
            await programs.prepare(A, preparing("Failing", timeout_s=100))
        assert programs.state().counters["prepare_failures"] == 1


async def test_what_is_in_stock_can_be_seen_and_goes_with_the_server():
    backend = FlakyBackend()
    async with open_programs(config(warm=1), backend, SettingUp(), EDGE) as programs:
        await programs.prepare(A, preparing())
        await programs.prepare(ProgramId("b"), preparing())
        await anyio.sleep(1)
        state = programs.state()
        assert [(one.sandbox, one.reason) for one in state.warm] == [("fake", "warm")]
        assert state.layer_bytes == len(b"hello")
        assert state.counters["layers_built"] == 1
        assert len(backend.live) == 3
        text = (await Metrics(None).text(state)).decode()
        assert 'sostenuto_tools_sandboxes{backend="fake"} 3.0' in text
        assert "sostenuto_tools_warm 1.0" in text
        assert "sostenuto_tools_layer_bytes 5.0" in text
    assert not backend.live
    assert not backend.snapshots
