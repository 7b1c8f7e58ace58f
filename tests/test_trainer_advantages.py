import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sostenuto.errors import Blame, RecordError
from sostenuto.records import Producer, Span
from sostenuto.trainer.advantages import group_advantages
from sostenuto.trainer.algorithms import GRPO, RLOO, Reinforce, ReinforcePP
from sostenuto.trainer.credit import credit
from sostenuto.trainer.parts import GroupRelative
from sostenuto.types import Outcome, OutcomeKind
from trainer_world import sampled, trajectory

FAILED = Outcome(OutcomeKind.FAILED, "sandbox died", Blame.INFRASTRUCTURE)


def test_rewards_1_1_0_0_give_plus_one_and_minus_one_shared_by_all_tokens_of_a_response():
    members = tuple(trajectory(f"p{i}", reward) for i, reward in enumerate([1.0, 1.0, 0.0, 0.0]))
    samples = credit([members], GRPO(group_size=4))
    assert [s.advantages[s.mask].tolist() for s in samples] == [[1, 1], [1, 1], [-1, -1], [-1, -1]]
    assert all((s.advantages[~s.mask] == 0).all() for s in samples)


@pytest.mark.parametrize("rewards", [np.zeros(8), np.full(8, np.float32(0.1)), np.array([0.1 + 0.2, 0.3])])
def test_equal_rewards_give_advantages_of_exactly_zero(rewards: np.ndarray):
    assert (group_advantages(rewards) == 0).all()


def test_mixed_zeros_and_ones_give_a_signal():
    assert (group_advantages(np.array([0.0] * 7 + [1.0])) != 0).all()


def test_a_masked_member_votes_in_no_statistic():
    valid = np.array([True, False, True, True])
    found = group_advantages(np.array([1.0, 1.0, 0.0, 0.0]), valid, normalize_std=False)
    assert found[valid] == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert found[1] == 0
    scaled = group_advantages(np.array([1.0, 1e9, 0.0, 0.0]), valid)
    assert scaled[valid] == pytest.approx(np.array([2, -1, -1]) / np.sqrt(2))


def test_a_failed_member_trains_nothing_and_votes_in_nothing():
    members = (
        trajectory("a", 1.0),
        trajectory("b", 1.0, outcome=FAILED),
        trajectory("c", 0.0),
        trajectory("d", 0.0),
    )
    samples = credit([members], GRPO(group_size=4, advantage=GroupRelative(normalize_std=False)))
    assert [s.origin for s in samples] == ["a", "c", "d"]
    assert [float(s.advantages[-1]) for s in samples] == pytest.approx([2 / 3, -1 / 3, -1 / 3])


def test_an_empty_trajectory_and_one_without_a_reward_vote_in_nothing():
    empty = trajectory("b", 1.0, sequences=((Span.fed(Producer.USER, [1, 2]),),))
    members = (trajectory("a", 1.0), empty, trajectory("c", 0.0), trajectory("d", 0.0), trajectory("e", None))
    samples = credit([members], GRPO(group_size=5, advantage=GroupRelative(normalize_std=False)))
    assert [float(s.advantages[-1]) for s in samples] == pytest.approx([2 / 3, -1 / 3, -1 / 3])


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_reward_that_is_not_finite_is_refused_by_every_comparison(wrong: float):
    members = (trajectory("a", 1.0), trajectory("b", wrong))
    for algorithm in (GRPO(), RLOO(), ReinforcePP(group_size=2), Reinforce(group_size=2)):
        with pytest.raises(RecordError, match="a reward is not finite"):
            credit([members], algorithm)


def test_a_group_whose_members_all_failed_is_refused_where_members_are_compared():
    members = (trajectory("a", 1.0, outcome=FAILED), trajectory("b", 0.0, outcome=FAILED))
    with pytest.raises(RecordError, match="a group of 0 has nothing to compare"):
        credit([members], GRPO(group_size=2))
    assert credit([members], Reinforce(group_size=2)) == []


def test_one_reward_counts_once_however_many_sequences_it_has():
    start = Span.fed(Producer.USER, [1])
    branches = ((start, sampled([2, 3])), (start, sampled([4])), (start, sampled([5])))
    members = (trajectory("a", 1.0, sequences=branches), trajectory("b", 0.0))
    samples = credit([members], GRPO())
    assert [(s.origin, float(s.advantages[-1])) for s in samples] == [("a", 1), ("a", 1), ("a", 1), ("b", -1)]


def test_a_group_of_one_and_a_reward_that_is_not_finite_are_refused():
    with pytest.raises(RecordError, match="a group of 1"):
        group_advantages(np.array([1.0]))
    with pytest.raises(RecordError, match="not finite"):
        group_advantages(np.array([1.0, np.nan]))
    with pytest.raises(RecordError, match="several groups"):
        credit([(trajectory("a", 1.0, group="g"), trajectory("b", 0.0, group="h"))], GRPO())


@given(
    st.lists(st.integers(-1000, 1000), min_size=2, max_size=16), st.floats(0.01, 100), st.integers(-50, 50)
)
def test_advantages_do_not_change_with_scale_and_shift_of_the_rewards(
    rewards: list[int], scale: float, shift: int
):
    before = group_advantages(np.array(rewards, dtype=np.float64))
    after = group_advantages(np.array(rewards, dtype=np.float64) * scale + shift)
    assert after == pytest.approx(before, abs=1e-6)
    assert before.sum() == pytest.approx(0, abs=1e-9)
    assert before.std() == pytest.approx(1 if len(set(rewards)) > 1 else 0)
