"""Engines that join, leave, die and come back, on virtual time."""

from collections.abc import Sequence

import anyio
import pytest

from fakes import FakeTools, spec
from fakes_fleet import NEEDS, Manned, Replica, elsewhere, manifest, manned, ours
from sostenuto.errors import Blame, ConfigError, EngineError, lone_error
from sostenuto.records import Trajectory
from sostenuto.runtime.engines.suits import Requirements
from sostenuto.runtime.engines.wire import CommitReply, CommitRequest
from sostenuto.types import EngineId, Limits, StopReason, Version

pytestmark = pytest.mark.looptime

SCRIPT = ("!look a", "!look b", "done")
WHOLE = b"hello!look a\0[a]!look b\0[b]done\0"
V0, V1 = Version(0, 0), Version(0, 1)


def replicas(number: int, **changes: float) -> list[Replica]:
    """Engines that know what the others have said."""
    made = [Replica(SCRIPT, **changes) for _ in range(number)]  # pyright: ignore[reportArgumentType]
    for replica in made:
        replica.turns = made[0].turns
    return made


def text_of(trajectory: Trajectory) -> bytes:
    return bytes(id_ for span in trajectory.spans() for id_ in span.token_ids.tolist())


async def run_all(crowd: Manned, names: str, into: list[Trajectory]) -> None:
    async def run(name: str) -> None:
        into.append(await crowd.crew.dispatcher.run(spec(name)))

    async with anyio.create_task_group() as group:
        for name in names:
            group.start_soon(run, name)


def whole(done: Sequence[Trajectory], number: int) -> bool:
    return [text_of(t) for t in done] == [WHOLE] * number


async def test_an_engine_that_dies_is_lost_at_once_and_comes_back_with_the_deployed_weights_first():
    a, b, c = replicas(3)
    done: list[Trajectory] = []
    async with manned(ours("a", a), ours("b", b), ours("c", c)) as crowd:
        await crowd.crew.dispatcher.publish(manifest("0.1"))
        async with anyio.create_task_group() as group:
            group.start_soon(run_all, crowd, "pqrstu", done)
            await anyio.sleep(0.5)
            c.dies()
            await anyio.sleep(0.01)
            assert crowd.states() == {"a": "member", "b": "member", "c": "lost"}
            c.did.clear()
        assert whole(done, 6)
        assert crowd.states()["c"] == "member"
        await run_all(crowd, "vwxyz", done)
        assert whole(done, 11)
        crowd.assert_nothing_left(a, b, c)
    assert c.did[:3] == ["start", "prepare 0.1", "commit 0.1"]
    assert "generate 0.1" in c.did
    assert {what for what in c.did if what.startswith("generate")} == {"generate 0.1"}


async def test_it_is_started_so_often_and_no_more_and_the_last_one_ends_programs_with_the_reason():
    (a,) = replicas(1)
    done: list[Trajectory] = []
    async with manned(ours("a", a, restarts=2)) as crowd:
        (keeper,) = crowd.crew.keepers
        async with anyio.create_task_group() as group:
            group.start_soon(run_all, crowd, "p", done)
            for _ in range(3):
                while crowd.states()["a"] != "member":  # noqa: ASYNC110
                    await anyio.sleep(0.1)
                a.dies()
                await anyio.sleep(0.01)
            await keeper.over.wait()
    assert (a.starts, keeper.restarts) == (3, 2)
    assert keeper.reason == (
        "engine a: its process ended with status -9; it was started again 2 times, and is given up"
    )
    (failed,) = done
    assert failed.outcome is not None
    assert failed.outcome.blame is Blame.INFRASTRUCTURE
    assert "no engine is left; engine a: its process ended with status -9" in failed.outcome.reason


async def test_the_only_engine_is_waited_for_while_it_starts_again():
    (a,) = replicas(1, start_s=60.0)
    done: list[Trajectory] = []
    async with manned(ours("a", a)) as crowd, anyio.create_task_group() as group:
        group.start_soon(run_all, crowd, "pq", done)
        await anyio.sleep(0.5)
        a.dies()
    assert whole(done, 2)


