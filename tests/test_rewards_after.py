"""Rewards that come after a program's end: of its group together, or late, on virtual time."""

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from fakes import FakeRenderer, FakeTools
from fakes_training import ParityLater, numbers
from sostenuto.errors import ConfigError, SostenutoError, lone_error
from sostenuto.runtime.job_file import load_train_file
from sostenuto.runtime.jobs.events import JobEvent, Replaced, RewardAwaited
from sostenuto.runtime.jobs.finished import Finished
from sostenuto.runtime.jobs.group_rewards import judge_of
from sostenuto.runtime.jobs.job import RLJob, RolloutJob, Stragglers
from sostenuto.runtime.jobs.late import AwaitedRewards
from sostenuto.runtime.jobs.losses import NothingComes
from sostenuto.runtime.jobs.openings import KeptGroup, Start
from sostenuto.runtime.jobs.plan import plan_of
from sostenuto.runtime.jobs.rewarding import GroupRewards, LateRewards
from sostenuto.runtime.jobs.supply import GroupSupply
from sostenuto.runtime.journal import Journal
from sostenuto.runtime.ledger import Ledger
from sostenuto.runtime.rollouts import Rollouts
from sostenuto.tools.wire import Reward
from sostenuto.trainer.algorithms import GRPO
from sostenuto.trainer.lineage import NO_BRANCHES
from sostenuto.types import CallId, Episode, GroupId, Outcome, OutcomeKind, ProgramId
from test_supply import Course, Uneven, job
from test_supply_members import Moody
from trainer_world import V0, trajectory

pytestmark = pytest.mark.looptime


def closes(course: Course) -> dict[str, int]:
    statistics = course.ledger.statistics()
    assert statistics.closes
    assert (statistics.running, statistics.sealed) == (0, 0)
    return statistics.outcomes


# ---- of a group together ----


async def by_place(members: Sequence[Finished]) -> list[float]:
    """The place of each in the order of its id."""
    return [float(place) for place, _ in enumerate(members)]


def judged(
    function: Callable[..., Any], deadline_s: float = 60.0, stragglers: Stragglers | None = None
) -> Course:
    rule = GroupRewards(function, deadline_s)
    of = replace(job(staleness=1, steps=2), group_rewards=rule, stragglers=stragglers)
    return Course(of, 1.0, judge=judge_of({"Counting": rule}, FakeRenderer()))


async def test_a_group_gets_its_rewards_together_when_its_last_member_has_ended():
    asked: set[tuple[str, ...]] = set()

    async def ranked(members: Sequence[Finished]) -> list[float]:
        # Rewards of their own would be equal in every second group, and that group dropped.
        asked.add(tuple(member.program_id for member in members))
        assert {(member.answer, member.said) for member in members} == {("done", ("!look a", "done"))}
        assert len({str(member.task["number"]) for member in members}) == 1
        await anyio.sleep(5)
        return await by_place(members)

    course = judged(ranked)
    await course.run(Uneven())
    batch = [member for seen in course.seen for member in seen.members]
    assert [member.reward for member in batch] == [0.0, 1.0, 2.0, 3.0] * 8
    groups = [group for seen in course.seen for group in seen.groups]
    assert asked >= {tuple(member.program_id for member in group.members) for group in groups}
    assert not [seen.skipped for seen in course.seen if seen.skipped]
    assert set(closes(course)) <= {"trained", "dropped(job_over)", "cancelled(user)"}


async def test_only_members_that_can_be_trained_are_judged_and_stragglers_are_not_waited_for():
    sizes: set[int] = set()

    async def count(members: Sequence[Finished]) -> list[float]:
        sizes.add(len(members))
        return await by_place(members)

    tools = Moody(
        fails=lambda program: program.member == 0 and program.group % 2 == 0,
        takes_s=lambda program: 5000.0 if program.member == 3 else 1.0,
    )
    course = judged(count, stragglers=Stragglers(after_s=20.0))
    await course.run(tools)
    assert sizes == {2, 3}
    assert closes(course)["dropped(straggler)"] >= 8


def returning(told: Callable[[int], object]) -> Callable[..., Any]:
    async def function(members: Sequence[Finished]) -> object:
        return told(len(members) if isinstance(members, list) else 1)

    return function


