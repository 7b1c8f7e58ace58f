"""Placement by request, the fixed cap, and the policies' names."""

import pytest

from baseline_world import Hand, decoded
from sostenuto.errors import ConfigError
from sostenuto.scheduler.actions import Refuse
from sostenuto.scheduler.baselines.fixed_cap import FixedCap
from sostenuto.scheduler.baselines.request_level import RequestHash, RequestRoundRobin, RequestSticky
from sostenuto.scheduler.events import EngineJoined, EngineLost, PublicationBegun, UpdateFailed
from sostenuto.scheduler.frame import Frame
from sostenuto.scheduler.lifecycle import Phase
from sostenuto.scheduler.policies import POLICIES, make_policy
from sostenuto.scheduler.program import Reason
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.types import EngineId, ProgramId, Version


@pytest.mark.parametrize("policy", [RequestRoundRobin, RequestHash, RequestSticky])
def test_request_level_scheduling_sends_every_turn_at_once_however_full_the_engines_are(
    policy: type[Frame],
) -> None:
    hand = Hand(policy(), 100, 100, concurrency=1)
    for index in range(20):
        assert decoded(hand.come(f"p{index}", 90)) == [f"p{index}"]


def test_round_robin_takes_the_next_engine_for_each_turn() -> None:
    hand = Hand(RequestRoundRobin(), 100, 100)
    hand.come("a", 10)
    hand.come("b", 10)
    hand.acts("a", 20)
    hand.returns("a", 20)
    assert hand.where == {"a": "e0", "b": "e1"}
    hand.acts("b", 20)
    hand.returns("b", 20)
    hand.acts("b", 20)
    hand.returns("b", 20)
    assert hand.where["b"] == "e0"


def test_a_hash_places_a_session_alike_in_every_run_and_moves_only_those_of_a_lost_engine() -> None:
    first, second = Hand(RequestHash(), 1000, 1000, 1000), Hand(RequestHash(), 1000, 1000, 1000)
    names = [f"p{index}" for index in range(60)]
    for name in names:
        first.come(name, 10)
    for name in reversed(names):
        second.come(name, 10)
    before = dict(first.where)
    assert before == second.where
    assert set(before.values()) == {"e0", "e1", "e2"}
    first.feed(EngineLost(EngineId("e1")))
    moved = {name for name in names if first.where[name] != before[name]}
    assert moved == {name for name in names if before[name] == "e1"}


def test_a_sticky_session_stays_where_it_began_when_another_engine_is_idle() -> None:
    hand = Hand(RequestSticky(), 100, 100)
    hand.come("a", 10)
    hand.come("b", 10)
    hand.come("c", 10)
    assert hand.where == {"a": "e0", "b": "e1", "c": "e0"}
    hand.answers("b")
    hand.acts("c", 20)
    hand.returns("c", 20)
    assert hand.where["c"] == "e0"


def test_sessions_in_a_tool_call_count_when_engines_decode_equally_much() -> None:
    hand = Hand(RequestSticky(), 100, 100)
    hand.come("a", 10)
    hand.acts("a", 20)
    hand.come("b", 10)
    assert hand.where["b"] == "e1"


def test_a_sticky_session_settles_anew_when_its_engine_is_gone() -> None:
    hand = Hand(RequestSticky(), 100, 100)
    hand.come("a", 10)
    assert decoded(hand.feed(EngineLost(EngineId("e0")))) == ["a"]
    assert hand.where["a"] == "e1"


def test_turns_wait_for_a_verified_version_and_go_out_together() -> None:
    hand = Hand(RequestSticky(), 100)
    hand.feed(PublicationBegun(Version(0, 1)))
    hand.feed(UpdateFailed(EngineId("e0"), Version(0, 1), "checksum"))
    hand.come("a", 10)
    hand.come("b", 10)
    assert hand.policy.snapshot().waits_for[ProgramId("a")] is Reason.VERSION
    assert decoded(hand.feed(EngineJoined(EngineId("e1"), Version(0, 1), 100, 4))) == ["a", "b"]


def test_what_no_engine_can_hold_is_refused() -> None:
    for policy in (RequestSticky(), FixedCap(4)):
        hand = Hand(policy, 100, 200)
        assert hand.come("a", 150, turn_tokens=51) == [Refuse(ProgramId("a"), 201, 200)]
        assert decoded(hand.come("b", 150)) == ["b"]
        assert hand.where["b"] == "e1"


def test_a_cap_lets_in_the_next_by_submission_when_one_has_answered() -> None:
    hand = Hand(FixedCap(2), 1000, 1000)
    for name in "abcd":
        hand.come(name, 10)
    assert set(hand.where) == {"a", "b"}
    hand.acts("a", 20)
    assert hand.policy.snapshot().waits_for[ProgramId("c")] is Reason.SLOTS
    assert decoded(hand.returns("a", 20)) == ["a"]
    assert decoded(hand.answers("b")) == ["c"]
    assert set(hand.where) == {"a", "b", "c"}


def test_a_capped_program_whose_engine_is_lost_keeps_its_place() -> None:
    hand = Hand(FixedCap(1), 100, 100)
    hand.come("a", 10)
    hand.come("b", 10)
    assert decoded(hand.feed(EngineLost(EngineId("e0")))) == ["a"]
    assert decoded(hand.answers("a")) == ["b"]


def test_environments_are_made_at_submission_up_to_the_limit_of_live_programs() -> None:
    settings = SchedulerSettings(live_programs=3, prepare_ahead=1)
    hand = Hand(FixedCap(1, settings), 100)
    for name in "abc":
        hand.come(name, 10)
    with pytest.raises(AssertionError):
        hand.come("d", 10)
    assert hand.policy.snapshot().phases[ProgramId("d")] is Phase.QUEUED


def test_every_listed_policy_can_be_made_and_forgets_a_program_that_is_over() -> None:
    for name in POLICIES:
        hand = Hand(make_policy(name.replace(":N", ":2")), 1000)
        hand.come("a", 10)
        hand.answers("a")
        assert hand.policy.snapshot().waiting == 0
        assert hand.policy.snapshot().engines == {EngineId("e0"): (0, 0)}


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("thunderagnt", "did you mean 'thunderagent'"),
        ("cap", "whole number from 1 on"),
        ("cap:0", "whole number from 1 on"),
        ("cap:-3", "whole number from 1 on"),
        ("cap:1.5", "whole number from 1 on"),
        ("cap:9", "live_programs is 8"),
        ("request-sticky:3", "did you mean 'request-sticky'"),
    ],
)
def test_a_policy_that_cannot_be_made_says_what_to_write_instead(name: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        make_policy(name, SchedulerSettings(live_programs=8))
