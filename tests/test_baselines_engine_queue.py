"""Systems that change the queue inside an engine: Continuum, InferCept, Autellix; and CONCUR's window."""

import pytest

from baseline_world import Hand, decoded
from sostenuto.errors import ConfigError
from sostenuto.scheduler.actions import Evict, Offload
from sostenuto.scheduler.baselines.aimd import Aimd
from sostenuto.scheduler.baselines.autellix import Las
from sostenuto.scheduler.baselines.continuum import Continuum, Predictability, best_ttl_s
from sostenuto.scheduler.baselines.infercept import InferCept
from sostenuto.scheduler.events import EngineLoaded, EngineLost, PublicationBegun, TurnCost, UpdateFailed
from sostenuto.scheduler.frame import Frame
from sostenuto.scheduler.lifecycle import Phase
from sostenuto.scheduler.policies import make_policy
from sostenuto.types import EngineId, ProgramId, Version


def evicted(hand: Hand) -> list[str]:
    return [action.program_id for action in hand.told if isinstance(action, Evict)]


def cost(prefilled: int, generated: int = 10) -> TurnCost:
    return TurnCost(prefilled, prefilled / 1000, generated, generated / 100)


def phase(hand: Hand, name: str) -> Phase:
    return hand.policy.snapshot().phases[ProgramId(name)]


def is_pinned_until(hand: Hand, name: str, end_s: float) -> bool:
    """Exactly so long, and nothing is said about it when it ends."""
    said = hand.wakes(end_s - 0.01)
    before = phase(hand, name)
    said += hand.wakes(end_s)
    return (before, phase(hand, name), said) == (Phase.ACTING, Phase.PARKED, [])


# ---- all queues ----


@pytest.mark.parametrize("policy", [Las, Continuum, InferCept])
def test_a_turn_is_sent_only_when_the_engine_can_start_it(policy: type[Frame]) -> None:
    hand = Hand(policy(), 100, concurrency=2)
    assert decoded(hand.come("a", 60)) == ["a"]
    assert decoded(hand.come("b", 60)) == []
    assert decoded(hand.come("c", 20)) == []
    assert hand.policy.snapshot().waiting == 2
    assert decoded(hand.answers("a")) == ["b", "c"]
    assert hand.policy.snapshot().engines[EngineId("e0")] == (80, 2)


@pytest.mark.parametrize("policy", [Las, Continuum, InferCept])
def test_those_in_the_queue_of_a_lost_engine_go_to_another(policy: type[Frame]) -> None:
    hand = Hand(policy(), 100, 100)
    for name in "abcd":
        hand.come(name, 80)
    assert set(hand.where) == {"a", "b"}
    assert decoded(hand.feed(EngineLost(EngineId("e1")))) == []
    order = ["a"]
    for _ in range(3):
        order += decoded(hand.answers(order[-1]))
    assert sorted(order) == ["a", "b", "c", "d"]
    assert set(hand.where.values()) == {"e0"}


@pytest.mark.parametrize("policy", [Las, Continuum, InferCept])
def test_a_program_leaves_an_engine_that_is_in_quarantine(policy: type[Frame]) -> None:
    hand = Hand(policy(), 100, 100)
    hand.come("a", 50)
    hand.acts("a", 60)
    hand.feed(PublicationBegun(Version(0, 1)))
    hand.feed(UpdateFailed(EngineId("e0"), Version(0, 1), "checksum"))
    assert decoded(hand.returns("a", 60)) == ["a"]
    assert hand.where["a"] == "e1"
    assert hand.policy.snapshot().engines[EngineId("e0")] == (0, 0)


# ---- Continuum ----


def test_a_tool_with_few_calls_is_given_two_seconds() -> None:
    hand = Hand(Continuum(), 1000)
    hand.come("a", 100)
    assert hand.acts("a", 200) == []
    assert is_pinned_until(hand, "a", 2.0)


def test_a_program_that_returns_in_time_keeps_its_kv_and_goes_first() -> None:
    hand = Hand(Continuum(), 1000, concurrency=1)
    hand.come("old", 100)
    hand.come("young", 100)
    hand.acts("old", 100)
    hand.acts("young", 100, at_s=3)
    hand.come("runs", 500)
    hand.returns("old", 100)
    hand.returns("young", 100)
    assert (phase(hand, "old"), phase(hand, "young")) == (Phase.WAITING, Phase.READY)
    hand.wakes(100)
    assert decoded(hand.answers("runs")) == ["young"]


