"""What once went wrong in the scheduler, each case as small as it can be shown."""

import pytest

from baseline_world import Hand, decoded
from sostenuto.errors import InvalidTransition
from sostenuto.scheduler.actions import Action, Evict, Prepare, Refuse
from sostenuto.scheduler.events import (
    EngineJoined,
    EngineLost,
    Finished,
    Prepared,
    PublicationBegun,
    Submitted,
    TurnEnded,
    UpdateCommitted,
    UpdateFailed,
    UpdateStaged,
)
from sostenuto.scheduler.kv import Footprint, Segment
from sostenuto.scheduler.lifecycle import Phase
from sostenuto.scheduler.order import Order
from sostenuto.scheduler.patience import Patience
from sostenuto.scheduler.program import Program, Reason
from sostenuto.scheduler.rates import EngineRates
from sostenuto.scheduler.scheduler import Scheduler
from sostenuto.scheduler.seat import cheapest
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.types import EngineId, GroupId, ProgramId, Version

E0, E1 = EngineId("e0"), EngineId("e1")
V0, V1, V2 = Version(0, 0), Version(0, 1), Version(0, 2)


def ours(*pools: int, slots: int = 256, block: int = 1, patience_s: float = 300.0) -> Hand:
    hand = Hand(Scheduler(SchedulerSettings(patience_s=patience_s, prepare_ahead=256)))
    for number, pool in enumerate(pools):
        engine = EngineId(f"e{number}")
        hand.feed(EngineJoined(engine, V0, pool, slots, block, prefill_tokens_s=1000.0))
    return hand


def crowd(hand: Hand, sizes: dict[str, int]) -> None:
    """Programs that act and hold so many tokens."""
    for name, tokens in sizes.items():
        hand.come(name, tokens)
        hand.acts(name, tokens)


def phase(hand: Hand, name: str) -> Phase:
    return hand.policy.snapshot().phases[ProgramId(name)]


def patience(hand: Hand) -> Patience:
    assert isinstance(hand.policy, Scheduler)
    return hand.policy.patience


def evicted(actions: list[Action]) -> list[str]:
    return [action.program_id for action in actions if isinstance(action, Evict)]


def home_of(hand: Hand, name: str) -> EngineId:
    return EngineId(hand.where[name])


def update(hand: Hand, engine: EngineId, version: Version, *, dropped_kv: bool) -> list[Action]:
    hand.feed(UpdateStaged(engine, version))
    return hand.feed(UpdateCommitted(engine, version, dropped_kv))


def quarantine(hand: Hand, engine: EngineId) -> None:
    hand.feed(PublicationBegun(V1))
    hand.feed(UpdateFailed(engine, V1, "torn"))


# ---- room ----


def test_what_is_left_of_a_last_block_is_freed_with_it():
    hand = ours(64, block=16)
    crowd(hand, {"a": 33, "b": 1})
    assert decoded(hand.come("whole", 64, at_s=600)) == ["whole"]


def test_two_ready_programs_that_both_lack_a_block_do_not_block_each_other():
    hand = ours(80, block=16)
    crowd(hand, {"a": 33, "b": 1})
    hand.come("busy", 1)
    hand.returns("a", 80)
    hand.returns("b", 37)
    assert phase(hand, "a") is phase(hand, "b") is Phase.READY
    assert decoded(hand.answers("busy")) == ["a"]


def test_a_prefix_that_acting_programs_share_is_freed_with_the_last_of_them():
    hand = ours(100)
    prefix = (Segment("group", 60),)
    for name in "abcd":
        hand.come(name, 70, shared=prefix)
    for name in "abcd":
        hand.feed(TurnEnded(ProgramId(name), 1, Footprint(10, prefix), ("bash",)))
    assert decoded(hand.come("next", 80, at_s=600)) == ["next"]


def test_any_number_of_small_programs_together_make_room_beside_one_that_decodes():
    hand = ours(10_000)
    crowd(hand, {f"p{number}": 100 for number in range(100)})
    hand.answers("p0", at_s=600)
    hand.come("busy", 10)
    assert decoded(hand.come("large", 9000)) == ["large"]


