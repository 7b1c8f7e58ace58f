"""ThunderAgent does what it is published to do, faults included."""

from baseline_world import Hand, decoded
from sostenuto.scheduler.actions import Evict, Refuse
from sostenuto.scheduler.baselines.thunderagent import ThunderAgent
from sostenuto.scheduler.baselines.thunderagent_paper import ThunderAgentPaper
from sostenuto.scheduler.events import EngineLost
from sostenuto.scheduler.kv import Segment
from sostenuto.scheduler.lifecycle import Phase
from sostenuto.scheduler.program import Reason
from sostenuto.types import EngineId, ProgramId


def phases(hand: Hand) -> dict[str, Phase]:
    return {str(id_): phase for id_, phase in hand.policy.snapshot().phases.items()}


def paused(hand: Hand) -> set[str]:
    return {name for name, phase in phases(hand).items() if phase in {Phase.PARKED, Phase.WAITING}}


def crowd(hand: Hand, sizes: dict[str, int], at_s: float = 0.0) -> None:
    """Programs that started small, have grown to these sizes and act."""
    for name in sizes:
        hand.come(name, 10)
    for name, tokens in sizes.items():
        hand.acts(name, tokens, at_s=at_s)


def test_a_program_starts_at_once_on_the_node_with_the_fewest_tokens() -> None:
    hand = Hand(ThunderAgent(), 1000, 1000)
    assert decoded(hand.come("a", 300)) == ["a"]
    assert decoded(hand.come("b", 300)) == ["b"]
    assert hand.where == {"a": "e0", "b": "e1"}


def test_one_token_too_many_marks_every_program_that_decodes() -> None:
    hand = Hand(ThunderAgent(), 11_000)
    names = [f"p{index}" for index in range(10)]
    for name in names:
        hand.come(name, 1000 if name != "p9" else 900)
    hand.acts("p9", 1001)
    hand.returns("p9", 1001)
    hand.wakes(5)
    assert paused(hand) == set()
    for name in names:
        hand.acts(name, 1001)
    assert paused(hand) == set(names)


def test_nobody_is_marked_when_the_pool_is_exactly_full() -> None:
    hand = Hand(ThunderAgent(), 11_000)
    names = [f"p{index}" for index in range(10)]
    for name in names:
        hand.come(name, 1000)
    hand.wakes(5)
    for name in names:
        hand.acts(name, 1000)
    assert paused(hand) == set()


def crowded_by_an_idle_program(policy: ThunderAgent) -> Hand:
    """One program has acted for 300 s, one has just begun, and a third waits."""
    hand = Hand(policy, 101_000)
    hand.come("idle", 70_000)
    hand.acts("idle", 70_000)
    hand.come("fresh", 30_000)
    hand.come("next", 30_000, at_s=298)
    hand.acts("fresh", 30_000, at_s=299.9)
    assert "next" not in hand.where
    hand.wakes(300)
    return hand


def test_decay_lets_a_program_in_and_then_the_fresh_small_one_pays_for_it() -> None:
    hand = crowded_by_an_idle_program(ThunderAgent(decay=True))
    assert hand.where["next"] == "e0"
    assert phases(hand)["fresh"] is Phase.PARKED
    assert phases(hand)["idle"] is Phase.ACTING


def test_without_decay_the_same_program_waits() -> None:
    hand = crowded_by_an_idle_program(ThunderAgent())
    assert "next" not in hand.where
    assert hand.policy.snapshot().waits_for[ProgramId("next")] is Reason.KV


def test_shortest_first_pauses_more_than_is_needed() -> None:
    for policy, pool in ((ThunderAgent(), 69_300), (ThunderAgentPaper(), 69_000)):
        hand = Hand(policy, pool)
        crowd(hand, {"sixty": 60_000, "ten": 10_000, "nine": 9000}, at_s=4.999)
        hand.wakes(5)
        assert paused(hand) == {"nine", "ten"}


def test_the_paper_discounts_programs_that_act_when_it_looks_for_thrashing() -> None:
    for since_s, expected in ((0, set[str]()), (4.999, {"a"})):
        hand = Hand(ThunderAgentPaper(), 70_000)
        crowd(hand, {"a": 9000, "b": 10_000, "c": 60_000}, at_s=since_s)
        hand.wakes(5)
        assert paused(hand) == expected


def test_a_prefix_that_programs_share_is_counted_once_for_each() -> None:
    prefix = (Segment("system", 10_000),)
    for pool, fits in ((96_800, 8), (96_799, 7)):
        hand = Hand(ThunderAgent(), pool)
        for index in range(8):
            hand.come(f"p{index}", 12_000, shared=prefix)
        assert len(hand.where) == fits


def test_a_program_larger_than_every_node_waits_and_is_forced_in_after_half_an_hour() -> None:
    hand = Hand(ThunderAgent(), 1000)
    hand.come("large", 5000)
    assert decoded(hand.wakes(1799.9)) == []
    assert decoded(hand.wakes(1800)) == ["large"]