def test_what_is_not_pinned_goes_when_its_room_is_needed_least_recently_used_first() -> None:
    hand = Hand(Continuum(ttl_s=10), 1000)
    for name in "abc":
        hand.come(name, 200)
    for at_s, name in enumerate("bac"):
        hand.acts(name, 200, at_s=at_s)
    hand.wakes(11.5)
    hand.come("d", 400)
    assert evicted(hand) == []
    hand.come("e", 150)
    assert evicted(hand) == ["b"]
    hand.come("f", 150)
    assert evicted(hand) == ["b", "a"]
    assert phase(hand, "c") is Phase.ACTING


def test_what_is_not_pinned_comes_back_without_being_given_up() -> None:
    hand = Hand(Continuum(ttl_s=1), 1000)
    hand.come("a", 200)
    hand.acts("a", 200)
    assert decoded(hand.returns("a", 200, at_s=50)) == ["a"]
    hand.come("b", 800)
    assert evicted(hand) == []


def test_without_pins_programs_go_by_submission() -> None:
    hand = Hand(Continuum(ttl_s=0.0), 1000, concurrency=1)
    for name in "abc":
        hand.come(name, 100)
    hand.acts("a", 100)
    hand.returns("a", 100)
    assert decoded(hand.answers("b")) == ["a"]
    assert decoded(hand.answers("a")) == ["c"]


def test_the_deadlock_guard_gives_up_the_pin_that_ends_last() -> None:
    hand = Hand(Continuum(ttl_s=50), 300)
    for name, at_s in (("a", 0), ("b", 1), ("c", 2)):
        hand.come(name, 100, at_s=at_s)
    for name, at_s in (("a", 3), ("c", 4), ("b", 5)):
        hand.acts(name, 100, at_s=at_s)
    assert decoded(hand.come("d", 90)) == ["d"]
    assert evicted(hand) == ["b"]


def test_the_guard_waits_while_something_runs() -> None:
    hand = Hand(Continuum(ttl_s=50), 300)
    hand.come("runs", 100)
    hand.come("a", 150)
    hand.acts("a", 150)
    assert decoded(hand.come("b", 200)) == []
    assert decoded(hand.answers("runs")) == ["b"]
    assert evicted(hand) == ["a"]


def test_the_time_to_live_gains_most_from_a_return_in_time() -> None:
    quick_or_slow = [1.0] * 90 + [100.0] * 10
    assert best_ttl_s(quick_or_slow, saved_s=10) == 1.0
    assert best_ttl_s(quick_or_slow, saved_s=1) == 0.0
    assert best_ttl_s(quick_or_slow, saved_s=2000) == 100.0


def test_a_known_tool_is_pinned_as_long_as_its_calls_take() -> None:
    hand = Hand(Continuum(), 10_000)
    hand.come("a", 5000)
    for call in range(100):
        hand.acts("a", 5000, tool="read", cost=cost(100), at_s=20.0 * call)
        hand.returns("a", 5000, at_s=20.0 * call + 1.0)
    hand.acts("a", 5000, tool="read", cost=cost(100), at_s=3000)
    assert is_pinned_until(hand, "a", 3001)


def test_turns_left_are_predictable_when_all_programs_take_as_many_and_not_when_chance_ends_them() -> None:
    alike, chance = Predictability(), Predictability()
    for _ in range(5):
        alike.add(10)
    for turns in range(1, 12):
        for _ in range(2 ** (11 - turns)):
            chance.add(turns)
    assert alike.eta == pytest.approx(1.0)
    assert chance.eta < 0.1


def test_a_time_to_live_by_name_has_to_be_a_number_of_seconds() -> None:
    hand = Hand(make_policy("ttl:10"), 1000)
    hand.come("a", 100)
    hand.acts("a", 200)
    assert is_pinned_until(hand, "a", 10.0)
    for name in ("ttl:", "ttl:long", "ttl:-1", "ttl:inf", "ttl:nan"):
        with pytest.raises(ConfigError, match="seconds from 0 on"):
            make_policy(name)


# ---- InferCept ----


def test_kv_is_preserved_until_that_has_wasted_as_much_as_discarding() -> None:
    hand = Hand(InferCept(), 100_000)
    hand.come("a", 10_000)
    assert hand.acts("a", 10_000) == []
    assert is_pinned_until(hand, "a", 5.0)


def test_discarding_wastes_more_the_more_others_run() -> None:
    hand = Hand(InferCept(), 100_000)
    hand.come("a", 10_000)
    hand.come("other", 30_000)
    hand.acts("a", 10_000)
    assert is_pinned_until(hand, "a", 20.0)


