"""Credit by turn: what each turn earned, from an environment's reward to the advantages of its tokens."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

from sostenuto.envs.environment import Environment
from sostenuto.envs.testing import so_test
from sostenuto.envs.verdict import read_verdict
from sostenuto.errors import Blame, EnvironmentFailure, RecordError
from sostenuto.records import Producer, Span, Trajectory
from sostenuto.runtime.records import decode_trajectory, encode_trajectory
from sostenuto.tools.decorator import tool
from sostenuto.trainer.algorithms import GRPO
from sostenuto.trainer.credit import credit
from sostenuto.trainer.gae import Valued, credit_by_critic
from sostenuto.trainer.parts import GAE, GroupRelative, TurnReturn
from sostenuto.trainer.samples import Sample, trajectory_samples
from sostenuto.types import Episode, Outcome, OutcomeKind
from trainer_world import sampled, trajectory


def of_turns(name: str, *lengths: int, reward: float = 0.0, by_turn: tuple[float, ...] = ()) -> Trajectory:
    """One turn of so many tokens after the other, with an observation of two tokens between them."""
    spans = [Span.fed(Producer.USER, [1])]
    for number, length in enumerate(lengths):
        spans.append(replace(sampled([2] * length), started_s=float(number)))
        spans.append(Span.fed(Producer.ENVIRONMENT, [3, 3], at_s=number + 0.5))
    total = sum(by_turn) if by_turn else reward
    return replace(trajectory(name, total, sequences=(tuple(spans),)), turn_rewards=by_turn)


def by_turn(*, gamma: float = 1.0, normalize_std: bool = False) -> GRPO:
    return GRPO(advantage=TurnReturn(gamma=gamma, normalize_std=normalize_std))


def advantages(samples: list[Sample]) -> list[list[float]]:
    return [sample.advantages[sample.mask].tolist() for sample in samples]


def test_the_tokens_of_a_turn_get_what_it_and_later_turns_earned_against_the_group():
    members = (of_turns("a", 2, 1, by_turn=(0.0, 1.0)), of_turns("b", 1, 2, by_turn=(0.5, 0.0)))
    # To go: a has 1 and 1, b has 0.5 and 0; means 0.75 and 0.5.
    found = advantages(credit([members], by_turn()))
    assert found == [[0.25, 0.25, 0.5], [-0.25, -0.5, -0.5]]
    scaled = advantages(credit([members], by_turn(normalize_std=True)))
    assert scaled == [[1, 1, 1], [-1, -1, -1]]


def test_what_comes_later_is_discounted_for_each_turn():
    members = (
        of_turns("a", 1, 1, 1, by_turn=(0.0, 1.0, 2.0)),
        of_turns("b", 1, 1, 1, by_turn=(0.0, 0.0, 0.0)),
    )
    # To go of a: 0 + 0.5 (1 + 0.5 * 2), 1 + 0.5 * 2, 2.
    assert advantages(credit([members], by_turn(gamma=0.5))) == [[0.5, 1.0, 1.0], [-0.5, -1.0, -1.0]]


def test_a_member_that_had_ended_is_compared_by_its_last_turn():
    members = (of_turns("a", 1, 1, by_turn=(0.0, 1.0)), of_turns("b", 1, by_turn=(0.5,)))
    assert advantages(credit([members], by_turn())) == [[0.25, 0.25], [-0.25]]


@pytest.mark.parametrize("normalize_std", [True, False])
def test_without_rewards_by_turn_and_discount_it_is_the_comparison_of_whole_trajectories(normalize_std: bool):
    noise = np.random.default_rng(3)
    members = tuple(
        of_turns(
            f"{n}", *noise.integers(1, 4, int(noise.integers(1, 5))).tolist(), reward=float(noise.normal())
        )
        for n in range(6)
    )
    whole = GRPO(advantage=GroupRelative(normalize_std=normalize_std))
    expected = advantages(credit([members], whole))
    assert advantages(credit([members], by_turn(normalize_std=normalize_std))) == expected


def test_equal_rewards_give_exactly_zero_and_a_failed_member_votes_in_no_turn():
    failed = replace(
        of_turns("c", 1, 1, by_turn=(9.0, 9.0)),
        outcome=Outcome(OutcomeKind.FAILED, "gone", Blame.INFRASTRUCTURE),
    )
    members = (of_turns("a", 1, 1, by_turn=(0.1, 0.2)), of_turns("b", 1, 1, by_turn=(0.1, 0.2)), failed)
    assert advantages(credit([members], by_turn(normalize_std=True))) == [[0.0, 0.0], [0.0, 0.0]]


def test_turns_of_a_rewritten_history_are_in_the_order_in_which_they_began():
    start = Span.fed(Producer.USER, [1])
    first = replace(sampled([2]), started_s=1.0)
    last = replace(sampled([2, 2]), started_s=2.0)
    forked = trajectory("a", 1.0, sequences=((start, last), (start, first)))
    members = (replace(forked, turn_rewards=(0.0, 1.0)), of_turns("b", 1, 1, by_turn=(0.0, 0.0)))
    found = credit([members], by_turn(gamma=0.5))
    assert advantages(found) == [[0.5, 0.5], [0.25], [-0.25, -0.5]]


def test_with_a_critic_a_turns_reward_comes_with_its_last_token():
    member = of_turns("a", 2, 1, by_turn=(0.5, 1.0))
    (sample,) = trajectory_samples(member, 0.0)
    values = np.zeros(len(sample), dtype=np.float32)
    (found,) = credit_by_critic([Valued(member, [sample], [values])], GAE(lambda_=0, whiten=False))
    assert advantages([found]) == [[0.0, 0.5, 1.0]]
    (whole,) = credit_by_critic([Valued(member, [sample], [values])], GAE(whiten=False))
    assert advantages([whole]) == [[1.5, 1.5, 1.0]]


def test_rewards_that_cannot_be_credited_are_refused_naming_the_program():
    other = of_turns("b", 1, 1, reward=0.0)
    with pytest.raises(RecordError, match="a: rewards of 3 turns, the record has 2"):
        credit([(of_turns("a", 1, 1, by_turn=(0.0, 1.0, 2.0)), other)], by_turn())
    for wrong in (math.nan, math.inf):
        with pytest.raises(RecordError, match="a: a reward is missing or not finite"):
            credit([(of_turns("a", 1, 1, by_turn=(0.0, wrong)), other)], by_turn())
    with pytest.raises(RecordError, match="a group of 1"):
        credit([(of_turns("a", 1, 1, by_turn=(0.0, 1.0)),)], by_turn())
    with pytest.raises(ValueError, match="group_size: turn_return compares"):
        GRPO(group_size=1, advantage=TurnReturn())


def test_an_empty_trajectory_and_a_group_that_is_all_masked_train_nothing():
    nothing = trajectory("e", 1.0, sequences=((Span.fed(Producer.USER, [1, 2]),),))
    members = (of_turns("a", 1, by_turn=(1.0,)), of_turns("b", 1, by_turn=(0.0,)), nothing)
    assert advantages(credit([members], by_turn())) == [[0.5], [-0.5]]
    failed = Outcome(OutcomeKind.FAILED, "gone", Blame.INFRASTRUCTURE)
    masked = tuple(replace(member, outcome=failed) for member in members)
    assert credit([masked], by_turn()) == []


def test_a_record_carries_the_rewards_of_its_turns():
    member = of_turns("a", 2, 1, by_turn=(0.5, 1.0))
    assert decode_trajectory(encode_trajectory(member)).turn_rewards == (0.5, 1.0)
    assert decode_trajectory(encode_trajectory(of_turns("b", 1))).turn_rewards == ()


class Steps(BaseModel):
    by_turn: list[float]
    whole: float | None = None


class Stepwise(Environment[Steps]):
    """Says what its task says."""

    async def reset(self, task: Steps) -> str:
        del task
        return "Go on."

    @tool
    async def step(self) -> str:
        """Take a step."""
        return "taken"

    async def reward(self, episode: Episode) -> dict[str, Any]:
        told: dict[str, Any] = {"turns": self.task.by_turn, "steps": float(episode.turns)}
        return told if self.task.whole is None else {**told, "reward": self.task.whole}


async def test_an_environment_says_what_each_turn_earned():
    async with so_test(Stepwise, Steps(by_turn=[0.25, 1.0])) as program:
        await program.call("step")
        verdict = await program.verdict()
    assert (verdict.value, verdict.turns, verdict.metrics) == (1.25, (0.25, 1.0), {"steps": 2.0})


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (Steps(by_turn=[1.0]), "'turns' has 1 rewards, the episode 2 turns"),
        (Steps(by_turn=[]), "'turns' has 0 rewards, the episode 2 turns"),
        (
            Steps(by_turn=[0.0, 1.0], whole=2.0),
            "the reward is 2.0, its turns come to 1.0; leave 'reward' out",
        ),
    ],
)
async def test_rewards_of_other_turns_or_another_sum_are_the_environments_failure(task: Steps, said: str):
    async with so_test(Stepwise, task) as program:
        await program.call("step")
        with pytest.raises(EnvironmentFailure, match=said):
            await program.verdict()


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (math.nan, "returned nan; a reward must be finite"),
        (math.inf, "returned inf"),
        (None, "returned None; return a finite float"),
        ({"metric": 1.0}, "have no 'reward'"),
        ({"turns": [0.0, math.nan]}, "'turns': returned nan"),
        ({"turns": [0.0, None]}, "'turns': returned None"),
        ({"turns": "01"}, "return one number for each turn"),
    ],
)
def test_a_reward_that_is_none_is_the_environments_failure(returned: object, said: str):
    with pytest.raises(EnvironmentFailure, match=said):
        read_verdict(returned, "reward of E", turns=2)


def test_an_agent_gives_no_rewards_by_turn():
    with pytest.raises(EnvironmentFailure, match="an agent's turns are its own"):
        read_verdict({"turns": [1.0]}, "run of A")
