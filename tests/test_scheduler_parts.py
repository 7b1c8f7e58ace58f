"""What the scheduler is made of, part by part."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sostenuto.scheduler.acting import Acting, ActingByTool, ActingForeseen
from sostenuto.scheduler.actions import SandboxClaim, SandboxRung, Submitted, ToolServerJoined
from sostenuto.scheduler.order import FIRST, KeyQueue, Order
from sostenuto.scheduler.patience import Patience
from sostenuto.scheduler.prefetch import Prefetch
from sostenuto.scheduler.program import Program
from sostenuto.scheduler.rates import EngineRates
from sostenuto.scheduler.sandboxes import SandboxLedger
from sostenuto.scheduler.seat import cheapest, pruned
from sostenuto.scheduler.tool_times import EDGES_S, OCTAVES, ToolTimes, octave_of
from sostenuto.scheduler.window import Window, WindowState
from sostenuto.types import GroupId, ProgramId, Version


def program(name: str = "p", rank: int = 1, **known: object) -> Program:
    submitted = Submitted(ProgramId(name), 1e9, **known)  # pyright: ignore[reportArgumentType]
    return Program.submitted(submitted, rank, 0.0)


def holding(name: str, tokens: int, tool: str = "bash", since_s: float = 0.0) -> Program:
    one = program(name)
    one.held_tokens, one.tool, one.acting_since_s = tokens, tool, since_s
    return one


# ---- tool times ----


@given(st.floats(0, 1e7))
def test_an_age_is_in_the_octave_between_whose_edges_it_lies(age_s: float):
    octave = octave_of(age_s)
    assert octave == sum(edge <= age_s for edge in EDGES_S)
    assert octave < OCTAVES


def test_before_anything_is_learned_the_older_call_returns_less_soon():
    rates = [ToolTimes().rate("bash", octave) for octave in range(OCTAVES)]
    assert rates == sorted(rates, reverse=True)
    assert all(rate > 0 for rate in rates)


def test_a_tool_that_never_takes_less_than_five_seconds_is_the_likelier_to_return_the_nearer_they_are():
    times = ToolTimes()
    for _ in range(200):
        times.learn("build", 5.5)
    before = [times.rate("build", octave_of(age_s)) for age_s in (0.0, 1.0, 3.0, 4.5)]
    assert before == sorted(before)
    assert before[0] > 0.1
    assert times.rate("build", octave_of(60.0)) < before[0]


def test_what_is_learned_of_one_tool_says_nothing_of_another():
    times = ToolTimes()
    unknown = times.rate("read", 3)
    for _ in range(50):
        times.learn("bash", 100.0)
    assert times.rate("read", 3) == unknown
    assert times.rate("bash", 3) < unknown


def test_a_tool_that_has_changed_is_learned_anew():
    times = ToolTimes()
    for _ in range(3000):
        times.learn("bash", 0.01)
    assert times.rate("bash", 0) > 50
    for _ in range(12_000):
        times.learn("bash", 300.0)
    assert times.rate("bash", 0) == pytest.approx(1 / 300, rel=0.2)


@given(st.lists(st.floats(0, 1e5), max_size=60))
def test_every_rate_is_positive_and_finite_whatever_was_seen(seen_s: list[float]):
    times = ToolTimes()
    for took_s in seen_s:
        times.learn("bash", took_s)
    assert all(0 < times.rate("bash", octave) < inf for octave in range(OCTAVES))


# ---- who acts ----


def names(acting: Acting, now_s: float) -> list[str]:
    return [one.id for _, one in acting.by_rate(now_s)]


def test_who_has_acted_longest_is_asked_first():
    acting = ActingByTool(ToolTimes())
    for name, since_s in (("old", 0.0), ("young", 99.0), ("middle", 70.0)):
        acting.add(holding(name, 10, since_s=since_s), since_s)
    assert names(acting, 100.0) == ["old", "middle", "young"]
    assert len(acting) == 3


def test_a_slow_tool_is_asked_before_a_fast_one_of_the_same_age():
    times = ToolTimes()
    for _ in range(50):
        times.learn("read", 0.05)
        times.learn("build", 300.0)
    acting = ActingByTool(times)
    for name in ("read", "build"):
        acting.add(holding(name, 10, name), 0.0)
    assert names(acting, 1.0) == ["build", "read"]


def test_who_has_left_is_not_asked():
    acting = ActingByTool(ToolTimes())
    one = holding("a", 10)
    acting.add(one, 0.0)
    acting.discard(one)
    acting.discard(one)
    assert (names(acting, 100.0), len(acting)) == ([], 0)


@given(st.lists(st.tuples(st.sampled_from(["bash", "read"]), st.floats(0, 5000)), max_size=40))
def test_the_order_is_by_rate_whatever_acts(seen: list[tuple[str, float]]):
    times, acting = ToolTimes(), ActingByTool(ToolTimes())
    for number, (tool, since_s) in enumerate(sorted(seen, key=lambda entry: entry[1])):
        acting.add(holding(f"p{number}", 1, tool, since_s), since_s)
    asked = list(acting.by_rate(6000.0))
    assert [rate for rate, _ in asked] == sorted(rate for rate, _ in asked)
    assert [rate for rate, _ in asked] == [
        times.rate(one.tool, octave_of(6000.0 - one.acting_since_s)) for _, one in asked
    ]
    assert len(asked) == len(seen)


class Known:
    def tool_s(self, program_id: ProgramId, turn: int) -> float:
        del turn
        return {"soon": 1.0, "late": 50.0}[program_id]


def test_with_foresight_the_last_to_return_is_asked_first():
    acting = ActingForeseen(Known())
    for name in ("soon", "late"):
        acting.add(holding(name, 10), 0.0)
    assert [(rate, one.id) for rate, one in acting.by_rate(0.5)] == [(1 / 49.5, "late"), (2.0, "soon")]
    acting.discard(holding("late", 10))
    assert len(acting) == 1


# ---- covers ----

CANDIDATES = st.lists(st.tuples(st.floats(0.001, 10.0), st.integers(1, 50)), min_size=1, max_size=8).map(
    lambda pairs: [(rate, holding(f"p{n}", tokens)) for n, (rate, tokens) in enumerate(sorted(pairs))]
)


@given(CANDIDATES, st.integers(1, 200))
def test_a_cover_is_enough_and_none_of_it_is_superfluous(
    candidates: list[tuple[float, Program]], needed: int
):
    cover = cheapest(candidates, needed)
    tokens = sum(one.held_tokens for _, one in candidates)
    assert (cover is None) == (tokens < needed)
    if cover is not None:
        freed = sum(one.held_tokens for _, one in cover)
        assert freed >= needed
        assert all(freed - one.held_tokens < needed for _, one in cover)


def test_one_that_is_enough_alone_is_taken_when_it_costs_less():
    candidates = [(1.0, holding(name, tokens)) for name, tokens in (("a", 9), ("b", 60), ("c", 10))]
    cover = cheapest(candidates, 10)
    assert [one.id for _, one in cover or []] == ["c"]


def test_pruning_keeps_the_cheap():
    picked = [(1.0, holding("cheap", 10)), (5.0, holding("dear", 10))]
    assert [one.id for _, one in pruned(picked, 10)] == ["cheap"]


# ---- rates ----


def test_a_stated_prefill_rate_is_kept_until_turns_say_otherwise():
    rates = EngineRates(8000.0, 16)
    assert rates.prefill_tokens_s == 8000.0
    for _ in range(100):
        rates.prefilled(1000, 1.0)
    assert rates.prefill_tokens_s == pytest.approx(1000.0, rel=0.05)


def test_short_prefills_and_impossible_times_teach_nothing():
    rates = EngineRates(8000.0, 16)
    rates.prefilled(10, 1.0)
    rates.prefilled(1000, 0.0)
    rates.decoded(1, 1.0, 1)
    rates.decoded(100, 0.0, 1)
    assert (rates.prefill_tokens_s, rates.decode_cap) == (8000.0, 16)


def seen_at(rates: EngineRates, sizes: dict[int, float]) -> None:
    """Turns at each batch size, with that many seconds between tokens."""
    for size, itl_s in sizes.items():
        for _ in range(20):
            rates.decoded(100, 100 * itl_s, size)


def test_there_is_no_cap_while_more_together_yield_more():
    rates = EngineRates(None, 64)
    seen_at(rates, {1: 0.010, 4: 0.010, 8: 0.011, 16: 0.012})
    assert rates.decode_cap == 64


def test_decoding_is_capped_near_the_size_beyond_which_nothing_is_gained():
    rates = EngineRates(None, 64)
    seen_at(rates, {1: 0.010, 8: 0.012, 16: 0.022, 32: 0.050})
    assert 16 <= rates.decode_cap <= 20


def test_the_cap_is_never_more_than_the_engine_takes():
    rates = EngineRates(None, 3)
    seen_at(rates, {1: 0.010, 2: 0.010, 3: 0.010})
    assert rates.decode_cap == 3


# ---- order ----


def test_programs_come_in_the_order_of_submission_and_groups_have_the_place_of_their_first():
    order = Order()
    members = [program(f"p{n}", n, group=GroupId(g), group_size=2) for n, g in enumerate("abba")]
    for one in members:
        order.submitted(one)
    assert [one.id for one in sorted(members, key=lambda one: order.key(one, None))] == [
        "p0",
        "p3",
        "p1",
        "p2",
    ]


def test_a_group_of_which_a_quarter_is_left_comes_before_the_others():
    order = Order()
    older = program("older", 0)
    group = [program(f"p{n}", n + 1, group=GroupId("g"), group_size=8) for n in range(8)]
    for one in (older, *group):
        order.submitted(one)
    changed = [order.finished(one) for one in group[:6]]
    assert changed[:5] == [[]] * 5
    assert changed[5] == group[6:]
    assert order.key(group[7], None) < order.key(older, None)


def test_a_record_that_is_about_to_be_stale_comes_first_and_one_that_is_comes_last():
    order = Order()
    ranked = [
        program(str(until), 0, trainable_until=until and Version(0, until)) for until in (None, 3, 2, 1)
    ]
    keys = {str(one.id): order.key(one, Version(0, 2)) for one in ranked}
    assert keys["2"] < keys["3"] == keys["None"] < keys["1"]
    assert all(key > FIRST for key in keys.values())


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.booleans()), max_size=60))
def test_a_queue_by_key_is_a_sorted_list(moves: list[tuple[int, int, bool]]):
    queue, model = KeyQueue(), dict[str, tuple[int, int, int, int]]()
    programs = {n: program(str(n)) for n in range(10)}
    for number, place, stays in moves:
        one = programs[number]
        if stays:
            queue.add((1, 1, place, number), one)
            model[one.id] = (1, 1, place, number)
        else:
            queue.discard(one.id)
            model.pop(one.id, None)
        ordered = sorted(model, key=lambda name: model[name])
        assert [p.id for p in queue.first_of(3)] == ordered[:3]
        assert [p.id for p in queue.last_first()] == ordered[::-1]
        assert len(queue) == len(model)


# ---- patience ----


def test_the_bound_grows_with_those_who_waited_before_and_keeps_their_number():
    patience = Patience()
    patience.turn_took(10.0)
    first, second, third = (program(name) for name in "abc")
    for one in (first, second, third):
        patience.began_to_wait(one)
    patience.stopped_waiting(first)
    assert patience.bound_s(second, 300.0, engines=1) == 320.0
    assert patience.bound_s(third, 300.0, engines=1) == 330.0
    assert patience.bound_s(third, 300.0, engines=2) == 320.0
    assert patience.due(until_s=0.0, most=8) == [second, third]


def test_who_waits_already_keeps_its_place():
    patience = Patience()
    first, second = program("a"), program("b")
    second.runnable_since_s = 5.0
    for one in (first, second, first):
        patience.began_to_wait(one)
    assert patience.due(until_s=5.0, most=8) == [first, second]
    assert patience.due(until_s=5.0, most=1) == [first]
    assert patience.due(until_s=4.0, most=8) == [first]


# ---- prefetch ----


def test_as_many_environments_are_ahead_as_are_admitted_while_one_is_made():
    prefetch = Prefetch()
    for number in range(1000):
        prefetch.admitted(float(number))
    for _ in range(100):
        prefetch.prepared(20.0, 1000)
    assert prefetch.ahead(0, 1000.0) == pytest.approx(1.5 * 20 + 1, abs=2)


def test_free_kv_is_filled_at_once_by_a_guess_until_a_prompt_was_seen():
    prefetch = Prefetch()
    assert prefetch.ahead(40_960, 0.0) == 11
    prefetch.prepared(20.0, 1000)
    assert prefetch.ahead(50_000, 0.0) == 51
    assert prefetch.ahead(0, 0.0) == 1


def test_an_hour_without_admissions_is_forgotten_and_one_may_still_be_made():
    prefetch = Prefetch()
    prefetch.prepared(20.0, 1000)
    for _ in range(100):
        prefetch.admitted(0.0)
    assert prefetch.ahead(0, 0.0) > 20
    assert 1 <= prefetch.ahead(0, 3600.0) <= 2


# ---- sandboxes ----

CLAIM = SandboxClaim(memory_bytes=100, disk_bytes=10, cpus=1.0)


def ledger(count: int, **limits: float) -> SandboxLedger:
    """With `count` sandboxes that run."""
    made = SandboxLedger()
    made.join(ToolServerJoined(**limits))  # pyright: ignore[reportArgumentType]
    for number in range(count):
        made.hold(ProgramId(f"p{number}"), CLAIM)
    return made


def test_without_limits_everything_fits():
    made = SandboxLedger()
    assert not made.is_limited
    assert made.fits(SandboxClaim(1 << 60, 1 << 60, 1e9))


@pytest.mark.parametrize(
    ("limits", "rung", "fits"),
    [
        ({"cpus": 1.0}, SandboxRung.PAUSED, True),
        ({"memory_bytes": 199}, SandboxRung.PAUSED, False),
        ({"memory_bytes": 199}, SandboxRung.RECLAIMED, True),
        ({"disk_bytes": 19}, SandboxRung.SNAPSHOTTED, False),
    ],
)
def test_each_rung_frees_what_its_row_says(limits: dict[str, float], rung: SandboxRung, fits: bool):
    made = ledger(1, **limits)
    assert not made.fits(CLAIM)
    made.move(ProgramId("p0"), rung)
    assert made.fits(CLAIM) == fits
    assert made.can_run(ProgramId("p0"))


def test_a_sandbox_comes_back_only_where_there_is_room_for_it():
    made = ledger(1, memory_bytes=150)
    made.move(ProgramId("p0"), SandboxRung.RECLAIMED)
    made.hold(ProgramId("p1"), CLAIM)
    assert not made.can_run(ProgramId("p0"))
    made.release(ProgramId("p1"))
    made.release(ProgramId("p1"))
    assert made.can_run(ProgramId("p0"))


def test_no_more_sandboxes_step_down_than_are_needed():
    made = ledger(3, memory_bytes=300)
    idle = [program(f"p{number}") for number in range(3)]
    assert made.step_down(CLAIM, idle) == idle[:1]
    assert made.step_down(SandboxClaim(memory_bytes=200), idle) == idle[:2]
    assert made.step_down(SandboxClaim(memory_bytes=301), idle) == []


RUNGS = st.sampled_from(SandboxRung)
SANDBOXES = st.lists(st.tuples(st.integers(0, 4), st.none() | RUNGS), max_size=40)


@given(SANDBOXES)
def test_when_all_sandboxes_are_gone_everything_is_back(moves: list[tuple[int, SandboxRung | None]]):
    made = ledger(0, memory_bytes=100, disk_bytes=10, cpus=1.0)
    for number, rung in moves:
        name = ProgramId(f"p{number}")
        if rung is None:
            made.release(name)
        elif name in made:
            made.move(name, rung)
        else:
            made.hold(name, CLAIM)
    for number in range(5):
        made.release(ProgramId(f"p{number}"))
    assert made.fits(CLAIM)
    assert not made.fits(SandboxClaim(memory_bytes=101))


def test_what_a_step_costs_is_learned():
    made = SandboxLedger()
    for _ in range(50):
        made.took(SandboxRung.SNAPSHOTTED, 40.0)
    assert made.return_s(SandboxRung.SNAPSHOTTED) == pytest.approx(41.0, rel=0.01)


# ---- the window of an engine that does not say how large it is ----


def test_stale_counters_of_preemptions_cut_once():
    window = Window()
    window.loaded(0, None, 10)
    before = window.tokens
    for preemptions in (5, 9, 12, 14, 15):
        window.loaded(preemptions, 0.1, 10)
    assert window.tokens == int(before * 0.7)
    assert window.state is WindowState.SETTLING


def test_after_those_who_ran_have_ended_it_grows_again():
    window = Window()
    window.loaded(0, None, 4)
    window.loaded(1, None, 4)
    for _ in range(4):
        assert window.state is WindowState.SETTLING
        window.turn_ended(window.tokens)
    window.loaded(1, 0.9, 4)
    cut = window.tokens
    window.turn_ended(window.tokens)
    assert window.tokens > cut


def test_it_does_not_grow_while_it_is_not_used():
    window = Window()
    before = window.tokens
    for _ in range(100):
        window.turn_ended(before // 2)
    assert window.tokens == before


def test_preemptions_from_before_it_was_watched_are_not_counted():
    window = Window()
    before = window.tokens
    window.loaded(1000, None, 4)
    assert window.tokens == before


def test_one_program_alone_is_never_kept_out():
    window = Window()
    window.ensure(1_000_000)
    assert window.tokens == 1_000_000


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 1), st.integers(0, 20)), max_size=50))
def test_the_window_is_never_empty(reports: list[tuple[int, float, int]]):
    window, preemptions = Window(), 0
    for more, hit_rate, running in reports:
        preemptions += more
        window.loaded(preemptions, hit_rate, running)
        window.turn_ended(0)
        assert window.tokens >= 1
