"""How long programs live on the tool server, and how what they hold is given back: on virtual time."""

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes_tools import FakeBackend, FakeSandbox
from serving import A, Served, calling, preparing, scoring, serving
from sostenuto.errors import SandboxError
from sostenuto.tools.leases import Fences, split_owner
from sostenuto.tools.lifetimes import Lifetime
from sostenuto.tools.refused import Refused
from sostenuto.tools.teardown import Teardown
from sostenuto.tools.wire import PrepareRequest
from sostenuto.types import ProgramId

pytestmark = pytest.mark.looptime
B = ProgramId("b")


def lasting(**changes: float) -> AbstractAsyncContextManager[Served]:
    """A server on which no lease runs out."""
    return serving(None, lease_s=1e5, longest_lease_s=1e5, **changes)


def here(served: Served) -> list[str]:
    return [program.program_id for program in served.programs.state().programs]


def living(**bounds: float) -> PrepareRequest:
    return preparing().model_copy(update=bounds)


async def test_a_program_that_nobody_asks_for_is_released():
    async with lasting(idle_s=50) as served:
        await served.programs.prepare(A, preparing())
        await served.programs.prepare(B, living(idle_s=20))
        await anyio.sleep(21)
        assert here(served) == ["a"]
        await served.programs.call(A, calling("echo", "1"))
        await anyio.sleep(45)
        assert here(served) == ["a"]
        await anyio.sleep(6)
        served.assert_nothing_left()
        assert served.programs.state().counters["outlived_programs"] == 2


async def test_a_program_is_not_idle_while_a_request_is_under_way():
    async with lasting(idle_s=10) as served:
        await served.programs.prepare(A, preparing())
        await served.programs.call(A, calling("sleep", "100"))
        await served.programs.in_sandbox(A, lambda box: box.shell("sleep 100", timeout_s=900))
        assert here(served) == ["a"]
        await anyio.sleep(9.9)
        assert here(served) == ["a"]
        await anyio.sleep(10.2)
        assert here(served) == []


async def test_a_program_has_a_greatest_age_which_ends_its_calls():
    async with lasting(max_s=60) as served:
        await served.programs.prepare(A, preparing())
        with pytest.raises(Refused, match="was released before"):
            await served.programs.call(A, calling("sleep", "200"))
        assert anyio.current_time() == pytest.approx(60, abs=1)


async def test_a_reward_under_way_outlives_the_greatest_age_and_its_answer_can_be_fetched():
    async with lasting(max_s=60, idle_s=5, scoring_s=30) as served:
        served.hosts.host.score_s = 20
        await served.programs.prepare(A, preparing())
        await served.programs.call(A, calling("sleep", "55"))
        assert (await served.programs.reward(A, scoring())).value == 1.0
        assert anyio.current_time() == pytest.approx(75, abs=1)
        await anyio.sleep(25)
        assert (await served.programs.reward(A, scoring())).value == 1.0
        await anyio.sleep(200)
        served.assert_nothing_left()


@given(st.floats(0, 100), st.floats(0, 100), st.floats(1, 50), st.floats(1, 50))
def test_no_lifetime_ends_before_the_deadline_of_a_reward(
    start_s: float, timeout_s: float, idle_s: float, max_s: float
):
    lifetime = Lifetime(started_s=0, used_s=start_s, idle_s=idle_s, max_s=max_s, scoring_s=3)
    lifetime.score(timeout_s, now_s=start_s)
    for busy in (True, False):
        assert lifetime.ends_s(busy=busy) >= start_s + timeout_s + 3


async def test_a_newer_epoch_fences_the_older_one_and_takes_its_programs():
    async with serving() as served:
        await served.programs.prepare(A, preparing(owner="run/7"))
        await served.programs.prepare(B, preparing(owner="another/3"))
        served.programs.heartbeat("run/8", 30)
        await anyio.sleep(0.1)
        assert here(served) == ["b"]
        assert "run/7" not in served.programs.state().owners
        for refused in (
            lambda: served.programs.heartbeat("run/7", 30),
            lambda: served.programs.check_owner("run/7"),
        ):
            with pytest.raises(Refused, match="came back with epoch 8") as caught:
                refused()
            assert caught.value.status == 409
        with pytest.raises(Refused, match="fences it"):
            await served.programs.prepare(A, preparing(owner="run/7"))
        await served.programs.prepare(A, preparing(owner="run/8"))
        assert served.programs.state().counters["fenced_programs"] == 1


