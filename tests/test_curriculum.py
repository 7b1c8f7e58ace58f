"""Tasks by weight and by what is left to learn from them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from sostenuto.envs.curriculum import Curriculum
from sostenuto.envs.task import Tasks
from sostenuto.errors import ConfigError
from test_supply import Course, Number, Uneven, job

TASKS = Tasks([Number(number=n) for n in range(4)])
IDS = TASKS.ids


def drawn(curriculum: Curriculum[Number], start: int = 0, count: int = 4000) -> Counter[int]:
    return Counter(curriculum.at(ordinal).task.number for ordinal in range(start, start + count))


def test_tasks_are_drawn_by_their_weights():
    shares = drawn(Curriculum(TASKS, weights=[1.0, 2.0, 0.0, 1.0], by_difficulty=False))
    assert set(shares) == {0, 1, 3}
    assert shares[1] / 4000 == pytest.approx(0.5, abs=0.03)
    by_id = Curriculum(TASKS, weights={IDS[2]: 3.0}, by_difficulty=False)
    assert drawn(by_id)[2] / 4000 == pytest.approx(0.5, abs=0.03)


def test_what_is_solved_half_of_the_time_comes_most_and_nothing_is_given_up():
    curriculum = Curriculum(TASKS, floor=0.1)
    for _ in range(100):
        for task_id, reward in zip(IDS, (0.0, 1.0, 0.5, 0.9), strict=True):
            curriculum.observe(task_id, reward)
    assert curriculum.success(IDS[2]) == pytest.approx(0.5)
    assert curriculum.weight(IDS[2]) == pytest.approx(1.0)
    assert 0.1 <= curriculum.weight(IDS[0]) < 0.3
    shares = drawn(curriculum)
    assert shares[2] > shares[3] > shares[0] > 100
    assert shares[1] > 100


def test_estimates_follow_the_policy():
    curriculum = Curriculum(TASKS, decay=0.8)
    for _ in range(50):
        curriculum.observe(IDS[0], 0.0)
    for _ in range(20):
        curriculum.observe(IDS[0], 1.0)
    assert curriculum.success(IDS[0]) > 0.85
    curriculum.observe("of another", 1.0)
    curriculum.observe(IDS[1], float("nan"))
    assert curriculum.success(IDS[1]) == 0.5


def test_an_ordinal_stays_what_it_was_and_who_goes_on_draws_the_same():
    first = Curriculum(TASKS, seed=3)
    before = [first.at(ordinal) for ordinal in range(20)]
    for _ in range(30):
        first.observe(IDS[1], 1.0)
    assert [first.at(ordinal) for ordinal in range(20)] == before
    second = Curriculum(TASKS, seed=3)
    second.load_state_dict(first.state_dict())
    assert [second.at(n) for n in range(60)] == [first.at(n) for n in range(60)]
    assert [Curriculum(TASKS, seed=4).at(n) for n in range(60)] != [first.at(n) for n in range(60)]


@pytest.mark.looptime
async def test_a_job_tells_its_curriculum_how_programs_have_ended():
    curriculum = Curriculum(TASKS)
    course = Course(replace(job(staleness=1, steps=6), tasks=curriculum), 1.0)
    await course.run(Uneven())
    assert course.ledger.statistics().closes
    # Half of the groups have rewards of 0 and 1, the others of 1 alone.
    assert any(curriculum.success(task_id) != 0.5 for task_id in IDS)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0], "1 weights for 4 tasks"),
        ([0.0] * 4, "one above it"),
        ([1.0, -1.0, 1.0, 1.0], "none below 0"),
        ({"nobody": 1.0}, "'nobody', which is the id of no task"),
    ],
)
def test_weights_that_make_no_sense_are_refused(weights: Mapping[str, float] | Sequence[float], message: str):
    with pytest.raises(ConfigError, match=message):
        Curriculum(TASKS, weights=weights)


def test_other_nonsense_is_refused():
    with pytest.raises(ConfigError, match="floor is 0"):
        Curriculum(TASKS, floor=0)
    with pytest.raises(ConfigError, match="no 'seen' and 'drawn'"):
        Curriculum(TASKS).load_state_dict({})
    with pytest.raises(ConfigError, match="a task 'x' that is not among these"):
        Curriculum(TASKS).load_state_dict({"seen": {"x": [1.0, 1.0]}, "drawn": []})


def test_one_that_goes_on_from_a_state_forgets_its_oldest_draws_as_before():
    first, second = Curriculum(TASKS, seed=3), Curriculum(TASKS, seed=3)
    drawn(first, count=5000)
    second.load_state_dict(first.state_dict())
    assert drawn(second, start=5000, count=5000) == drawn(first, start=5000, count=5000)
    remembered = second.state_dict()["drawn"]
    assert isinstance(remembered, list)
    assert len(remembered) < 5000