@pytest.mark.parametrize("when", ["killed", "stillborn"])
async def test_one_that_is_killed_before_it_has_served_is_started_again(when: str):
    (a,) = replicas(1)
    setattr(a, when, 2)
    done: list[Trajectory] = []
    async with manned(ours("a", a, restarts=2)) as crowd:
        await run_all(crowd, "p", done)
        assert crowd.crew.keepers[0].restarts == 2
    assert whole(done, 1)


@pytest.mark.parametrize("when", ["killed", "stillborn"])
async def test_one_that_is_killed_each_time_it_starts_ends_the_job_with_the_reason(when: str):
    (a,) = replicas(1)
    setattr(a, when, 99)
    with pytest.raises(EngineError, match="status -9; it was started again 2 times"), lone_error():
        async with manned(ours("a", a, restarts=2)):
            pass


async def test_one_that_refuses_to_start_is_not_started_again_and_the_others_go_on():
    a, b = replicas(2)
    b.refuses = "engine b: start: no such device; give another"
    async with manned(ours("a", a), ours("b", b)) as crowd:
        assert crowd.states() == {"a": "member", "b": "lost"}
        assert crowd.crew.keepers[1].reason == b.refuses
        await anyio.sleep(100)
    assert b.starts == 0


async def test_when_none_joins_the_job_does_not_begin_and_every_reason_is_given():
    a, b = replicas(2)
    a.refuses, b.refuses = "engine a: no memory", "engine b: no model"
    with pytest.raises(EngineError, match=r"^engine a: no memory; engine b: no model$"), lone_error():
        async with manned(ours("a", a), ours("b", b)):
            pytest.fail("nothing has joined")


async def test_an_engine_elsewhere_that_does_not_answer_is_waited_for():
    a, b = replicas(2)
    b.is_dead = True
    async with manned(ours("a", a), elsewhere("b", b)) as crowd:
        assert crowd.states() == {"a": "member", "b": "lost"}
        assert crowd.crew.keepers[1].reason == "engine: connection refused"
        await crowd.crew.dispatcher.publish(manifest("0.1"))
        await anyio.sleep(200)
        b.begins_anew()
        await anyio.sleep(31)
        assert crowd.states()["b"] == "member"
        assert crowd.crew.dispatcher.serves(EngineId("b")) == V1
    assert b.did == ["start", "prepare 0.1", "commit 0.1"]


async def test_one_that_was_started_anew_between_two_looks_is_brought_up_to_date():
    a, b = replicas(2)
    async with manned(ours("a", a), elsewhere("b", b)) as crowd:
        await crowd.crew.dispatcher.publish(manifest("0.1"))
        b.did.clear()
        b.begins_anew()
        await anyio.sleep(10)
        assert crowd.states()["b"] == "member"
        assert b.did == ["start", "prepare 0.1", "commit 0.1"]


async def test_one_elsewhere_that_serves_a_version_before_it_has_verified_it_is_not_taken_for_another():
    (a,) = replicas(1)

    class Thorough(Replica):
        async def commit_update(self, request: CommitRequest) -> CommitReply:
            reply = await super().commit_update(request)
            await anyio.sleep(20)
            return reply

    b = Thorough(SCRIPT)
    async with manned(ours("a", a), elsewhere("b", b)) as crowd:
        await crowd.crew.dispatcher.publish(manifest("0.1"))
        assert crowd.crew.dispatcher.serves(EngineId("b")) == V1
        assert crowd.crew.keepers[1].restarts == 0