def test_two_that_cost_little_are_given_up_before_a_large_one_between_them():
    candidates: list[tuple[float, Program]] = []
    for name, rate, tokens in (("a", 0.1, 9), ("large", 0.2, 1000), ("c", 1.0, 1)):
        one = Program.submitted(Submitted(ProgramId(name), 1e9), 1, 0.0)
        one.held_tokens = tokens
        candidates.append((rate, one))
    assert {one.id for _, one in cheapest(candidates, 10) or []} == {"a", "c"}


def test_who_gave_up_its_kv_before_is_asked_after_its_equals():
    hand = ours(100)
    crowd(hand, {"a": 40})
    hand.come("x", 80, at_s=600)
    hand.returns("a", 40)
    hand.answers("x")
    hand.come("b", 40)
    hand.acts("a", 40)
    hand.acts("b", 40)
    assert evicted(hand.told) == ["a"]
    assert evicted(hand.come("y", 50, at_s=1200)) == ["b"]


def test_an_engine_on_which_nothing_decodes_any_more_is_cleared_in_the_same_event():
    hand = ours(100)
    crowd(hand, {"a": 20})
    hand.come("b", 50)
    assert decoded(hand.come("next", 90)) == []
    hand.now_s += 0.1
    assert decoded(hand.acts("b", 50, tool="build")) == ["next"]


def test_one_odd_measurement_moves_the_prefill_rate_by_little():
    rates = EngineRates(1000.0, 8)
    rates.prefilled(1000, 1e-4)
    assert 500 < rates.prefill_tokens_s < 2000


# ---- engines that are kept clear, closed, or lost ----


def test_a_waiting_program_that_only_the_lost_engine_could_hold_is_refused():
    hand = ours(100, 1000)
    hand.come("busy", 900)
    hand.come("x", 500)
    hand.feed(EngineLost(E1))
    hand.wakes(1)
    assert Refuse(ProgramId("x"), 500, 100) in hand.told


def with_one_engine_kept_clear() -> tuple[Hand, EngineId, EngineId]:
    """For `big`, which does not fit beside `a`; and the engine of `a`, and that of `b`."""
    hand = ours(100, 100, patience_s=100)
    for name, tokens in (("a", 60), ("b", 60), ("big", 80)):
        hand.come(name, tokens)
    hand.wakes(101)
    assert decoded(hand.come("passes", 5)) == ["passes"]
    kept_clear = home_of(hand, "a")
    assert home_of(hand, "passes") != kept_clear
    hand.answers("passes")
    return hand, kept_clear, home_of(hand, "b")


def test_another_engine_is_kept_clear_when_the_first_dies():
    hand, kept_clear, other = with_one_engine_kept_clear()
    hand.feed(EngineLost(kept_clear))
    hand.feed(Finished(ProgramId("a")))
    assert decoded(hand.come("small", 5)) == []
    assert decoded(hand.answers("b"))[:1] == ["big"]
    assert home_of(hand, "big") == other


def test_another_engine_is_kept_clear_when_the_first_is_quarantined():
    hand, kept_clear, other = with_one_engine_kept_clear()
    quarantine(hand, kept_clear)
    update(hand, other, V1, dropped_kv=False)
    assert decoded(hand.come("small", 5)) == []
    assert decoded(hand.answers("b"))[:1] == ["big"]
    assert home_of(hand, "big") == other


def test_a_program_whose_engine_is_quarantined_goes_on_elsewhere():
    hand = ours(100, 100)
    crowd(hand, {"a": 20})
    home = home_of(hand, "a")
    other = E1 if home == E0 else E0
    quarantine(hand, home)
    update(hand, other, V1, dropped_kv=True)
    assert decoded(hand.returns("a", 30)) == ["a"]
    assert home_of(hand, "a") == other


def test_a_program_whose_only_engine_is_quarantined_waits_for_a_version():
    hand = ours(100)
    crowd(hand, {"a": 10})
    quarantine(hand, E0)
    hand.returns("a", 10)
    assert hand.policy.snapshot().waits_for == {"a": Reason.VERSION}


