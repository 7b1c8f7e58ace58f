"""Groups for a trainer of the user's own, on virtual time: each ends once, however its consumer ends."""

import gc
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import anyio
import pytest

from fakes import FakeEngine, FakeRenderer, FakeTools
from sostenuto.envs.task import Tasks, TaskStream
from sostenuto.errors import ConfigError, SostenutoError, lone_error
from sostenuto.runtime.config import RuntimeConfig
from sostenuto.runtime.dispatcher import open_dispatcher
from sostenuto.runtime.engine_pool import EnginePool
from sostenuto.runtime.given_weights import GivenTensors
from sostenuto.runtime.jobs.events import Dropped, JobEvent, Published, Stalled
from sostenuto.runtime.jobs.group import Group
from sostenuto.runtime.jobs.job import RolloutJob
from sostenuto.runtime.jobs.stream import Desk, GroupStream
from sostenuto.runtime.jobs.workshop import Premises, Workshop
from sostenuto.runtime.journal import open_journal
from sostenuto.runtime.ledger import Ledger, LedgerStatistics
from sostenuto.runtime.rollouts import Rollouts
from sostenuto.runtime.run_directory import RunDirectory
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.trainer.publication.manifest import Manifest
from sostenuto.types import EngineId, Version
from test_supply import Counting, Number, Uneven

pytestmark = pytest.mark.looptime
WEIGHTS = "/some/folder"


class Copyist:
    """Stands for the file that weights are copied to."""

    closed = False

    def write(self, weights: GivenTensors, version: Version) -> Manifest:
        if weights != WEIGHTS:
            raise ConfigError("publish: the model has no such tensor")
        return Manifest(version=str(version), path="/none", nbytes=0, tensors=())

    def close(self) -> None:
        self.closed = True


@dataclass
class World:
    """One job's rollouts on a fake engine and fake tools."""

    directory: Path
    job: RolloutJob
    tools: FakeTools = field(default_factory=Uneven)
    ledger: Ledger = field(default_factory=Ledger)
    said: list[JobEvent] = field(default_factory=list[JobEvent])
    engine: FakeEngine = field(
        default_factory=lambda: FakeEngine(("!look a", "done"), kv_tokens=4000, concurrency=16)
    )
    copyist: Copyist = field(default_factory=Copyist)
    numbers: int = 0

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[GroupStream]:
        """The stream, while the job runs beside it; a consumer that still holds it lets go at the end."""
        desk = Desk(self.job)
        with lone_error():
            async with self._shop() as shop, anyio.create_task_group() as group:

                async def start(desk: Desk) -> None:
                    async def work() -> None:
                        try:
                            await desk.serve(shop, self.copyist, self.said.append)
                        finally:
                            desk.opened.set()
                            desk.over.set()

                    group.start_soon(work)

                try:
                    yield GroupStream(desk, start)
                finally:
                    desk.closing.set()

    @asynccontextmanager
    async def _shop(self) -> AsyncGenerator[Workshop]:
        config = RuntimeConfig(directory=self.directory)
        settings = SchedulerSettings(live_programs=64)
        async with (
            open_journal(self.directory / "journal.db") as journal,
            open_dispatcher(settings, {EngineId("e"): self.engine}, self.tools, FakeRenderer()) as dispatcher,
        ):
            premises = Premises(
                config, RunDirectory(self.directory), journal, self.ledger, self.tools, "none",
                lambda _: nullcontext(), self._new_version, EnginePool(config),
            )  # fmt: skip
            rollouts = Rollouts(dispatcher, self.ledger, journal)
            yield Workshop(premises, FakeRenderer(), dispatcher, rollouts)

    def _new_version(self) -> Version:
        self.numbers += 1
        return Version(0, self.numbers)

    @property
    def books(self) -> LedgerStatistics:
        statistics = self.ledger.statistics()
        assert statistics.closes
        return statistics


@pytest.fixture
def world(tmp_path: Path) -> Callable[..., World]:
    def make(tasks: int = 1000, **fields: object) -> World:
        given = {"group_size": 4, "groups_per_step": 2, "max_staleness": 1, **fields}
        job = RolloutJob(env=Counting, model=".", tasks=[Number(number=n) for n in range(tasks)], **given)  # pyright: ignore[reportArgumentType]
        directory = tmp_path / job.name
        directory.mkdir()
        return World(directory, job)

    return make


