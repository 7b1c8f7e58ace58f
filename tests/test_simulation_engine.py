"""The simulated engine: what a request takes can be worked out by hand, and every request ends once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulated import Bench
from sostenuto.runtime.simulation.profile import OnRelease
from sostenuto.scheduler.kv import Segment
from sostenuto.types import ProgramId, Version


def test_the_last_step_of_prefill_gives_the_first_token():
    bench = Bench()
    bench.ask("a", 200, 11)
    served = bench.run()["a"]
    assert served.prefill_s == pytest.approx(0.2)
    assert served.decode_s == pytest.approx(0.1)
    assert (served.prefilled_tokens, served.generated_tokens) == (200, 11)


def test_decoding_gets_one_token_for_each_chunk_that_another_prefills():
    bench = Bench()
    bench.ask("a", 100, 101)
    bench.ask_at(0.1, "b", 650, 1)
    bench.run()
    steps = 7
    prefill_s = 0.65 + steps * 0.01
    assert bench.ended_s["b"] == pytest.approx(0.1 + prefill_s)
    assert bench.ended_s["a"] == pytest.approx(0.1 + prefill_s + (100 - steps) * 0.01)


def test_what_overlaps_takes_as_long_as_the_longer_part():
    bench = Bench(overlap=1.0)
    bench.ask("a", 100, 101)
    bench.ask_at(0.1, "b", 500, 1)
    bench.run()
    assert bench.ended_s["b"] == pytest.approx(0.6)
    assert bench.ended_s["a"] == pytest.approx(0.6 + 95 * 0.01)


def test_the_time_between_tokens_follows_the_batch():
    bench = Bench(itl_s=((1, 0.01), (2, 0.03)), prefill_tokens_s=1e9)
    bench.ask("a", 10, 21)
    bench.ask("b", 10, 11)
    bench.run()
    assert bench.ended_s["b"] == pytest.approx(10 * 0.03 + 0.01, abs=1e-6)
    assert bench.ended_s["a"] == pytest.approx(0.01 + 10 * 0.03 + 9 * 0.01, abs=1e-6)


def test_attention_makes_a_long_prefill_longer():
    bench = Bench(prefill_s_per_token_squared=1e-5)
    bench.ask("a", 300, 1)
    assert bench.run()["a"].prefill_s == pytest.approx(0.3 + 0.45)


def test_the_next_turn_prefills_only_what_is_new():
    bench = Bench()
    bench.ask("a1", 200, 10, program="a")
    bench.ask_at(10, "a2", 260, 10, program="a")
    served = bench.run()["a2"]
    assert (served.cached_tokens, served.prefilled_tokens) == (210, 50)


def test_those_of_a_group_compute_their_prefix_once():
    bench = Bench()
    for name in "abc":
        bench.ask(name, 220, 5, shared=[Segment("system", 200)])
    served = bench.run()
    assert [served[name].prefilled_tokens for name in "abc"] == [220, 20, 20]


def test_the_first_in_the_queue_blocks_those_behind_it():
    bench = Bench()
    bench.ask("a", 500, 100)
    bench.ask("large", 800, 10)
    bench.ask("small", 10, 10)
    bench.run()
    assert bench.served["small"].queue_s > bench.ended_s["a"]


def test_no_more_than_the_concurrency_runs():
    bench = Bench(concurrency=1)
    bench.ask("a", 100, 11)
    bench.ask("b", 100, 11)
    assert (bench.engine.running, bench.engine.waiting) == (1, 1)
    assert bench.run()["b"].queue_s == pytest.approx(0.2)


def test_a_request_larger_than_the_pool_fails_at_once():
    bench = Bench()
    bench.ask("a", 990, 20)
    assert bench.served["a"].failed == "needs 1010 tokens of KV; the pool of e0 has 1000"


def test_an_aborted_request_gives_back_its_room_and_keeps_its_tokens():
    bench = Bench()
    bench.ask("a", 100, 500)
    bench.at(0.1 + 0.055, lambda: bench.engine.abort("a"))
    served = bench.run()["a"]
    assert served.aborted
    assert served.generated_tokens == 6
    assert (bench.engine.running, bench.engine.used_share) == (0, 0.0)


def test_a_request_aborted_in_the_queue_has_nothing_and_blocks_nobody():
    bench = Bench(concurrency=1)
    for name in "abc":
        bench.ask(name, 100, 11)
    bench.engine.abort("b")
    served = bench.run()
    assert (served["b"].aborted, served["b"].prefilled_tokens) == (True, 0)
    assert served["c"].queue_s == pytest.approx(0.2)


def test_a_dead_engine_fails_what_it_has_and_what_comes():
    bench = Bench()
    bench.ask("a", 100, 500)
    bench.ask("b", 890, 5)
    bench.at(0.155, bench.engine.die)
    bench.ask_at(1.0, "c", 10, 10)
    served = bench.run()
    assert {name: bool(one.failed) for name, one in served.items()} == {"a": True, "b": True, "c": True}
    assert served["a"].generated_tokens == 6
    assert bench.clock.now_s() == 1.0


def test_the_overhead_of_a_request_counts_as_its_queue():
    bench = Bench(request_s=0.5)
    bench.ask("a", 100, 1)
    served = bench.run()["a"]
    assert (served.queue_s, bench.ended_s["a"]) == (0.5, pytest.approx(0.6))


@pytest.mark.parametrize(
    ("how", "cached"), [(OnRelease.FREE, 0), (OnRelease.DEMOTE, 90), (OnRelease.IGNORE, 90)]
)
def test_release_does_what_the_engine_can(how: OnRelease, cached: int):
    bench = Bench(on_release=how)
    bench.ask("a1", 95, 1, program="a")
    bench.at(1, lambda: bench.engine.release(ProgramId("a")))
    bench.ask_at(2, "a2", 95, 1, program="a")
    assert bench.run()["a2"].cached_tokens == cached


def test_what_comes_back_from_below_is_not_prefilled():
    bench = Bench(host_tokens=500, host_tokens_s=100)
    bench.ask("a1", 199, 1, program="a")
    bench.at(1, lambda: bench.engine.offload(ProgramId("a")))
    bench.ask_at(2, "a2", 250, 1, program="a")
    served = bench.run()["a2"]
    assert (served.cached_tokens, served.restored_tokens, served.prefilled_tokens) == (0, 200, 50)
    assert bench.ended_s["a2"] == pytest.approx(2 + 2.0 + 0.05)


def test_another_prefills_while_one_comes_back_from_below():
    bench = Bench(host_tokens=500, host_tokens_s=100)
    bench.ask("a1", 199, 1, program="a")
    bench.at(1, lambda: bench.engine.offload(ProgramId("a")))
    bench.ask_at(2, "a2", 250, 1, program="a")
    bench.ask_at(2, "b", 100, 1)
    bench.run()
    assert bench.ended_s["b"] == pytest.approx(2.1)


def test_staging_disturbs_nobody_and_the_swap_stops_all():
    bench = Bench(stage_s=0.3, swap_s=2.0)
    version = Version(0, 1)
    said: list[float] = []
    bench.ask("a", 100, 101)
    commit = lambda: bench.engine.commit(version, keep_kv=True, done=lambda: said.append(bench.clock.now_s()))  # noqa: E731
    bench.engine.stage(commit)
    served = bench.run()["a"]
    assert said == [pytest.approx(2.3)]
    assert (served.pause_s, served.decode_s) == (pytest.approx(2.0), pytest.approx(1.0))
    assert bench.engine.version == version


def test_new_weights_without_the_old_kv_prefill_the_context_again():
    bench = Bench(swap_s=1.0)
    bench.ask("idle", 100, 1)
    bench.ask_at(1.0, "a", 100, 101)
    bench.at(1.6, lambda: bench.engine.commit(Version(0, 1), keep_kv=False, done=lambda: None))
    bench.ask_at(9.0, "idle again", 100, 1, program="idle")
    served = bench.run()
    assert served["a"].generated_tokens == 101
    assert served["a"].prefilled_tokens == 100 + 151
    assert served["idle again"].cached_tokens == 0


ASKED = st.tuples(
    st.integers(0, 5),
    st.integers(0, 2),
    st.integers(1, 400),
    st.integers(1, 80),
    st.floats(0, 3),
    st.sampled_from(["", "", "abort", "commit"]),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(ASKED, min_size=1, max_size=12), st.sampled_from([0, 200]))
def test_every_request_ends_once_and_gives_everything_back(
    asked: list[tuple[int, int, int, int, float, str]], host: int
):
    bench = Bench(kv_tokens=600, host_tokens=host, host_tokens_s=1_000 * bool(host))
    for number, (program, group, private, output, when_s, what) in enumerate(asked):
        shared = (Segment("system", 35), Segment(f"g{group}", 15))[: 1 + bool(group)]
        context = private + sum(segment.tokens for segment in shared)
        name = f"{program}/{number}"
        bench.at(
            when_s, lambda n=name, s=shared, c=context, o=output: bench.ask(n, c, o, shared=s, program=n)
        )
        if what == "abort":
            bench.at(when_s + 0.2, lambda n=name: bench.engine.abort(n))
        if what == "commit":
            done = lambda: None  # noqa: E731
            bench.at(when_s + 0.1, lambda d=done: bench.engine.commit(Version(0, 1), keep_kv=False, done=d))
    served = bench.run()
    assert len(served) == len(asked)
    for number, (program, _, _, output, _, _) in enumerate(asked):
        one = served[f"{program}/{number}"]
        assert one.failed or one.aborted or one.generated_tokens == output
        assert one.generated_tokens <= output
    engine = bench.engine
    assert (engine.running, engine.waiting, engine.decoding, engine.used_share) == (0, 0, 0, 0.0)
    assert engine.result.generated_tokens == sum(one.generated_tokens for one in served.values())