def test_a_program_that_was_resumed_in_time_is_not_forced_later() -> None:
    hand = Hand(ThunderAgent(), 1000)
    hand.come("a", 800)
    hand.come("b", 800)
    hand.answers("a", at_s=100)
    assert decoded(hand.wakes(105)) == ["b"]
    hand.acts("b", 850)
    assert decoded(hand.wakes(2000)) == []


def test_anybody_in_the_queue_makes_a_tiny_new_program_wait_for_a_tick() -> None:
    hand = Hand(ThunderAgent(), 10_000)
    hand.come("large", 9950)
    assert decoded(hand.come("tiny", 10)) == []
    assert decoded(hand.wakes(4.9)) == []
    assert decoded(hand.wakes(5)) == ["tiny"]


def test_room_that_becomes_free_is_used_at_the_next_tick_and_not_before() -> None:
    hand = Hand(ThunderAgent(), 1000)
    hand.come("a", 800)
    hand.come("b", 800)
    assert decoded(hand.answers("a", at_s=10.1)) == []
    assert decoded(hand.wakes(14.9)) == []
    assert decoded(hand.wakes(15)) == ["b"]


def test_pausing_sends_nothing_and_the_program_comes_back_on_any_node() -> None:
    hand = Hand(ThunderAgent(), 1000, 1000)
    hand.come("a", 500)
    hand.come("other", 850)
    hand.come("b", 300)
    assert hand.where == {"a": "e0", "other": "e1", "b": "e0"}
    hand.acts("b", 450)
    hand.wakes(5)
    assert paused(hand) == {"b"}
    hand.answers("other")
    hand.returns("b", 460)
    assert decoded(hand.wakes(10)) == ["b"]
    assert hand.where["b"] == "e1"
    assert not [action for action in hand.told if isinstance(action, Evict)]


def test_a_program_that_is_resumed_while_its_tool_runs_goes_on_when_it_returns() -> None:
    hand = Hand(ThunderAgent(), 1000)
    hand.come("a", 500)
    hand.come("b", 200)
    hand.acts("b", 450)
    hand.wakes(5)
    assert phases(hand)["b"] is Phase.PARKED
    hand.answers("a")
    hand.wakes(10)
    assert phases(hand)["b"] is Phase.PARKED
    assert decoded(hand.returns("b", 460, at_s=11)) == ["b"]


def test_those_with_a_request_come_back_before_new_ones_and_small_ones_before_large() -> None:
    hand = Hand(ThunderAgent(), 4000)
    hand.come("hog", 1000)
    crowd(hand, {"veteran": 1900, "acting": 1200})
    hand.wakes(5)
    assert paused(hand) == {"acting"}
    hand.returns("acting", 1250)
    hand.come("large", 1900)
    hand.come("small", 100)
    assert decoded(hand.answers("veteran")) == []
    assert decoded(hand.wakes(10)) == ["acting", "small"]
    assert hand.policy.snapshot().waiting == 1


def test_programs_of_a_lost_node_are_resumed_on_another_at_a_tick() -> None:
    for policy in (ThunderAgent(), ThunderAgentPaper()):
        hand = Hand(policy, 1000, 1000)
        hand.come("a", 300)
        hand.come("b", 300)
        assert decoded(hand.feed(EngineLost(EngineId("e0")))) == []
        assert decoded(hand.wakes(5)) == ["a"]
        assert hand.where == {"a": "e1", "b": "e1"}


def test_a_paused_program_that_is_over_leaves_the_queue() -> None:
    for policy in (ThunderAgent(), ThunderAgentPaper()):
        hand = Hand(policy, 1000)
        hand.come("a", 900)
        hand.come("b", 900)
        hand.answers("b")
        hand.answers("a")
        assert decoded(hand.come("c", 500)) == ["c"]


def test_the_paper_marks_no_more_than_it_needs() -> None:
    hand = Hand(ThunderAgentPaper(), 10_000)
    names = [f"p{index}" for index in range(10)]
    for name in names:
        hand.come(name, 1000)
    hand.acts("p9", 1001)
    hand.returns("p9", 1001)
    hand.wakes(5)
    for name in names:
        hand.acts(name, 1001)
    assert len(paused(hand)) == 1


def test_the_paper_refuses_what_no_node_can_hold() -> None:
    hand = Hand(ThunderAgentPaper(), 1000)
    hand.come("large", 5000)
    assert hand.wakes(20) == [Refuse(ProgramId("large"), 5000, 1000)]
    hand.come("a", 10)
    hand.acts("a", 900)
    assert hand.returns("a", 1500) == [Refuse(ProgramId("a"), 1500, 1000)]


def test_no_tick_is_asked_for_while_there_is_nothing_to_schedule() -> None:
    hand = Hand(ThunderAgent(), 1000)
    assert hand.policy.wake_at_s() is None
    hand.come("a", 10)
    hand.answers("a")
    assert hand.policy.wake_at_s() == 1e9