async def raises(_members: Sequence[Finished]) -> list[float]:
    raise KeyError("colour")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (raises, "KeyError: 'colour'"),
        (returning(lambda count: [0.0] * (count - 1)), "3 rewards for 4 members"),
        (returning(lambda count: [float("nan")] * count), "returned nan; return a finite number"),
        (returning(lambda _: None), "returned None; return one number for each"),
    ],
)
async def test_rewards_that_cannot_be_used_fail_the_group_and_end_the_job_when_none_comes(
    function: Callable[..., Any], said: str
):
    course = judged(function)
    with pytest.raises(NothingComes, match="programs in a row failed"), lone_error():
        await course.run(Uneven())
    failed = {name for name in course.ledger.statistics().outcomes if name.startswith("failed(environment")}
    assert failed
    assert all("group_rewards of job-" in name and said in name for name in failed)


async def test_a_judge_of_groups_that_does_not_answer_is_the_infrastructures_failure_and_no_reward():
    calls = 0

    async def slow_at_first(members: Sequence[Finished]) -> list[float]:
        nonlocal calls
        calls += 1
        await anyio.sleep(100 if calls == 1 else 1)
        return await by_place(members)

    course = judged(slow_at_first, deadline_s=10.0)
    await course.run(Uneven())
    outcomes = closes(course)
    (late,) = [name for name in outcomes if name.startswith("failed")]
    assert late.startswith("failed(infrastructure, group_rewards of job-")
    assert "no rewards within 10 s" in late
    assert outcomes[late] == 4
    assert outcomes["trained"] == 2 * 16


@pytest.mark.parametrize("is_judged", [True, False])
def test_finished_groups_of_a_job_that_was_cut_off_are_judged_anew_rather_than_learnt_from_unjudged(
    is_judged: bool,
):
    rule = GroupRewards(by_place)
    of = replace(job(staleness=1, steps=2), group_rewards=rule if is_judged else None)
    judge = judge_of({"Counting": of.group_rewards}, FakeRenderer())
    with closing(sqlite3.connect(":memory:")) as connection:
        ledger, said = Ledger(), list[JobEvent]()
        rollouts = Rollouts(cast("Any", None), ledger, Journal(connection))
        supply = GroupSupply(plan_of(of), rollouts, lambda: V0, said.append, judge)
        members = tuple(trajectory(f"old-{member}", float(member), group="old") for member in range(4))
        for member in members:
            ledger.submit(member.program_id)
            ledger.end(member.program_id, Outcome(OutcomeKind.DROPPED, "job_over"))
        programs = tuple(member.program_id for member in members)
        group = KeptGroup(GroupId("old"), Start(0), programs, members)
        assert supply.go_on(supply.state_dict(), NO_BRANCHES, [group]) == (0 if is_judged else 1)
    # What was drawn for it comes again only where it was not kept.
    outcomes = ledger.statistics().outcomes
    assert outcomes == ({"dropped(group_rewards)": 4} if is_judged else {})
    assert ledger.statistics().sealed == (0 if is_judged else 4)


# ---- later ----


@dataclass
class Mute(FakeTools):
    """Environments that leave their rewards to others."""

    async def reward(
        self, program_id: ProgramId, call_id: CallId, episode: Episode, *, timeout_s: float
    ) -> Reward:
        return Reward(value=None, metrics={"seen": 1.0}, elapsed_s=0)


def late(rule: LateRewards | None) -> tuple[Course, AwaitedRewards]:
    awaited = AwaitedRewards()
    course = Course(replace(job(staleness=1, steps=2), late_rewards=rule), 1.0)
    course.around = lambda runner: awaited.around(runner, rule, FakeRenderer(), course.said.append)
    return course, awaited


def waited_for(said: Sequence[JobEvent]) -> list[str]:
    return [event.program for event in said if isinstance(event, RewardAwaited)]


async def test_a_group_waits_for_the_rewards_that_are_given_to_its_programs():
    course, awaited = late(LateRewards(deadline_s=500.0))

    async def give() -> None:
        while True:
            await anyio.sleep(50)
            for program_id in awaited.waiting:
                awaited.give(program_id, float(program_id[-1]), {"judged": 2.0})

    tools = Mute()
    async with anyio.create_task_group() as group:
        group.start_soon(give)
        await course.run(tools)
        group.cancel_scope.cancel()
    members = [member for seen in course.seen for member in seen.members]
    assert len(members) == 2 * 4 * 4
    assert all(member.reward == float(member.program_id[-1]) for member in members)
    assert all((m.metrics["seen"], m.metrics["judged"]) == (1.0, 2.0) for m in members)
    assert not tools.live
    assert awaited.waiting == ()
    assert set(closes(course)) <= {"trained", "dropped(job_over)", "cancelled(user)"}