def test_an_engine_that_is_verified_again_is_used_at_once():
    hand = ours(100)
    quarantine(hand, E0)
    hand.come("a", 10)
    hand.feed(PublicationBegun(V2))
    hand.now_s += 0.1
    assert decoded(update(hand, E0, V2, dropped_kv=True)) == ["a"]


def test_a_program_that_outgrew_its_engine_while_all_slots_were_taken_is_refused():
    hand = ours(100, slots=1, patience_s=100)
    crowd(hand, {"grows": 60})
    hand.come("busy", 10)
    hand.returns("grows", 105)
    hand.wakes(200)
    hand.answers("busy")
    assert Refuse(ProgramId("grows"), 105, 100) in hand.told
    assert decoded(hand.come("next", 100)) == ["next"]


# ---- publications ----


def test_a_late_report_of_an_update_takes_nobody_its_kv():
    hand = ours(100)
    crowd(hand, {"a": 20})
    hand.feed(UpdateCommitted(E0, V0, dropped_kv=True))
    assert phase(hand, "a") is Phase.ACTING


def test_a_record_that_becomes_urgent_with_a_new_version_goes_first_from_then_on():
    hand = ours(100)
    hand.come("busy", 90)
    hand.come("older", 80)
    hand.feed(Submitted(ProgramId("urgent"), 1e9, trainable_until=V1))
    hand.feed(Prepared(ProgramId("urgent"), Footprint(80), 0))
    hand.feed(PublicationBegun(V1))
    update(hand, E0, V1, dropped_kv=False)
    assert decoded(hand.answers("busy")) == ["urgent"]


# ---- order and waits ----


def test_a_turn_that_is_lost_with_its_engine_waits_from_then_on():
    hand = ours(100)
    hand.come("a", 20)
    hand.feed(EngineLost(E0), at_s=500)
    assert decoded(hand.feed(EngineJoined(E0, V0, 100, 1))) == ["a"]
    assert patience(hand).longest_wait_s == 0


def test_a_ready_program_that_loses_its_kv_keeps_its_place_among_those_who_wait():
    hand = ours(100)
    crowd(hand, {"a": 20})
    hand.come("busy", 80)
    hand.returns("a", 60)
    assert phase(hand, "a") is Phase.READY
    hand.come("later", 90, at_s=5)
    hand.feed(EngineLost(E0))
    assert [one.id for one in patience(hand).due(1e9, 8)] == ["a", "later", "busy"]


def test_a_program_that_is_prepared_twice_takes_up_one_preparation():
    hand = Hand(Scheduler(SchedulerSettings(prepare_ahead=2)), 1000)
    hand.come("a", 10)
    for _ in range(3):
        with pytest.raises(InvalidTransition):
            hand.feed(Prepared(ProgramId("a"), Footprint(10), 5))
    assert Prepare(ProgramId("b")) in hand.feed(Submitted(ProgramId("b"), 1e9))


def test_a_group_that_never_was_complete_is_forgotten_with_its_programs():
    order = Order()
    first, again = (
        Program.submitted(Submitted(ProgramId(f"p{rank}"), 1e9, GroupId("g"), 8), rank, 0.0)
        for rank in (1, 2)
    )
    order.submitted(first)
    order.finished(first)
    order.submitted(again)
    _, _, group_place, place = order.key(again, None)
    assert group_place == place == again.rank


def test_an_engine_that_joins_takes_in_all_that_wait_and_fit_at_once():
    hand = ours(100)
    hand.come("holds", 100)
    for number in range(12):
        hand.come(f"p{number}", 50)
    assert len(decoded(hand.feed(EngineJoined(E1, V0, 600, 256, prefill_tokens_s=1000.0)))) == 12


def test_who_can_only_go_to_a_busy_engine_does_not_stand_in_the_way_of_others():
    hand = ours(1000, 100)
    hand.come("busy", 1000)
    for number in range(3):
        hand.come(f"large{number}", 900)
    hand.come("small", 50)
    hand.wakes(1)
    assert phase(hand, "small") is Phase.REASONING
    assert phase(hand, "large0") is Phase.WAITING