Make = Callable[..., World]


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("learn_s", [0.0, 100.0])
async def test_groups_come_with_their_records_within_the_bound_and_are_trained_when_published(
    world: Make, staleness: int, learn_s: float
):
    here, seen = world(max_staleness=staleness), list[Group]()
    async with here.open() as stream:
        async for group in stream:
            assert group.staleness <= staleness
            assert [len(sample) > sample.masked_tokens > 0 for sample in group.samples()] == [True] * 4
            seen.append(group)
            if len(seen) % 2 == 0:
                await anyio.sleep(learn_s)
                await stream.publish(WEIGHTS)
            if len(seen) == 12:
                break
    assert len({group.id for group in seen}) == 12
    assert here.books.outcomes["trained"] == 12 * 4
    assert (here.books.running, here.books.sealed) == (0, 0)
    told = [event for event in here.said if isinstance(event, Published)]
    assert [(event.step, event.version, event.groups) for event in told] == [
        (n, Version(0, n), 2) for n in range(1, 7)
    ]
    assert all((event.staleness_max or 0) <= staleness for event in told)
    assert not {event.reason for event in here.said if isinstance(event, Dropped)} - {"not_used"}
    assert here.copyist.closed


async def test_with_staleness_the_job_samples_while_the_consumer_learns(world: Make):
    async def course(staleness: int) -> float:
        here = world(max_staleness=staleness, name=f"s{staleness}")
        async with here.open() as stream:
            for _ in range(6):
                for _ in range(2):
                    await anext(stream)
                await anyio.sleep(20.0)
                await stream.publish(WEIGHTS)
            return anyio.current_time()

    began_s = anyio.current_time()
    synchronous = await course(0) - began_s
    began_s += synchronous
    assert await course(2) - began_s < 0.8 * synchronous


async def test_what_was_handed_out_and_not_published_is_dropped_when_the_loop_is_left(world: Make):
    here = world()
    async with here.open() as stream:
        group = await anext(stream)
        assert group.id.startswith("rollouts-")
    assert "trained" not in here.books.outcomes
    assert here.books.outcomes["dropped(not_used)"] >= 4
    assert (here.books.running, here.books.sealed) == (0, 0)


async def test_a_consumer_that_raises_leaves_closed_books(world: Make):
    here = world()

    async def consume(stream: GroupStream) -> None:
        async with stream:
            async for _ in stream:
                raise ZeroDivisionError

    async with here.open() as stream:
        with pytest.raises(ZeroDivisionError):
            await consume(stream)
    assert (here.books.running, here.books.sealed) == (0, 0)
    assert "trained" not in here.books.outcomes


@pytest.mark.parametrize("after_s", [0.5, 2.0, 7.0, 30.0, 90.0])
async def test_a_consumer_that_is_cancelled_anywhere_leaves_closed_books(world: Make, after_s: float):
    here = world()
    with anyio.move_on_after(after_s):
        async with here.open() as stream:
            taken = 0
            async for _ in stream:
                taken += 1
                await anyio.sleep(3.0)
                if taken % 2 == 0:
                    await stream.publish(WEIGHTS)
    assert (here.books.running, here.books.sealed) == (0, 0)
    published = [event.groups for event in here.said if isinstance(event, Published)]
    assert here.books.outcomes.get("trained", 0) == 4 * sum(published)


@dataclass
class Endless(FakeEngine):
    """Says that it stages an update, and never comes to the end of it."""

    staging: anyio.Event = field(default_factory=anyio.Event)

    async def prepare_update(self, manifest: Manifest) -> None:
        del manifest
        self.staging.set()
        await anyio.sleep_forever()


async def test_a_publication_ends_with_the_engines_that_it_waits_for(world: Make):
    here = world()
    here.engine = engine = Endless(("done",), kv_tokens=4000, concurrency=16)
    errors: list[Exception] = []

    async def publish(stream: GroupStream) -> None:
        try:
            await stream.publish(WEIGHTS)
        except SostenutoError as error:
            errors.append(error)

    async with anyio.create_task_group() as consumer:
        with anyio.CancelScope() as scope:
            async with here.open() as stream:
                await anext(stream)
                consumer.start_soon(publish, stream)
                await engine.staging.wait()
                scope.cancel()
                await anyio.sleep_forever()
    assert [str(error).partition(": ")[2] for error in errors] == ["the engines were let go meanwhile"]
    assert (here.books.running, here.books.sealed) == (0, 0)
    assert "trained" not in here.books.outcomes


