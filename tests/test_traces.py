"""Traces: public formats and ours become workloads, and what is wrong with one is named by line and field."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sostenuto.errors import ConfigError
from sostenuto.records import Producer, Span, Trajectory, VersionSpan
from sostenuto.runtime.simulation.plan import PlannedTurn, Workload
from sostenuto.runtime.simulation.traces.files import read_trace, write_trace
from sostenuto.runtime.simulation.traces.recorder import TraceRecorder, plan_of
from sostenuto.runtime.simulation.workloads import generate, unavoidable
from sostenuto.scheduler.kv import Segment
from sostenuto.types import GroupId, ProgramId, Purpose, StopReason, Usage, Version

TRACELAB = "id,input_len,output_len,arrival_time,round_idx,tool_wait_after_ms,prefix_len"
HEADER = '{"format":"sostenuto-trace","version":1,"name":"mine"}'
ONE = '{"id":"p0","prompt_tokens":9,"turns":[{"output_tokens":2}]}'


def written(tmp_path: Path, name: str, *lines: str, end: str = "\n") -> Path:
    path = tmp_path / name
    path.write_text("\n".join(lines) + end)
    return path


# ---- ours ----


@pytest.mark.parametrize("concurrency", [4, None])
def test_our_own_format_gives_back_what_was_written(tmp_path: Path, concurrency: int | None):
    for name in ("swe-heavy", "remote-tools"):
        rate = None if concurrency else 0.5
        workload = generate(name, programs=20, seed=1, concurrency=concurrency, arrival_rate_s=rate)
        write_trace(workload, tmp_path / "deep" / "trace.jsonl")
        assert read_trace(tmp_path / "deep" / "trace.jsonl") == workload


def test_a_last_line_that_broke_off_is_left_out_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    path = written(tmp_path, "t.jsonl", HEADER, ONE, ONE.replace("p0", "p1")[:30], end="")
    with caplog.at_level(logging.WARNING):
        assert [plan.id for plan in read_trace(path).programs] == ["p0"]
    assert f"{path}:3" in caplog.text


def test_a_whole_last_line_without_a_line_break_counts(tmp_path: Path):
    path = written(tmp_path, "t.jsonl", HEADER, ONE, ONE.replace("p0", "p1"), end="")
    assert len(read_trace(path).programs) == 2


def test_open_programs_come_in_the_order_of_their_arrivals_counted_from_the_first(tmp_path: Path):
    late, early = ONE[:-1] + ',"arrival_s":70}', ONE.replace("p0", "p1")[:-1] + ',"arrival_s":50}'
    workload = read_trace(written(tmp_path, "t.jsonl", HEADER, late, early))
    assert [(plan.id, plan.arrival_s) for plan in workload.programs] == [("p1", 0.0), ("p0", 20.0)]


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ((HEADER, ONE[:30], ONE), ":2: not a line of JSON"),
        ((HEADER, ONE, ONE), ":3: id 'p0' comes twice"),
        ((HEADER,), "no programs"),
        ((HEADER.replace("1", "2"), ONE), ":1: version is 2"),
        ((HEADER, ONE.replace("prompt_tokens", "prompt")), ":2: prompt_tokens is missing"),
        ((HEADER, ONE.replace("9", '"many"')), ":2: prompt_tokens is 'many'"),
        ((HEADER, ONE.replace("2}", "0}")), r":2: turns\.0\.output_tokens is 0"),
        ((HEADER, ONE.replace("2}", '2,"tool":"a","tool_s":-1}')), r":2: turns\.0\.tool_s is -1"),
        ((HEADER, ONE.replace("2}", '2,"tool":"a"}')), ":2: turns is .* last has none"),
        ((HEADER, ONE[:-1] + ',"prompt_blocks":["a"]}'), ":2: prompt_blocks .* longer than its prompt of 9"),
    ],
)
def test_a_wrong_line_of_ours_is_named(tmp_path: Path, lines: tuple[str, ...], named: str):
    with pytest.raises(ConfigError, match=named):
        read_trace(written(tmp_path, "t.jsonl", *lines))


# ---- TraceLab ----


def test_tracelab_rows_become_turns_of_a_growing_context(tmp_path: Path):
    path = written(
        tmp_path, "lab.csv", TRACELAB, "a,500,40,2000,0,1500,100", "b,90,9,0,0,0,100", "a,60,20,2000,1,0,640"
    )
    workload = read_trace(path)
    second, first = workload.programs
    assert workload.concurrency is None
    assert [first.id, second.id] == ["a", "b"]
    assert first.shared == second.shared == (Segment("lab/100", 100),)
    assert (first.prompt_tokens, first.arrival_s) == (500, 2.0)
    assert first.turns == (PlannedTurn(40, "tool", 1.5, 60), PlannedTurn(20))


def test_a_prefix_that_was_lost_in_between_is_not_counted_as_new(tmp_path: Path):
    path = written(tmp_path, "lab.csv", TRACELAB, "a,500,40,0,0,10,0", "a,600,20,0,1,0,0")
    assert read_trace(path).programs[0].turns[0].result_tokens == 60


def test_a_compaction_begins_a_new_program_after_the_tools_before_it(tmp_path: Path):
    rows = ("a,500,40,1000,0,3000,0", "a,60,20,1000,1,2000,540", "a,200,30,1000,2,0,0")
    before, after = read_trace(written(tmp_path, "lab.csv", TRACELAB, *rows)).programs
    assert (before.id, len(before.turns), after.id, len(after.turns)) == ("a", 2, "a+1", 1)
    assert (after.prompt_tokens, after.arrival_s) == (200, 6.0)


def test_tracelab_gives_back_what_the_format_can_say(tmp_path: Path):
    workload = generate("swe-light", programs=12, seed=1, group_size=1, arrival_rate_s=1.0)
    write_trace(workload, tmp_path / "lab.csv")
    back = read_trace(tmp_path / "lab.csv")
    assert unavoidable(back) == unavoidable(workload)
    for mine, theirs in zip(workload.programs, back.programs, strict=True):
        assert (mine.id, mine.prompt_tokens) == (theirs.id, theirs.prompt_tokens)
        assert mine.arrival_s == pytest.approx(theirs.arrival_s)
        assert [(t.output_tokens, t.result_tokens) for t in mine.turns] == [
            (t.output_tokens, t.result_tokens) for t in theirs.turns
        ]
        assert [t.tool_s for t in mine.turns] == pytest.approx([t.tool_s for t in theirs.turns])


def test_a_prefix_of_a_group_is_each_members_own_in_tracelab(tmp_path: Path):
    workload = generate("swe-light", programs=16, seed=1, concurrency=4)
    write_trace(workload, tmp_path / "lab.csv")
    back = read_trace(tmp_path / "lab.csv").programs
    assert {plan.shared_tokens for plan in back} == {3000}
    assert [plan.peak_tokens for plan in back] == [plan.peak_tokens for plan in workload.programs]


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ((TRACELAB,), "no rows"),
        ((TRACELAB.replace("output_len", "out"), "a,1,1,0,0,0,0"), ":1: no column output_len"),
        ((TRACELAB, "a,1,1,0,0,0,0", "a,x,1,0,1,0,2"), ":3: input_len is 'x'"),
        ((TRACELAB, "a,1,1,0,0,-5,0"), ":2: tool_wait_after_ms is '-5'"),
        ((TRACELAB, "a,1,1,-1,0,0,0"), ":2: arrival_time is '-1'"),
        ((TRACELAB, "a,1,1,nan,0,0,0"), ":2: arrival_time is 'nan'"),
        ((TRACELAB, "a,1,0,0,0,0,0"), ":2: output_len is '0'"),
        ((TRACELAB, "a,0,1,0,0,0,9"), ":2: input_len is 0 in a first round"),
        ((TRACELAB, "a,1,1,0,0,0,0", "a,1,1,0,2,0,2"), ":3: round_idx is 2 where 1 comes next"),
        ((TRACELAB, "a,1,1,0,0"), ":2: tool_wait_after_ms is None"),
    ],
)
def test_a_wrong_row_of_tracelab_is_named(tmp_path: Path, lines: tuple[str, ...], named: str):
    with pytest.raises(ConfigError, match=named):
        read_trace(written(tmp_path, "lab.csv", *lines))


# ---- Mooncake ----


def asked(timestamp: int, tokens: int, output: int, *hashes: int) -> str:
    return json.dumps(
        {"timestamp": timestamp, "input_length": tokens, "output_length": output, "hash_ids": hashes}
    )


def test_requests_that_go_on_with_each_other_are_one_program(tmp_path: Path):
    path = written(
        tmp_path, "moon.jsonl",
        asked(1000, 1200, 100, 1, 2, 3),
        asked(9000, 1500, 50, 1, 2, 4),
        asked(9500, 700, 10, 8, 9),
    )  # fmt: skip
    first, other = read_trace(path).programs
    assert first.turns == (PlannedTurn(100, "tool", 5.0, 200), PlannedTurn(50))
    assert (first.arrival_s, other.arrival_s, other.turns) == (0.0, 8.5, (PlannedTurn(10),))


def test_a_second_continuation_is_a_branch_of_its_own_with_the_prefix_in_common(tmp_path: Path):
    path = written(
        tmp_path, "moon.jsonl",
        asked(0, 1200, 10, 1, 2, 3),
        asked(1000, 1700, 10, 1, 2, 5, 6),
        asked(2000, 1800, 10, 1, 2, 7, 8),
    )  # fmt: skip
    first, branch = read_trace(path).programs
    assert len(first.turns) == 2
    assert first.shared == branch.shared == (Segment("moon/2", 1024),)
    assert (first.prompt_tokens, branch.prompt_tokens) == (176, 776)


def test_the_longest_context_that_fits_is_gone_on_with(tmp_path: Path):
    path = written(
        tmp_path, "moon.jsonl",
        asked(0, 700, 1, 1, 2),
        asked(1, 1300, 1, 1, 3, 4),
        asked(2, 1900, 1, 1, 3, 5, 6),
    )  # fmt: skip
    assert [len(plan.turns) for plan in read_trace(path).programs] == [3]


def test_a_request_that_is_asked_again_is_another_program(tmp_path: Path):
    path = written(tmp_path, "moon.jsonl", asked(0, 700, 1, 1, 2), asked(1, 700, 1, 1, 2))
    assert [plan.shared for plan in read_trace(path).programs] == [(Segment("moon/1", 512),)] * 2


def test_nested_prefixes_are_cut_where_fewer_have_them_in_common(tmp_path: Path):
    path = written(
        tmp_path, "moon.jsonl",
        asked(0, 1100, 1, 1, 2, 11),
        asked(1, 1100, 1, 1, 2, 12),
        asked(2, 600, 1, 1, 13),
    )  # fmt: skip
    inner, outer = Segment("moon/2", 512), Segment("moon/1", 512)
    assert [plan.shared for plan in read_trace(path).programs] == [(outer, inner), (outer, inner), (outer,)]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (asked(0, 100, 1, 1, 2), ":2: hash_ids has 2 blocks, a prefix longer than its input of 100"),
        (asked(-1, 100, 1, 1), ":2: timestamp is -1"),
        (asked(0, 100, 0, 1), ":2: output_length is 0"),
        ('{"timestamp": 1, "hash_ids": []}', ":2: input_length is missing"),
        ("{", ":2: not a line of JSON"),
    ],
)
def test_a_wrong_request_of_mooncake_is_named(tmp_path: Path, line: str, named: str):
    with pytest.raises(ConfigError, match=named):
        read_trace(written(tmp_path, "moon.jsonl", asked(0, 100, 1, 1), line))


# ---- any ----


@pytest.mark.parametrize("format_", [None, "sostenuto", "tracelab", "mooncake"])
def test_an_empty_file_is_no_trace(tmp_path: Path, format_: str | None):
    with pytest.raises(ConfigError, match="is empty"):
        read_trace(written(tmp_path, "t", "", end=""), format_)


def test_a_format_is_recognised_or_asked_for(tmp_path: Path):
    with pytest.raises(ConfigError, match="give its format"):
        read_trace(written(tmp_path, "t", '{"what": 1}'))
    with pytest.raises(ConfigError, match="did you mean 'mooncake'"):
        read_trace(written(tmp_path, "t", ONE), "moncake")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "nowhere")


# ---- recording ----


def fed(count: int, at_s: float, first: int = 0, producer: Producer = Producer.ENVIRONMENT) -> Span:
    return Span.fed(producer, list(range(first, first + count)), at_s=at_s)


def sampled(count: int, started_s: float, ended_s: float) -> Span:
    return Span(
        Producer.POLICY,
        np.arange(count, dtype=np.int32),
        np.zeros(count, dtype=np.float32),
        np.ones(count, dtype=np.bool_),
        (VersionSpan(Version(0, 0), 0, count),),
        started_s,
        ended_s,
    )


def trajectory(*sequences: tuple[Span, ...], id_: str = "p0") -> Trajectory:
    return Trajectory(
        ProgramId(id_), GroupId("g0"), "task", Purpose.TRAIN, sequences, 1.0, StopReason.ANSWERED,
        Usage(environment_s=2.0),
    )  # fmt: skip


TWO_TURNS = (
    fed(300, 10.0), sampled(20, 11.0, 13.0), fed(3, 17.5, producer=Producer.TEMPLATE), fed(50, 17.5),
    sampled(5, 18.0, 19.0),
)  # fmt: skip


def test_a_record_says_what_its_turns_were():
    plan = plan_of(trajectory(TWO_TURNS), tools=["bash"], group_size=8)
    assert plan is not None
    assert (plan.id, plan.group, plan.group_size, plan.prompt_tokens) == ("p0", "g0", 8, 300)
    assert (plan.arrival_s, plan.prepare_s) == (8.0, 2.0)
    assert plan.turns == (PlannedTurn(20, "bash", 4.5, 53), PlannedTurn(5))


def test_a_rewritten_history_goes_on_with_the_turns_of_its_branch():
    rewritten = (fed(340, 16.0), TWO_TURNS[1].as_context(), sampled(7, 17.0, 18.0))
    plan = plan_of(trajectory(TWO_TURNS[:2], rewritten))
    assert plan is not None
    assert plan.turns == (PlannedTurn(20, "tool", 3.0, 40), PlannedTurn(7))


def test_recorded_programs_are_read_with_the_prefix_they_have_in_common(tmp_path: Path):
    path = tmp_path / "runs" / "trace.jsonl"
    TraceRecorder(path).record(trajectory(TWO_TURNS))
    other = (fed(128, 10.0), fed(172, 10.0, first=900), *TWO_TURNS[1:])
    TraceRecorder(path).record(trajectory(other, id_="p1"))
    first, second = read_trace(path).programs
    assert [segment.tokens for segment in first.shared] == [128]
    assert first.shared == second.shared
    assert (first.prompt_tokens, first.turns, first.arrival_s) == (172, second.turns, 0.0)


def test_a_program_that_never_sampled_leaves_no_line(tmp_path: Path):
    recorder = TraceRecorder(tmp_path / "trace.jsonl")
    recorder.record(trajectory((fed(300, 10.0),)))
    recorder.record(trajectory())
    assert (tmp_path / "trace.jsonl").read_text().count("\n") == 1


def test_a_recording_that_broke_off_is_gone_on_with(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    recorder = TraceRecorder(path, name="night")
    recorder.record(trajectory(TWO_TURNS))
    recorder.record(trajectory(TWO_TURNS, id_="lost"))
    path.write_bytes(path.read_bytes()[:-20])
    TraceRecorder(path).record(trajectory(TWO_TURNS, id_="p1"))
    workload = read_trace(path)
    assert (workload.name, [plan.id for plan in workload.programs]) == ("night", ["p0", "p1"])


def test_a_file_that_is_no_trace_is_not_added_to(tmp_path: Path):
    path = written(tmp_path, "notes.txt", "dear diary")
    with pytest.raises(ConfigError, match="give another path"):
        TraceRecorder(path)
    assert path.read_text() == "dear diary\n"


def test_a_workload_without_programs_is_not_written(tmp_path: Path):
    with pytest.raises(ConfigError, match="no programs"):
        write_trace(Workload("empty", ()), tmp_path / "t.csv")
    whole = generate("rl-groups", programs=8, seed=0, concurrency=2)
    write_trace(replace(whole, name="kept"), tmp_path / "t.jsonl")
    assert read_trace(tmp_path / "t.jsonl").name == "kept"
