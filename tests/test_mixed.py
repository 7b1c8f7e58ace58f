"""Several environments in one job: shares, groups, rewards, curricula and evaluations of their own."""

import math
import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from fakes import FakeRenderer
from fakes_training import Number, Parity, ParityByTurn, numbers
from real_jobs import build_weights
from scripted import TINY, children, write_tokenizer_folder
from sostenuto.envs.curriculum import Curriculum
from sostenuto.envs.environment import Environment
from sostenuto.envs.task import Tasks
from sostenuto.errors import ConfigError
from sostenuto.runtime.config import RuntimeConfig
from sostenuto.runtime.job_file import load_train_file
from sostenuto.runtime.jobs.events import Evaluated, StepTrained
from sostenuto.runtime.jobs.finished import Finished
from sostenuto.runtime.jobs.group_rewards import judge_of
from sostenuto.runtime.jobs.job import RLJob
from sostenuto.runtime.jobs.mixed import MixedIn
from sostenuto.runtime.jobs.plan import plan_of
from sostenuto.runtime.jobs.rewarding import GroupRewards
from sostenuto.runtime.jobs.supply import GroupSupply
from sostenuto.runtime.jobs.teacher import Teacher
from sostenuto.runtime.journal import Journal, read_journal
from sostenuto.runtime.ledger import Ledger
from sostenuto.runtime.rollouts import Rollouts
from sostenuto.runtime.runtime import Runtime
from sostenuto.runtime.seeing.scalars import scalars_of
from sostenuto.trainer.algorithms import GRPO, OPD, Reinforce
from sostenuto.types import Limits, Purpose, Version
from test_supply import Counting, Course, job
from test_supply_members import Moody


class Other(Counting):
    """Another class with tasks of the same ids."""


async def by_place(members: Sequence[Finished]) -> list[float]:
    return [10.0 + place for place, _ in enumerate(members)]


def mixed(*parts: MixedIn, weight: float = 1.0, steps: int = 6) -> RLJob:
    return replace(job(staleness=1, steps=steps, tasks=4), mixed=parts, weight=weight)


@pytest.mark.looptime
async def test_each_environment_has_its_share_of_the_groups_and_groups_of_its_own_size():
    other = MixedIn(env=Other, tasks=[Number(number=n) for n in range(4)], weight=1.0, group_size=2)
    given = mixed(other, weight=3.0)
    course = Course(given, 1.0)
    await course.run(Moody())
    groups = [group for seen in course.seen for group in seen.groups]
    of = Counter(group.members[0].task_id.partition(":")[0] for group in groups)
    assert of == {"Counting": 18, "Other": 6}
    sizes = {(group.members[0].task_id.partition(":")[0], len(group.members)) for group in groups}
    assert sizes == {("Counting", 4), ("Other", 2)}
    assert course.ledger.statistics().closes
    # One task is in both, and is told apart.
    ids = {member.task_id for group in groups for member in group.members}
    assert len({task_id.partition(":")[2] for task_id in ids}) < len(ids)


@pytest.mark.looptime
async def test_each_has_its_curriculum_and_its_rewards_of_groups():
    def curriculum() -> Curriculum[Number]:
        return Curriculum(Tasks([Number(number=n) for n in range(4)]), seed=1)

    own, others = curriculum(), curriculum()
    rule = GroupRewards(by_place)
    given = replace(mixed(MixedIn(env=Other, tasks=others, group_rewards=rule)), tasks=own)
    course = Course(
        given, 1.0, judge=judge_of({p.called: p.group_rewards for p in given.parts}, FakeRenderer())
    )
    await course.run(Moody())
    members = [member for seen in course.seen for member in seen.members]
    rewards = {
        name: {m.reward for m in members if m.task_id.startswith(name)} for name in ("Counting", "Other")
    }
    assert rewards == {"Counting": {0.0, 1.0}, "Other": {10.0, 11.0, 12.0, 13.0}}
    state = course.supply.state_dict()["curricula"]
    assert isinstance(state, dict)
    assert set(state) == {"Counting", "Other"}
    # Each was told of its own programs alone.
    for name, source in (("Counting", own), ("Other", others)):
        assert {m.task_id.partition(":")[2] for m in members if m.task_id.startswith(name)} <= set(
            source.state_dict()["seen"]  # pyright: ignore[reportArgumentType]
        )
    anew = curriculum(), curriculum()
    again = replace(mixed(MixedIn(env=Other, tasks=anew[1])), tasks=anew[0])
    with closing(sqlite3.connect(":memory:")) as connection:
        rollouts = Rollouts(cast("Any", None), Ledger(), Journal(connection))
        supply = GroupSupply(plan_of(again), rollouts, lambda: Version(0, 0), lambda _: None)
        supply.load_state_dict(course.supply.state_dict())
    assert [c.state_dict() for c in anew] == [own.state_dict(), others.state_dict()]


# ---- a whole job ----


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tokenizer_folder(tmp_path_factory.mktemp("model"), TINY)
    return build_weights(folder)