def test_a_tool_that_is_known_to_be_slow_is_discarded_at_once() -> None:
    hand = Hand(InferCept(), 100_000)
    hand.come("a", 10_000)
    hand.acts("a", 10_000, tool="build")
    hand.returns("a", 10_000, at_s=300)
    hand.acts("a", 10_000, tool="build")
    assert phase(hand, "a") is Phase.PARKED


def test_kv_is_swapped_when_the_link_brings_it_out_and_back_in_time() -> None:
    hand = Hand(InferCept(), 100_000, host=(100_000, 10_000.0))
    hand.come("a", 10_000)
    assert hand.acts("a", 10_000) == [Offload(ProgramId("a"), EngineId("e0"))]
    assert decoded(hand.returns("a", 10_000, at_s=3)) == ["a"]


def test_kv_is_not_swapped_over_a_slow_link_or_into_a_full_tier() -> None:
    for host in ((100_000, 1000.0), (9_999, 10_000.0)):
        hand = Hand(InferCept(), 100_000, host=host)
        hand.come("a", 10_000)
        assert hand.acts("a", 10_000) == []


def test_the_link_is_busy_with_what_was_swapped_before() -> None:
    hand = Hand(InferCept(), 100_000, host=(100_000, 10_000.0))
    for name in "abc":
        hand.come(name, 10_000)
    told = [action for name in "cba" for action in hand.acts(name, 10_000)]
    assert told == [Offload(ProgramId(name), EngineId("e0")) for name in "cb"]
    assert phase(hand, "a") is Phase.ACTING


# ---- Autellix ----


def test_the_program_that_was_served_least_goes_first() -> None:
    hand = Hand(Las(), 100_000, concurrency=1)
    hand.come("served", 3000)
    hand.come("runs", 10)
    hand.acts("served", 3010, cost=cost(3000))
    hand.returns("served", 3010)
    hand.come("new", 10)
    assert decoded(hand.answers("runs")) == ["new"]
    assert decoded(hand.answers("new")) == ["served"]


def test_within_a_level_the_first_to_come_goes_first() -> None:
    hand = Hand(Las(), 100_000, concurrency=1)
    hand.come("a", 1000)
    hand.come("b", 10)
    hand.acts("a", 1010, cost=cost(1000))
    hand.returns("a", 1010)
    hand.come("c", 10)
    assert decoded(hand.answers("b")) == ["a"]


def test_a_starved_program_goes_before_new_ones() -> None:
    hand = Hand(Las(), 100_000, concurrency=1)
    hand.come("served", 3000)
    hand.come("runs", 10)
    hand.acts("served", 3010, cost=cost(3000), at_s=3.1)
    hand.returns("served", 3010)
    hand.wakes(3.1 + 2 * 3.1)
    hand.come("new", 10)
    assert decoded(hand.answers("runs")) == ["served"]


def test_kv_between_turns_is_left_to_the_engine() -> None:
    hand = Hand(Las(), 100)
    hand.come("a", 90)
    assert hand.acts("a", 95) == []
    assert decoded(hand.come("b", 90)) == ["b"]
    assert evicted(hand) == []


# ---- CONCUR ----


def load(hand: Hand, used_share: float | None, hit_rate: float | None) -> list[str]:
    return decoded(hand.feed(EngineLoaded(EngineId("e0"), 0, used_share, hit_rate)))


def test_the_window_grows_by_two_while_the_pool_is_empty() -> None:
    hand = Hand(Aimd(), 1000)
    for index in range(8):
        hand.come(f"p{index}", 10)
    assert len(hand.where) == 2
    assert load(hand, 0.1, 0.9) == ["p2", "p3"]
    assert load(hand, 0.3, 0.9) == []
    assert load(hand, 0.6, 0.9) == []
    assert load(hand, None, None) == []


def test_the_window_is_halved_when_the_pool_is_used_and_misses() -> None:
    hand = Hand(Aimd(), 1000)
    for index in range(8):
        hand.come(f"p{index}", 10)
    load(hand, 0.1, 0.9)
    assert load(hand, 0.6, 0.1) == []
    hand.answers("p0")
    hand.answers("p1")
    assert len(hand.where) == 4
    assert decoded(hand.answers("p2")) == ["p4"]


def test_those_inside_a_closing_window_go_on() -> None:
    hand = Hand(Aimd(), 1000)
    hand.come("a", 10)
    hand.come("b", 10)
    load(hand, 0.9, 0.0)
    load(hand, 0.9, 0.0)
    hand.acts("a", 20)
    assert decoded(hand.returns("a", 20)) == ["a"]