async def test_what_is_sampled_with_older_weights_than_were_asked_is_thrown_away():
    (a,) = replicas(1)
    done: list[Trajectory] = []
    async with manned(ours("a", a)) as crowd:
        await crowd.crew.dispatcher.publish(manifest("0.1"))
        async with anyio.create_task_group() as group:
            group.start_soon(run_all, crowd, "p", done)
            await anyio.sleep(0.5)
            a.version = "0.0"
    (trajectory,) = done
    # The fake counts the turn whose reply came to nothing.
    assert text_of(trajectory) == b"hello!look b\0[b]done\0"
    assert [request.token_ids for request in a.requests[:2]] == [list(b"hello")] * 2
    assert {v.version for span in trajectory.spans() for v in span.versions or ()} == {V1}


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        (
            Requirements("m", 256, 256, ("Llama",), V0),
            "serves a Fake (fake), and the job's model m is a Llama; start it with the job's model",
        ),
        (
            Requirements("m", 300, 256, (), V0),
            "a vocabulary of 256 rows and 256 tokens, and the job's model m has 300 and 256; start it with",
        ),
        (
            Requirements("m", 256, 200, (), V0),
            "a vocabulary of 256 rows and 256 tokens, and the job's model m has 256 and 200; start it with",
        ),
        (
            Requirements("m", 256, 256, (), V0, total_tokens=2000),
            "its context is 1000 tokens, and the job's programs may have 2000; start it with a longer",
        ),
    ],
)
async def test_an_engine_that_does_not_suit_the_job_is_refused_by_name(needs: Requirements, said: str):
    (a,) = replicas(1)
    with pytest.raises(EngineError) as caught, lone_error():
        async with manned(ours("a", a), needs=needs):
            pytest.fail("it has joined")
    assert str(caught.value).startswith("engine a: capabilities: ")
    assert said in str(caught.value)


async def test_once_programs_run_no_engine_with_a_shorter_context_joins():
    a, b = replicas(2)
    b.kv_tokens = 500
    async with manned(ours("a", a)) as crowd:
        with pytest.raises(
            EngineError, match="its context is 500 tokens, and the job's programs may have 1000"
        ):
            await crowd.crew.add(ours("b", b))
        assert crowd.states() == {"a": "member"}
    assert NEEDS.total_tokens is None


async def test_one_that_serves_a_version_of_nobody_does_not_join_before_it_was_brought_to_ours():
    a, b = replicas(2)
    b.version = b.starts_with = "7.7"
    async with manned(ours("a", a), elsewhere("b", b)) as crowd:
        assert crowd.states() == {"a": "member", "b": "lost"}
        said = "engine b: capabilities: it serves version 7.7, and 0.0 is deployed; start it with the job's"
        assert crowd.crew.keepers[1].reason.startswith(said)
        await crowd.crew.dispatcher.publish(manifest("0.1"))
        await anyio.sleep(31)
        assert crowd.crew.dispatcher.serves(EngineId("b")) == V1


async def test_a_version_opens_on_the_others_and_the_quarantined_one_returns_by_a_full_update():
    a, b, c = replicas(3)
    async with manned(ours("a", a), ours("b", b), ours("c", c)) as crowd:
        c.broken_update = "engine c: tensor 'lm_head': its bytes do not have the checksum"
        publication = await crowd.crew.dispatcher.publish(manifest("0.1"))
        assert publication.version == V1
        assert crowd.crew.dispatcher.serves(EngineId("c")) is None
        c.broken_update = ""
        await anyio.sleep(5)
        assert crowd.states()["c"] == "member"
        assert crowd.crew.dispatcher.serves(EngineId("c")) == V1
    assert (c.starts, c.did) == (1, ["start", "prepare 0.1", "commit 0.1"])


async def test_one_that_cannot_take_in_a_version_is_started_again():
    a, b = replicas(2)
    b.broken_update = "engine b: half way"
    async with manned(ours("a", a), ours("b", b)) as crowd:
        await crowd.crew.dispatcher.publish(manifest("0.1"))
        await anyio.sleep(1.2)
        b.broken_update = ""
        await anyio.sleep(30)
        assert crowd.crew.dispatcher.serves(EngineId("b")) == V1
    assert b.starts == 2


