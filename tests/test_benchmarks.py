"""The benchmark's own checks can fail, and count what they say they count."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.bench import Bench
from benchmarks.code_size import function_lengths
from benchmarks.command import LONG, MEASURES
from benchmarks.exactness import is_canonical, with_one_token_changed
from benchmarks.figure import Figure, keep
from benchmarks.wiretap import Exchange, Wiretap, excess_prefill, mismatches, never_sent
from tokenizers import Tokenizer

from sostenuto.records import Producer, Span, Trajectory, VersionSpan
from sostenuto.runtime.quickstart.tokenizer import tokenizer_material, train_tokenizer
from sostenuto.types import GroupId, ProgramId, Purpose, StopReason, Version

_SOURCE = '''
def short(): return 1

@decorator
def with_docstring(a):
    """One.

    Three.
    """
    return a

class Box:
    async def outer(self):
        def inner():
            return 1
        return inner
'''


def test_a_function_is_as_long_as_its_lines_without_docstring_and_decorators():
    assert function_lengths(_SOURCE) == [1, 2, 4, 2]


def test_a_figure_is_one_json_object_with_four_keys():
    line = Figure("dlogp_max", 1.23456789e-5, "nats", "<= 1e-4").line()
    assert json.loads(line) == {
        "name": "dlogp_max",
        "value": 1.23457e-5,
        "unit": "nats",
        "target": "<= 1e-4",
    }
    assert Figure.parse(line).line() == line


@pytest.mark.parametrize(
    ("value", "target", "met"),
    [
        (0.75, "<= 0.75", True),
        (0.76, "<= 0.75", False),
        (0.5, "< 0.5", False),
        (1.0, ">= 1", True),
        (1e-4, "> 1e-4", False),
        (0.0, "== 0", True),
        (float("nan"), "<= 1", False),
        (float("nan"), None, True),
    ],
)
def test_a_figure_knows_whether_it_meets_its_target(value: float, target: str | None, met: bool):
    assert Figure("x", value, "s", target).is_met is met


def test_a_target_that_cannot_be_read_is_refused_at_once():
    with pytest.raises(ValueError, match="begin it with one of"):
        Figure("x", 1.0, "s", "about 3")


def test_results_of_other_figures_stay_when_some_are_measured_again(tmp_path: Path):
    path = tmp_path / "results" / "some.jsonl"
    keep([Figure("a", 1, "s"), Figure("b", 2, "s")], path)
    keep([Figure("b", 3, "s"), Figure("c", 4, "s")], path)
    kept = [Figure.parse(line) for line in path.read_text().splitlines()]
    assert [(figure.name, figure.value) for figure in kept] == [("a", 1), ("b", 3), ("c", 4)]


def test_a_bench_prints_what_it_is_told(capsys: pytest.CaptureFixture[str]):
    bench = Bench(quick=True)
    bench.tell("turns", 3, "turns", ">= 1")
    assert json.loads(capsys.readouterr().out) == {
        "name": "turns",
        "value": 3.0,
        "unit": "turns",
        "target": ">= 1",
    }
    assert [figure.name for figure in bench.figures] == ["turns"]


def test_every_measurement_has_one_name():
    assert not set(MEASURES) & set(LONG)


def _sampled(token_ids: list[int]) -> Span:
    count = len(token_ids)
    return Span(
        Producer.POLICY,
        np.array(token_ids, dtype=np.int32),
        np.full(count, -0.5, dtype=np.float32),
        np.ones(count, dtype=np.bool_),
        (VersionSpan(Version(0, 0), 0, count),),
    )


def _record(spans: Sequence[Span]) -> Trajectory:
    return Trajectory(
        ProgramId("p"), GroupId("g"), "t", Purpose.TRAIN, (tuple(spans),), 1.0, StopReason.ANSWERED
    )


_PROMPT = Span.fed(Producer.USER, [1, 2, 3])
_TOOL = Span.fed(Producer.ENVIRONMENT, [6, 7])
_TWO_TURNS = _record([_PROMPT, _sampled([4, 5]), _TOOL, _sampled([8])])


def _heard() -> list[Exchange]:
    return [Exchange([1, 2, 3], [4, 5], 3), Exchange([1, 2, 3, 4, 5, 6, 7], [8], 3)]


def test_a_record_of_what_was_on_the_socket_has_no_mismatch():
    assert mismatches(_TWO_TURNS, _heard()) == 0
    assert never_sent(_TWO_TURNS) == 0


def test_one_corrupted_token_is_a_mismatch():
    corrupted = with_one_token_changed(_TWO_TURNS)
    assert mismatches(corrupted, _heard()) > 0
    assert mismatches(_TWO_TURNS, _heard()) == 0, "the record itself was not changed"


def test_a_changed_tool_token_is_a_mismatch():
    other = replace(_TOOL, token_ids=np.array([6, 9], dtype=np.int32))
    record = _record([_PROMPT, _sampled([4, 5]), other, _sampled([8])])
    assert mismatches(record, _heard()) == 1


def test_turns_that_only_the_record_or_only_the_socket_has_are_mismatches():
    assert mismatches(_TWO_TURNS, _heard()[:1]) == 8
    assert mismatches(_record([_PROMPT, _sampled([4, 5])]), _heard()) == 8


def test_tokens_after_the_last_sampled_one_were_never_sent():
    assert never_sent(_record([_PROMPT, _sampled([4, 5]), _TOOL])) == 2


def test_a_held_program_prefills_its_last_sampled_token_and_what_is_new():
    assert excess_prefill(_heard()) == [0]
    first, second = _heard()
    assert excess_prefill([first, replace(second, prefilled_tokens=7)]) == [4]


def test_the_tap_reads_bytes_by_program_and_in_order():
    tap = Wiretap()
    for turn, sampled in enumerate(([4, 5], [8])):
        sent = json.dumps({"program_id": "p", "token_ids": [1, 2, 3]}).encode()
        received = json.dumps({"token_ids": sampled, "prefilled_tokens": 3}).encode()
        tap(f"p/{turn}", sent, received)
    assert [exchange.sampled for exchange in tap.exchanges()["p"]] == [[4, 5], [8]]


def test_tokens_that_their_own_text_would_not_encode_to_are_not_canonical():
    tokenizer: Tokenizer = train_tokenizer(tokenizer_material(1))
    canonical: list[int] = tokenizer.encode(" plum", add_special_tokens=False).ids
    in_bytes = [tokenizer.token_to_id(byte) for byte in "plum"]
    assert is_canonical(canonical, tokenizer)
    assert not is_canonical([id_ for id_ in in_bytes if id_ is not None], tokenizer)
