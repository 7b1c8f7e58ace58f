"""Long records: their arrays lie beside the journal, can be read by anything, and come back as they were."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from sostenuto.errors import ConfigError, RecordError
from sostenuto.records import Producer, Span, Taught, Trajectory, VersionSpan
from sostenuto.runtime.bulk import bulk_path, read_bulk, write_bulk
from sostenuto.runtime.journal import BULK_BYTES, ProgramSealed, ProgramSubmitted, open_journal, read_journal
from sostenuto.runtime.records import encode_trajectory, join_trajectory, split_trajectory
from sostenuto.types import GroupId, ProgramId, Purpose, StopReason, Usage, Version


def sampled(noise: np.random.Generator, tokens: int) -> Span:
    return Span(
        Producer.POLICY,
        noise.integers(0, 1000, tokens).astype(np.int32),
        noise.normal(size=tokens).astype(np.float32),
        noise.random(tokens) < 0.5,
        (VersionSpan(Version(0, 3), 0, tokens),),
        1.0,
        2.0,
    )


def trajectory(
    lengths: list[int], *, seed: int = 0, name: str = "job-000003-1", rich: bool = True
) -> Trajectory:
    noise = np.random.default_rng(seed)
    spans = tuple(sampled(noise, tokens) for tokens in lengths)
    total = sum(lengths)
    top = noise.integers(0, 9, (total, 4)).astype(np.int32)
    taught = Taught("0.0", noise.normal(size=total).astype(np.float32), top, top.astype(np.float32))
    return Trajectory(
        program_id=ProgramId(name),
        group_id=GroupId("job-000003"),
        task_id="t",
        purpose=Purpose.TRAIN,
        sequences=((Span.fed(Producer.USER, [1, 2]), *spans), spans[:1]),
        reward=0.5,
        stop_reason=StopReason.ANSWERED,
        usage=Usage(decode_s=0.5, generated_tokens=total),
        metrics={"turns": 2.0},
        experts=(noise.integers(0, 9, (total, 2, 2)).astype(np.int16), None) if rich else (),
        taught=(None, taught) if rich else (),
    )


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.booleans(), st.integers(0, 9))
def test_what_was_split_is_joined_as_it_was(lengths: list[int], rich: bool, seed: int):
    original = trajectory(lengths, seed=seed, rich=rich)
    record, arrays = split_trajectory(original)
    joined = join_trajectory(record, {name: content for name, (_, content) in arrays.items()})
    assert encode_trajectory(joined) == encode_trajectory(original)


def test_arrays_of_another_record_are_refused():
    record, arrays = split_trajectory(trajectory([3, 4]))
    contents = {name: content for name, (_, content) in arrays.items()}
    with pytest.raises(RecordError, match=r"array 'mask' has 8 bytes, its record has \d+"):
        join_trajectory(record, {**contents, "mask": bytes(8)})
    with pytest.raises(RecordError, match="not the record"):
        join_trajectory(b"x", contents)


async def test_the_arrays_of_a_long_record_are_a_file_that_others_can_load(tmp_path: Path):
    tokens = BULK_BYTES // 9 + 1
    long, short = trajectory([tokens], name="gateway/long", rich=False), trajectory([3], name="short")
    async with open_journal(tmp_path / "journal.db") as journal:
        for record in (long, short):
            journal.write(ProgramSubmitted(record.program_id, record.group_id, "t", Purpose.TRAIN))
            journal.write(ProgramSealed(record))
    (file,) = (tmp_path / "records").iterdir()
    loaded = cast("dict[str, NDArray[Any]]", cast("Any", safetensors.numpy).load_file(file))
    assert loaded["token_ids"].dtype == np.int32
    np.testing.assert_array_equal(loaded["token_ids"], np.concatenate([s.token_ids for s in long.spans()]))
    np.testing.assert_array_equal(loaded["mask"], np.concatenate([s.mask for s in long.spans()]))
    with read_journal(tmp_path / "journal.db") as reader:
        assert [encode_trajectory(t) for t in reader.trajectories()] == [
            encode_trajectory(long), encode_trajectory(short),
        ]  # fmt: skip
        assert reader.record(ProgramId("short")).program_id == "short"
        with pytest.raises(RecordError, match="no record of it"):
            reader.record(ProgramId("other"))
    with closing(sqlite3.connect(tmp_path / "journal.db")) as connection:
        sizes = dict(connection.execute("SELECT program_id, length(record) FROM trajectories"))
    assert sizes["gateway/long"] < 1000
    file.write_bytes(file.read_bytes()[:-1])
    with read_journal(tmp_path / "journal.db") as reader, pytest.raises(RecordError, match="is cut off at"):
        reader.record(ProgramId("gateway/long"))


def test_a_file_that_is_missing_or_none_is_named(tmp_path: Path):
    path = bulk_path(tmp_path, ProgramId("a/b"))
    with pytest.raises(RecordError, match=r"a%2Fb\.safetensors"):
        read_bulk(path)
    path.write_bytes(b"\xff" * 9)
    with pytest.raises(RecordError, match=r"a%2Fb\.safetensors"):
        read_bulk(path)
    write_bulk(path, {"mask": ("BOOL", b"\x00\x01"), "token_ids": ("I32", b"")})
    assert read_bulk(path) == {"mask": b"\x00\x01", "token_ids": b""}


async def test_a_place_that_cannot_be_written_ends_in_an_error_that_says_so(tmp_path: Path):
    (tmp_path / "records").write_text("in the way")
    record = trajectory([BULK_BYTES], rich=False)

    async def write() -> None:
        async with open_journal(tmp_path / "journal.db") as journal:
            journal.write(ProgramSubmitted(record.program_id, record.group_id, "t", Purpose.TRAIN))
            journal.write(ProgramSealed(record))
            await journal.flush()

    with pytest.raises(ConfigError, match="the journal cannot be written"):
        await write()