async def test_whoever_lets_go_of_the_stream_lets_the_job_end(world: Make):
    here = world()
    async with here.open() as stream:
        streams = [stream]
        del stream
        async for group in streams.pop():
            assert group.has_signal in {True, False}
            break
        gc.collect()
        with anyio.fail_after(5):
            while here.books.running or here.books.sealed:  # noqa: ASYNC110
                await anyio.sleep(0.1)


async def test_each_group_can_be_given_its_outcome_and_none_twice(world: Make):
    here = world()
    async with here.open() as stream:
        first, second = await anext(stream), await anext(stream)
        first.drop("too_easy")
        with pytest.raises(ConfigError, match="has its outcome already"):
            first.trained()
        with pytest.raises(ConfigError, match="has its outcome already"):
            await stream.publish(WEIGHTS, trained=[first])
        second.trained()
        third = await anext(stream)
        await stream.publish(WEIGHTS, trained=[])
        assert here.books.outcomes == {"dropped(too_easy)": 4, "trained": 4}
        await stream.publish(WEIGHTS, trained=[third])
        assert here.books.outcomes["trained"] == 8
    assert [event.groups for event in here.said if isinstance(event, Published)] == [1, 1]


async def test_a_group_that_was_held_too_long_cannot_be_trained(world: Make):
    here = world(max_staleness=0)
    async with here.open() as stream:
        group = await anext(stream)
        await stream.publish(WEIGHTS, trained=[])
        with pytest.raises(ConfigError, match="is 1 versions old by now, max_staleness is 0"):
            group.trained()
        with pytest.raises(ConfigError, match="drop it"):
            await stream.publish(WEIGHTS)
        group.drop()
        await stream.publish(WEIGHTS)


async def test_weights_that_are_refused_change_nothing(world: Make):
    here = world()
    async with here.open() as stream:
        await anext(stream)
        with pytest.raises(ConfigError, match="no such tensor"):
            await stream.publish("/others")
        assert "trained" not in here.books.outcomes
        publication = await stream.publish(WEIGHTS)
        assert stream.version == publication.version == Version(0, 2)
        assert here.books.outcomes["trained"] == 4


async def test_a_second_consumer_of_one_stream_is_refused(world: Make):
    here = world()
    async with here.open() as stream, anyio.create_task_group() as group:
        group.start_soon(stream.__anext__)
        await anyio.sleep(0.1)
        with pytest.raises(ConfigError, match="two tasks wait for groups of one job"):
            await anext(stream)


async def test_a_pass_over_the_tasks_ends_the_loop(world: Make):
    here = world()
    here.job = replace(here.job, tasks=once(5), group_size=2, groups_per_step=1)
    async with here.open() as stream:
        seen = 0
        async for _ in stream:
            seen += 1
            await stream.publish(WEIGHTS)
        assert seen == 5
    assert here.books.outcomes == {"trained": 10}


async def test_one_that_waits_for_its_own_publication_is_told(world: Make):
    here = world(groups_per_step=1, max_staleness=0)
    async with here.open() as stream:
        await anext(stream)
        with anyio.move_on_after(100):
            await anext(stream)
    (told, *_) = [event for event in here.said if isinstance(event, Stalled)]
    assert told.programs == ("a publication: 1 groups were handed out since the last one",)


async def test_programs_that_all_fail_are_the_consumers_error(world: Make):
    here = world()
    here.tools = Uneven(prompt="x" * 5000)
    with pytest.raises(SostenutoError, match=r"in a row failed, the last ones as: failed\(environment"):
        async with here.open() as stream:
            await anext(stream)
    assert here.books.running == 0


async def test_groups_of_one_come_as_they_finish(world: Make):
    here = world(group_size=1)
    async with here.open() as stream:
        group = await anext(stream)
        assert len(group.members) == 1
        with pytest.raises(ConfigError, match="2 of them for 1 members"):
            group.samples([1.0, 2.0])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"group_size": 0}, "group_size: 0; give at least 1"),
        ({"max_staleness": -1}, "max_staleness: -1; give at least 0"),
        ({"temperature": 0.0}, "temperature: 0.0"),
        ({"group_size": 1, "zero_spread": "replace"}, "one reward has no spread"),
    ],
)
def test_nonsense_is_refused(world: Make, fields: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        world(**fields)


def once(count: int) -> TaskStream[Number]:
    return Tasks([Number(number=n) for n in range(count)]).stream(epochs=1)