async def test_a_reward_that_does_not_come_in_time_is_a_failure_of_the_infrastructure_and_is_tried_anew():
    course, awaited = late(LateRewards(deadline_s=30.0))

    async def give() -> None:
        while True:
            await anyio.sleep(1)
            for program_id in awaited.waiting:
                # One member of each group is forgotten the first time.
                if "-3" in program_id[-2:] and "+" not in program_id:
                    continue
                awaited.give(program_id, float(program_id.partition("+")[0][-1]), {})

    async with anyio.create_task_group() as group:
        group.start_soon(give)
        await course.run(Mute())
        group.cancel_scope.cancel()
    outcomes = closes(course)
    assert outcomes["trained"] == 32
    assert outcomes["failed(infrastructure, no reward within 30 s of its end)"] >= 8
    replaced = {event.program for event in course.said if isinstance(event, Replaced)}
    assert all(program.endswith("-3") for program in replaced)


async def test_a_function_of_the_job_is_asked_for_late_rewards():
    async def ask(finished: Finished) -> float:
        await anyio.sleep(40)
        return len(finished.answer) + float(finished.program_id[-1])

    course, _ = late(LateRewards(deadline_s=60.0, ask=ask))
    await course.run(Mute())
    members = [member for seen in course.seen for member in seen.members]
    assert [member.reward for member in members] == [4.0, 5.0, 6.0, 7.0] * 8


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (None, "failed(environment, the reward of Counting comes later, and the job has no late_rewards"),
        (LateRewards(ask=raises), "failed(environment, late_rewards: ask of job-"),
        (LateRewards(ask=returning(lambda _: "many")), "failed(environment, late_rewards: ask of job-"),
    ],
)
async def test_late_rewards_that_nobody_can_give_end_the_job(rule: LateRewards | None, said: str):
    course, _ = late(rule)
    with pytest.raises(NothingComes), lone_error():
        await course.run(Mute())
    assert any(name.startswith(said) for name in course.ledger.statistics().outcomes)


async def test_a_reward_may_come_before_the_end_and_comes_once():
    awaited = AwaitedRewards()
    with awaited.expecting(ProgramId("a")) as slot:
        awaited.give(ProgramId("a"), 0.5, {})
        assert slot.given.is_set()
        with pytest.raises(ConfigError, match="has one already"):
            awaited.give(ProgramId("a"), 0.7, {})
    with pytest.raises(ConfigError, match="no program of that id"):
        awaited.give(ProgramId("a"), 0.5, {})
    with awaited.expecting(ProgramId("b")), pytest.raises(ConfigError, match="finite"):
        awaited.give(ProgramId("b"), float("inf"), {})


# ---- what is refused ----


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: GroupRewards("nowhere_at_all:f"), "group_rewards: function 'nowhere_at_all:f'"),
        (lambda: GroupRewards("math:rank"), "no function 'rank' in math"),
        (lambda: GroupRewards(by_place, deadline_s=0), "group_rewards: deadline_s is 0"),
        (lambda: LateRewards(deadline_s=float("inf")), "late_rewards: deadline_s is inf"),
        (lambda: LateRewards(ask="math"), "no function '' in math"),
        (
            lambda: replace(job(staleness=1), algorithm=GRPO(group_size=1, zero_spread="keep"),
                            group_rewards=GroupRewards(by_place)),
            "group_size",
        ),
        (
            lambda: RolloutJob(env=ParityLater, model=".", tasks=numbers(1), group_size=1,
                               group_rewards=GroupRewards(by_place)),
            "group_rewards: group_size is 1",
        ),
    ],
)  # fmt: skip
def test_rules_that_cannot_hold_are_refused(make: Callable[[], object], said: str):
    with pytest.raises((SostenutoError, ValueError), match=said):
        make()


async def test_a_job_file_has_both(tmp_path: Path):
    path = tmp_path / "job.toml"
    path.write_text(
        """
        environment = "fakes_training:ParityLater"
        model = "."
        steps = 1
        group_rewards = { function = "test_rewards_after:by_place", deadline_s = 5 }
        late_rewards = { deadline_s = 7, ask = "test_rewards_after:raises" }
        [tasks]
        factory = "fakes_training:numbers"
        arguments = { count = 3 }
        """
    )
    found: RLJob = await load_train_file(path).job()
    assert found.group_rewards == GroupRewards("test_rewards_after:by_place", 5)
    assert found.late_rewards == LateRewards(7, "test_rewards_after:raises")
    path.write_text(path.read_text().replace("by_place", "by_plaice"))
    with pytest.raises(ConfigError, match="no function 'by_plaice'"):
        load_train_file(path)