async def test_a_job_trains_on_two_and_evaluates_each_apart(tmp_path: Path, model: Path):
    before = children()
    other = MixedIn(
        env=ParityByTurn, tasks=numbers(8), group_size=3, limits=Limits(turns=1, turn_tokens=5),
        eval_tasks=numbers(2), name="by_turn",
    )  # fmt: skip
    given = RLJob(
        env=Parity, model=model, tasks=numbers(8), steps=2, groups_per_step=2, mixed=(other,),
        max_staleness=0,
        algorithm=GRPO(group_size=2, zero_spread="keep"), limits=Limits(turns=2, turn_tokens=6),
        eval_tasks=numbers(3),
    )  # fmt: skip
    async with Runtime(RuntimeConfig(directory=tmp_path)) as runtime:
        handle = await runtime.submit(given)
        events = [event async for event in handle.events()]
        result = await handle.result()
    assert children() == before
    assert result.ledger.closes
    steps = [event for event in events if isinstance(event, StepTrained)]
    assert [step.report.samples for step in steps] == [5, 5]
    for step in steps:
        assert set(step.environments) == {"Parity", "by_turn"}
        told = scalars_of(step)
        assert told is not None
        assert {"reward/Parity", "reward/by_turn"} <= set(told[1])
        assert step.reward == pytest.approx(
            (2 * step.environments["Parity"] + 3 * step.environments["by_turn"]) / 5
        )
    evaluated = [event for event in events if isinstance(event, Evaluated)]
    assert [(e.environment, e.programs, e.temperature) for e in evaluated] == [
        ("Parity", 3, 1.0), ("Parity", 3, 0.0), ("by_turn", 2, 1.0), ("by_turn", 2, 0.0),
    ] * 2  # fmt: skip
    told = scalars_of(evaluated[2])
    assert told is not None
    assert "held_out/by_turn/sampled" in told[1]
    with read_journal(tmp_path / "journal.db") as reader:
        records = list(reader.trajectories(purpose=Purpose.TRAIN))
    tokens = {
        name: max(r.trained_tokens for r in records if r.task_id.startswith(name))
        for name in ("Parity:", "by_turn:")
    }
    assert tokens["by_turn:"] <= 5 < tokens["Parity:"]


# ---- in a file, and what is refused ----


async def test_a_job_file_has_them_and_their_curricula(tmp_path: Path):
    path = tmp_path / "job.toml"
    path.write_text(
        f"""
        environment = "fakes_training:Parity"
        model = "{tmp_path}"
        steps = 1
        weight = 3
        [tasks]
        factory = "fakes_training:numbers"
        arguments = {{ count = 3 }}
        curriculum = {{ weight_field = "number", floor = 0.2 }}
        [[mixed]]
        environment = "fakes_training:ParityByTurn"
        name = "turns"
        group_size = 4
        limits = {{ turns = 3 }}
        group_rewards = {{ function = "test_mixed:by_place" }}
        [mixed.tasks]
        factory = "fakes_training:numbers"
        arguments = {{ count = 2 }}
        [mixed.eval_tasks]
        factory = "fakes_training:numbers"
        arguments = {{ count = 5 }}
        """
    )
    found = await load_train_file(path).job()
    assert isinstance(found.tasks, Curriculum)
    source = cast("Curriculum[Number]", found.tasks)
    drawn = Counter(source.at(ordinal).task.number for ordinal in range(300))
    assert drawn[0] == 0 < drawn[1] < drawn[2]
    (part,) = found.mixed
    assert (part.called, part.env.__name__, part.group_size) == ("turns", "ParityByTurn", 4)
    assert part.limits == Limits(turns=3)
    assert (len(part.eval_tasks), part.group_rewards) == (5, GroupRewards("test_mixed:by_place"))
    own, other = found.parts
    assert (own.weight, own.group_size, other.weight) == (3.0, found.algorithm.group_size, 1.0)
    for change, said in (
        ('weight_field = "number"', 'weight_field = "colour"'),
        ('weight_field = "number"', 'weight_field = "number", weights = { a = 1 }'),
        ('weight_field = "number"', "weights = { nowhere = 1 }"),
    ):
        wrong = tmp_path / "wrong.toml"
        wrong.write_text(path.read_text().replace(change, said))
        with pytest.raises(ConfigError, match="curriculum: weight"):
            await load_train_file(wrong).job()


def stranger() -> type[Environment[Number]]:
    class Parity(Environment[Number]):
        """Of the same name."""

        async def reset(self, task: Number) -> str:
            return str(task.number)

        async def reward(self, episode: object) -> float:
            return 0.0

    return Parity


def one(**changes: object) -> MixedIn:
    return replace(MixedIn(env=ParityByTurn, tasks=numbers(2)), **changes)  # pyright: ignore[reportArgumentType]


def holding(*parts: MixedIn, **others: Any) -> RLJob:  # noqa: ANN401 - fields of a job
    return RLJob(env=Parity, model=".", tasks=numbers(2), steps=1, mixed=parts, **others)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: holding(one(), one()), "two environments are called 'ParityByTurn'"),
        (lambda: holding(one(name="Parity")), "two environments are called 'Parity'"),
        (lambda: holding(one(env=stranger(), name="b")), "two classes are called 'Parity'"),
        (lambda: holding(one(name="a:b")), "its name has a ':'"),
        (lambda: holding(one(weight=0)), "ParityByTurn: weight is 0"),
        (lambda: holding(one(weight=math.nan)), "ParityByTurn: weight is nan"),
        (lambda: holding(one(), weight=-1.0), "Parity: weight is -1"),
        (lambda: holding(one(group_size=1)), "ParityByTurn: group_size is 1, .* give 2 or more"),
        (
            lambda: holding(
                one(group_size=1, group_rewards=GroupRewards(by_place)), algorithm=Reinforce(),
            ),
            "group_rewards: group_size is 1",
        ),
        (
            lambda: holding(one(limits=Limits(total_tokens=200)), limits=Limits(total_tokens=100)),
            "limits.total_tokens is 200, the job's is 100",
        ),
        (
            lambda: holding(
                one(), algorithm=OPD(), teachers=(Teacher(model=".", environment="Parity"),),
            ),
            "none of teacher is for a task of ParityByTurn",
        ),
    ],
)  # fmt: skip
def test_environments_that_cannot_be_mixed_are_refused(make: Callable[[], object], said: str):
    with pytest.raises(ConfigError, match=said):
        make()