async def test_a_new_epoch_can_prepare_a_program_that_the_old_one_still_holds():
    async with serving(FakeBackend(stop_s=5)) as served:
        await served.programs.prepare(A, preparing(owner="run/1"))
        await served.programs.prepare(A, preparing(owner="run/2"))
        assert [program.owner for program in served.programs.state().programs] == ["run/2"]
        assert len(served.backend.live) == 1


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 5)), max_size=20))
def test_whoever_is_not_fenced_has_the_highest_epoch_of_its_name(owners: list[tuple[str, int]]):
    fences = Fences()
    highest: dict[str, int] = {}
    for name, epoch in owners:
        owner = f"{name}/{epoch}"
        assert (fences.newest(owner) is not None) == (epoch < highest.get(name, 0))
        fences.raise_to(owner)
        highest[name] = max(highest.get(name, 0), epoch)


def test_only_a_number_after_the_last_slash_is_an_epoch():
    assert split_owner("a/b/12") == ("a/b", 12)
    for name in ("a", "a/", "/7", "a/-1", "a/٣", "a/" + "9" * 30, "a/1 "):
        assert split_owner(name) == (name, None)


async def test_a_teardown_that_fails_is_tried_again_with_growing_pauses_until_it_succeeds():
    attempts: list[float] = []

    async def step() -> None:
        attempts.append(anyio.current_time())
        if len(attempts) < 4:
            raise SandboxError("the disk is away")

    async with anyio.create_task_group() as group:
        teardown = Teardown(group, limit_s=5)
        await teardown.give_back("stopping", step)
        assert (teardown.leaked, teardown.failures) == (1, 1)
        await anyio.sleep(20)
        assert (teardown.leaked, teardown.failures) == (0, 3)
        await teardown.settle()
    assert attempts == pytest.approx([0, 1, 3, 7], abs=0.1)


async def test_a_teardown_that_cannot_even_be_cancelled_holds_nobody():
    let_go = anyio.Event()

    async def step() -> None:
        with anyio.CancelScope(shield=True):
            await let_go.wait()

    async with anyio.create_task_group() as group:
        teardown = Teardown(group, limit_s=5)
        await teardown.give_back("stopping", step)
        assert anyio.current_time() < 7
        assert teardown.leaked == 1
        let_go.set()
        await anyio.sleep(10)
        assert teardown.leaked == 0
        await teardown.settle()


async def test_the_servers_end_tries_once_more_and_then_waits_no_longer():
    tries = 0

    async def step() -> None:
        nonlocal tries
        tries += 1
        raise SandboxError("never")

    async with anyio.create_task_group() as group:
        teardown = Teardown(group, limit_s=5)
        await teardown.give_back("stopping", step)
        await anyio.sleep(100)
        before, before_s = tries, anyio.current_time()
        await teardown.settle()
        assert anyio.current_time() - before_s == pytest.approx(5)
        assert tries > before
        assert teardown.leaked == 1


@dataclass
class StubbornSandbox(FakeSandbox):
    """Cannot be stopped at first."""

    refusals: int = 2

    async def stop(self) -> None:
        if self.refusals:
            self.refusals -= 1
            raise SandboxError("device busy")
        await super().stop()


class StubbornBackend(FakeBackend):
    def make(self, name: str, files: dict[str, bytes]) -> FakeSandbox:
        return StubbornSandbox(name, self.live, files, self.snapshots)


async def test_a_sandbox_that_does_not_stop_frees_its_program_and_counts_as_leaked_until_it_does():
    async with serving(StubbornBackend()) as served:
        await served.programs.prepare(A, preparing())
        await served.programs.release(A)
        state = served.programs.state()
        assert (here(served), state.leaked, state.counters["release_failures"]) == ([], 1, 1)
        assert served.backend.live
        await served.programs.prepare(A, preparing())
        await served.programs.release(A)
        await anyio.sleep(10)
        assert served.programs.state().leaked == 0
        assert not served.backend.live
