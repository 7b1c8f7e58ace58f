"""What the scheduler keeps account of: order, waits, environments, sandboxes, budgets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sostenuto.scheduler.events import SandboxClaim, Submitted, ToolServerJoined
from sostenuto.scheduler.order import FIRST, KeyQueue, Order
from sostenuto.scheduler.patience import Patience
from sostenuto.scheduler.prefetch import Prefetch
from sostenuto.scheduler.program import Program
from sostenuto.scheduler.sandboxes import SandboxLedger
from sostenuto.scheduler.window import Window, WindowState
from sostenuto.types import GroupId, ProgramId, SandboxRung, Version


def program(name: str = "p", rank: int = 1, **known: object) -> Program:
    submitted = Submitted(ProgramId(name), 1e9, **known)  # pyright: ignore[reportArgumentType]
    return Program.submitted(submitted, rank, 0.0)


def holding(name: str, tokens: int, tool: str = "bash", since_s: float = 0.0) -> Program:
    one = program(name)
    one.held_tokens, one.tool, one.acting_since_s = tokens, tool, since_s
    return one


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
    made.hold(ProgramId("p"), CLAIM)
    for _ in range(50):
        made.move(ProgramId("p"), SandboxRung.SNAPSHOTTED)
        made.moved(ProgramId("p"), SandboxRung.SNAPSHOTTED, 40.0)
    assert made.return_s(SandboxRung.SNAPSHOTTED) == pytest.approx(41.0, rel=0.01)


def test_memory_that_could_not_be_moved_out_still_counts():
    made, program = SandboxLedger(), ProgramId("p")
    made.join(ToolServerJoined(memory_bytes=CLAIM.memory_bytes))
    made.hold(program, CLAIM)
    made.move(program, SandboxRung.RECLAIMED)
    assert made.fits(CLAIM)
    made.moved(program, SandboxRung.PAUSED, 0.1)
    assert not made.fits(CLAIM)
    assert not made.reclaims


def test_late_news_of_a_step_down_does_not_take_back_a_step_up():
    made, program = SandboxLedger(), ProgramId("p")
    made.hold(program, CLAIM)
    made.moved(program, SandboxRung.SNAPSHOTTED, 1.0)
    assert made.rung(program) is SandboxRung.RUNNING


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
