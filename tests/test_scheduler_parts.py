"""What the scheduler learns of tools and engines, and whose KV it would give up."""

from collections.abc import Iterator
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sostenuto.scheduler.acting import Acting, ActingByTool, ActingForeseen
from sostenuto.scheduler.events import Submitted
from sostenuto.scheduler.kv import Footprint, KvLedger
from sostenuto.scheduler.order import FIRST
from sostenuto.scheduler.program import Program
from sostenuto.scheduler.rates import EngineRates
from sostenuto.scheduler.seat import Seat, cheapest, first_enough, pruned
from sostenuto.scheduler.tool_times import EDGES_S, OCTAVES, ToolTimes, octave_of
from sostenuto.types import EngineId, ProgramId


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


def test_of_many_candidates_only_the_first_few_are_looked_at_unless_more_are_needed():
    candidates = [(1.0, holding(f"p{n}", 10)) for n in range(1000)]
    assert len(first_enough(iter(candidates), 1)) == 64
    assert len(first_enough(iter(candidates), 5000)) == 500
    assert first_enough(iter(candidates), 10_001) == candidates


class Counted(ActingByTool):
    """Knows how many were looked at."""

    looked_at = 0

    def by_rate(self, now_s: float) -> Iterator[tuple[float, Program]]:
        for candidate in super().by_rate(now_s):
            self.looked_at += 1
            yield candidate


def seat_with(acting: int, *, tokens: int = 10) -> tuple[Seat, Counted]:
    who = Counted(ToolTimes())
    pool = KvLedger(acting * tokens)
    seat = Seat(EngineId("e"), pool, 8, rates=EngineRates(8000.0, 8), acting=who)
    for number in range(acting):
        one = holding(f"p{number}", 0)
        one.footprint = Footprint(tokens)
        seat.hold(one, 0.0)
    return seat, who


def test_what_room_costs_on_a_crowded_engine_is_known_after_a_look_at_a_few():
    seat, who = seat_with(20_000)
    wanting = holding("wanting", 0)
    wanting.lacks_engine(Footprint(20), 10)
    victims = seat.clear(wanting, 30, 1.0, FIRST)
    assert sum(tokens for _, tokens in victims or []) == 30
    assert who.looked_at <= 64
    assert seat.cover(30, 1e6)
    assert who.looked_at <= 128


def test_where_nothing_pays_it_is_not_asked_of_everybody():
    seat, who = seat_with(20_000)
    for _, one in seat.acting.by_rate(0.0):
        one.fatigue = 1e9
    who.looked_at = 0
    assert seat.cover(30, 1e6) is None
    assert who.looked_at <= 1024


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