async def test_a_version_that_opens_while_an_engine_is_brought_to_the_one_before_is_given_to_it_too():
    a, b = replicas(2)

    class Late(Replica):
        async def commit_update(self, request: CommitRequest) -> CommitReply:
            reply = await super().commit_update(request)
            if request.version == "0.1":
                await anyio.sleep(20)
            return reply

    late = Late(SCRIPT)
    async with manned(ours("a", a)) as crowd, anyio.create_task_group() as group:
        await crowd.crew.dispatcher.publish(manifest("0.1"))
        group.start_soon(crowd.crew.add, ours("late", late))
        await anyio.sleep(10)
        await crowd.crew.dispatcher.publish(manifest("0.2"))
        await anyio.sleep(30)
        assert crowd.crew.dispatcher.serves(EngineId("late")) == Version(0, 2)
    assert b.starts == 0


async def test_an_engine_is_added_while_programs_run_and_removed_once_its_turns_have_ended():
    a, b = replicas(2, kv_tokens=700)
    done: list[Trajectory] = []
    async with manned(ours("a", a), tools=FakeTools(call_s=3.0)) as crowd, anyio.create_task_group() as group:
        group.start_soon(run_all, crowd, "pqrs", done)
        await anyio.sleep(0.5)
        await crowd.crew.add(ours("b", b))
        await anyio.sleep(4)
        assert b.log
        await crowd.crew.remove(EngineId("a"), within_s=30)
        assert a.decoding == 0
        assert crowd.states() == {"b": "member"}
        before = len(a.log)
        await anyio.sleep(20)
        assert len(a.log) == before
    assert whole(done, 4)
    assert [t.metrics["turns"] for t in done] == [3.0] * 4


async def test_what_has_not_ended_by_the_deadline_goes_on_elsewhere_with_the_same_tokens():
    a, b = replicas(2)
    done: list[Trajectory] = []
    a.decode_s = 100.0
    async with manned(ours("a", a)) as crowd, anyio.create_task_group() as group:
        group.start_soon(run_all, crowd, "p", done)
        await anyio.sleep(5)
        await crowd.crew.add(ours("b", b))
        began_s = anyio.current_time()
        await crowd.crew.remove(EngineId("a"), within_s=10)
        assert anyio.current_time() - began_s == pytest.approx(10)
    assert whole(done, 1)
    assert b.requests[0].token_ids == a.requests[0].token_ids
    assert done[0].stop_reason is StopReason.ANSWERED


async def test_what_is_not_there_and_what_is_the_last_cannot_be_removed():
    a, b = replicas(2)
    async with manned(ours("a", a)) as crowd:
        with pytest.raises(ConfigError, match="engine x is not there; there are a"):
            await crowd.crew.remove(EngineId("x"), within_s=1)
        with pytest.raises(ConfigError, match="a is the last that serves; add another one first"):
            await crowd.crew.remove(EngineId("a"), within_s=1)
        with pytest.raises(ConfigError, match="a is there already"):
            await crowd.crew.add(ours("a", b))


async def test_engines_that_come_and_go_at_any_moment_cost_no_program():
    a, b, c = replicas(3, decode_s=0.7, start_s=0.3)
    done: list[Trajectory] = []
    async with manned(ours("a", a), ours("b", b, 9), ours("c", c, 9)) as crowd:
        async with anyio.create_task_group() as group:
            group.start_soon(run_all, crowd, "hijklmnopqrstuv", done)
            for round_ in range(8):
                await anyio.sleep(0.37 * (1 + round_ % 3))
                (b, c)[round_ % 2].dies()
                if round_ == 4:
                    group.start_soon(crowd.crew.dispatcher.publish, manifest("0.1"))
        assert whole(done, 15)
        crowd.assert_nothing_left(a, b, c)
    limits = Limits(wall_s=10_000)
    assert all(t.usage.queue_s < limits.wall_s for t in done)
