"""Tasks: checked rows, stable ids, and an order that a resumed run takes up where it was."""

import json
import sys
from pathlib import Path

import pyarrow as pa  # pyright: ignore[reportMissingTypeStubs]
import pyarrow.parquet as pq  # pyright: ignore[reportMissingTypeStubs]
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from sostenuto.envs.task import Tasks
from sostenuto.errors import ConfigError, Unsupported


class Sum(BaseModel):
    a: int
    b: int = 0


class Named(BaseModel):
    id: str
    a: int


ROWS = [{"a": n, "b": 2 * n} for n in range(7)]


def written(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_python_jsonl_and_parquet_give_the_same_tasks_and_ids(tmp_path: Path):
    jsonl = written(tmp_path / "t.jsonl", [json.dumps(row) for row in ROWS] + [""])
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "t.parquet")  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    sources = [
        Tasks(Sum(**row) for row in ROWS),
        Tasks.from_rows(Sum, ROWS),
        Tasks.from_jsonl(Sum, jsonl),
        Tasks.from_parquet(Sum, tmp_path / "t.parquet"),
    ]
    assert all(list(tasks) == [Sum(**row) for row in ROWS] for tasks in sources)
    assert len({tasks.ids for tasks in sources}) == 1


def test_an_id_of_the_tasks_own_is_kept_and_two_different_tasks_may_not_share_it():
    assert Tasks([Named(id="x", a=1), Named(id="y", a=1)]).ids == ("x", "y")
    with pytest.raises(ConfigError, match="rows 1 and 2 differ and share the id 'x'"):
        Tasks([Named(id="x", a=1), Named(id="x", a=2)])


def test_errors_name_file_row_and_field(tmp_path: Path):
    path = written(tmp_path / "t.jsonl", ['{"a": 1}', '{"a": "one"}', "{}", "{nonsense"])
    with pytest.raises(ConfigError) as caught:
        Tasks.from_jsonl(Sum, path)
    message = str(caught.value)
    assert str(path) in message
    assert "row 2, field 'a': " in message
    assert "row 3, field 'a': Field required" in message
    assert "row 4: Invalid JSON" in message


def test_sources_that_are_not_there_or_empty_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="no such file"):
        Tasks.from_jsonl(Sum, tmp_path / "t.jsonl")
    with pytest.raises(ConfigError, match="no task in it"):
        Tasks.from_jsonl(Sum, written(tmp_path / "t.jsonl", [""]))
    with pytest.raises(ConfigError, match="not a Parquet file"):
        Tasks.from_parquet(Sum, written(tmp_path / "t.parquet", ["no"]))
    (tmp_path / "t.jsonl").write_bytes(b'{"a": 1}\n\xff\xfe\n')
    with pytest.raises(ConfigError, match="not UTF-8"):
        Tasks.from_jsonl(Sum, tmp_path / "t.jsonl")


def test_parquet_without_pyarrow_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(Unsupported, match=r"pip install 'sostenuto\[parquet\]'"):
        Tasks.from_parquet(Sum, written(tmp_path / "t.parquet", ["x"]))


@given(st.integers(1, 20), st.integers(0, 5), st.integers(1, 4), st.integers(0, 100))
def test_each_epoch_is_a_permutation_and_a_resumed_stream_goes_on(n: int, seed: int, epochs: int, cut: int):
    tasks = Tasks(Sum(a=i) for i in range(n))
    draws = list(tasks.stream(seed=seed, epochs=epochs).draws())
    assert len(draws) == n * epochs
    for epoch in range(epochs):
        part = draws[epoch * n : (epoch + 1) * n]
        assert sorted(draw.task.a for draw in part) == list(range(n))
        assert {draw.epoch for draw in part} == {epoch}
    again = Tasks(Sum(a=i) for i in range(n)).stream(seed=seed, epochs=epochs)
    assert list(again.draws(cut)) == draws[cut:]


def test_epochs_differ_seeds_differ_and_unshuffled_is_in_order():
    tasks = Tasks(Sum(a=i) for i in range(50))
    endless = tasks.stream(seed=1)
    assert endless.total is None
    first = [endless.at(i).task.a for i in range(50)]
    assert first != [endless.at(i).task.a for i in range(50, 100)]
    assert first != [tasks.stream(seed=2).at(i).task.a for i in range(50)]
    assert [tasks.stream(shuffle=False).at(i).task.a for i in range(50)] == list(range(50))
    with pytest.raises(IndexError):
        tasks.stream(epochs=1).at(50)
    with pytest.raises(ConfigError, match="epochs is 0"):
        tasks.stream(epochs=0)
    assert endless.at(0).payload() == {"a": first[0], "b": 0}
