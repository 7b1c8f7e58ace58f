"""The ledger closes, and the journal keeps what it was told through any death of the process."""

import sys
from pathlib import Path

import anyio
import numpy as np
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream
from hypothesis import given
from hypothesis import strategies as st

from sostenuto.errors import Blame, ConfigError, RecordError
from sostenuto.records import Producer, Span, Trajectory, VersionSpan
from sostenuto.runtime.journal import (
    FactStated,
    ProgramEnded,
    ProgramSealed,
    ProgramSubmitted,
    VersionPublished,
    open_journal,
    read_journal,
)
from sostenuto.runtime.ledger import Ledger, LedgerError
from sostenuto.runtime.records import decode_trajectory, encode_trajectory
from sostenuto.types import GroupId, Outcome, OutcomeKind, ProgramId, Purpose, StopReason, Usage, Version

DROPPED = Outcome(OutcomeKind.DROPPED, "stale")
FAILED = Outcome(OutcomeKind.FAILED, "engine gone", Blame.INFRASTRUCTURE)


def trajectory(name: str = "p1") -> Trajectory:
    sampled = Span(
        Producer.POLICY,
        np.array([5, 6, 7], np.int32),
        np.array([-0.1, -0.2, -0.3], np.float32),
        np.array([True, True, True]),
        (VersionSpan(Version(0, 1), 0, 2), VersionSpan(Version(0, 2), 2, 3)),
        1.0,
        2.0,
    )
    return Trajectory(
        program_id=ProgramId(name),
        group_id=GroupId("g"),
        task_id="t",
        purpose=Purpose.TRAIN,
        sequences=((Span.fed(Producer.USER, [1, 2]), sampled),),
        reward=1.0,
        stop_reason=StopReason.ANSWERED,
        usage=Usage(decode_s=0.5, generated_tokens=3),
        outcome=FAILED,
        metrics={"calls": 2.0},
    )


def submitted(name: str) -> ProgramSubmitted:
    return ProgramSubmitted(ProgramId(name), GroupId("g"), "t", Purpose.TRAIN)


@given(st.lists(st.tuples(st.sampled_from(["submit", "seal", "end"]), st.integers(0, 4))))
def test_the_sums_close_after_any_history_and_a_program_ends_once(history: list[tuple[str, int]]):
    ledger = Ledger()
    for what, number in history:
        program = ProgramId(f"p{number}")
        try:
            match what:
                case "submit":
                    ledger.submit(program)
                case "seal":
                    ledger.seal(program)
                case _:
                    ledger.end(program, DROPPED)
        except LedgerError:
            pass
        assert ledger.statistics().closes


def test_a_program_cannot_end_twice():
    ledger = Ledger()
    ledger.submit(ProgramId("p"))
    ledger.end(ProgramId("p"), DROPPED)
    with pytest.raises(LedgerError, match=r"was dropped\(stale\)"):
        ledger.end(ProgramId("p"), FAILED)


def test_a_record_survives_its_bytes():
    before = trajectory()
    after = decode_trajectory(encode_trajectory(before))
    assert encode_trajectory(after) == encode_trajectory(before)
    assert after.usage == before.usage
    assert after.outcome == before.outcome
    assert after.oldest_version == Version(0, 1)
    assert [s.token_ids.tolist() for s in after.spans()] == [[1, 2], [5, 6, 7]]


def test_bytes_that_are_no_record_are_refused():
    with pytest.raises(RecordError, match="not the record"):
        decode_trajectory(b"\x93\x01")


async def test_the_journal_gives_back_what_it_was_told(tmp_path: Path):
    path = tmp_path / "journal.db"
    async with open_journal(path) as journal:
        for name in "abc":
            journal.write(submitted(name))
        journal.write(ProgramSealed(trajectory("a")))
        journal.write(ProgramEnded(ProgramId("b"), FAILED))
        journal.write(VersionPublished(Version(0, 9), step=9))
        journal.write(VersionPublished(Version(1, 3), step=10))
        journal.write(FactStated("seed", "7"))
    with read_journal(path) as reader:
        statistics = reader.ledger().statistics()
        assert (statistics.submitted, statistics.running, statistics.sealed) == (3, 1, 1)
        assert statistics.outcomes == {"failed(infrastructure, engine gone)": 1}
        assert reader.highest_version() == Version(1, 3)
        assert reader.facts() == {"seed": "7"}
        assert [t.program_id for t in reader.trajectories(purpose=Purpose.TRAIN)] == ["a"]


async def test_flush_returns_when_all_is_committed_and_readers_see_it(tmp_path: Path):
    path = tmp_path / "journal.db"
    async with open_journal(path) as journal:
        for number in range(50):
            journal.write(submitted(f"p{number}"))
        await journal.flush()
        with read_journal(path) as reader:
            assert reader.ledger().statistics().submitted == 50


async def test_what_was_flushed_outlives_kill_9(tmp_path: Path):
    path = tmp_path / "journal.db"
    script = f"""
import anyio, sys
from pathlib import Path
from sostenuto.runtime.journal import ProgramSubmitted, open_journal
async def main():
    async with open_journal(Path({str(path)!r})) as journal:
        for n in range(20):
            journal.write(ProgramSubmitted(f"p{{n}}", "g", "t", "train"))
        await journal.flush()
        print("flushed", flush=True)
        await anyio.sleep_forever()
anyio.run(main)
"""
    async with await anyio.open_process([sys.executable, "-c", script]) as process:
        assert process.stdout is not None
        said = BufferedByteReceiveStream(process.stdout)
        assert await said.receive_until(b"\n", 100) == b"flushed"
        process.kill()
    with read_journal(path) as reader:
        assert reader.ledger().statistics().running == 20


async def test_a_journal_that_cannot_be_opened_says_where(tmp_path: Path):
    with pytest.raises(ConfigError, match="no journal can be opened"):
        async with open_journal(tmp_path / "missing" / "journal.db"):
            pass
    with pytest.raises(ConfigError, match="is this a run directory"), read_journal(tmp_path / "none.db"):
        pass
