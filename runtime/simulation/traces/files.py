"""Traces of any format: which one a file has, and the reader or writer for it."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from sostenuto.errors import ConfigError, nearest
from sostenuto.runtime.simulation.plan import Workload
from sostenuto.runtime.simulation.traces.mooncake import read_mooncake
from sostenuto.runtime.simulation.traces.native import FORMAT, read_native, write_native
from sostenuto.runtime.simulation.traces.reading import numbered_lines, text_of
from sostenuto.runtime.simulation.traces.tracelab import read_tracelab, write_tracelab

READERS: Mapping[str, Callable[[Path], Workload]] = {
    "sostenuto": read_native,
    "tracelab": read_tracelab,
    "mooncake": read_mooncake,
}
WRITERS: Mapping[str, Callable[[Workload, Path], None]] = {
    "sostenuto": write_native,
    "tracelab": write_tracelab,
}


def read_trace(path: Path, format: str | None = None) -> Workload:  # noqa: A002 - the word for it
    """The programs of a trace; `format` None: recognised by the file's first line.

    ConfigError names file, line and field of what is wrong with it.
    """
    name = format or _format_of(path)
    if name not in READERS:
        raise ConfigError(f"{path}: unknown trace format {name!r}; {nearest(name, list(READERS))}")
    return READERS[name](path)


def write_trace(workload: Workload, path: Path) -> None:
    """As TraceLab's CSV when the path ends in .csv, which keeps less; otherwise in our own format."""
    if not workload.programs:
        raise ConfigError(f"{path}: {workload.name} has no programs to write")
    path.parent.mkdir(parents=True, exist_ok=True)
    WRITERS["tracelab" if path.suffix == ".csv" else "sostenuto"](workload, path)


def _format_of(path: Path) -> str:
    _, first = next(numbered_lines(text_of(path)))
    try:
        values: object = json.loads(first)
    except ValueError:
        values = None
    if isinstance(values, dict):
        keys = cast("dict[str, Any]", values)
        if keys.get("format") == FORMAT:
            return "sostenuto"
        if "hash_ids" in keys:
            return "mooncake"
    elif "," in first:
        return "tracelab"
    raise ConfigError(f"{path}:1: no known trace begins like this; give its format: {', '.join(READERS)}")
