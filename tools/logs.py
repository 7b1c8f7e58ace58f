"""Logs of the tool server for machines: one JSON object a line, with what it is about.

    {"time": "2026-01-31T12:00:00.000+00:00", "level": "warning", "logger": "sostenuto.tools.programs",
     "message": "...", "program": "p1", "call": "3.0", "request": "8f0c2a"}

`program`, `call` and `request` are those in whose course the line was written, tasks that were started for
them included; they are absent elsewhere.
"""

import json
import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TextIO

from typing_extensions import override

PROGRAM = ContextVar("program", default="")
CALL = ContextVar("call", default="")
REQUEST = ContextVar("request", default="")


class JsonFormatter(logging.Formatter):
    """Writes what `redact` leaves of a record."""

    def __init__(self, redact: Callable[[str], str]) -> None:
        super().__init__()
        self._redact = redact

    @override
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "program": PROGRAM.get(),
            "call": CALL.get(),
            "request": REQUEST.get(),
        }
        if record.exc_info:
            line["exception"] = record.exc_text or self.formatException(record.exc_info)
        fit = {key: self._redact(value) for key, value in line.items() if value}
        return json.dumps(fit)


@contextmanager
def json_logs(stream: TextIO, level: str, redact: Callable[[str], str]) -> Generator[None]:
    """Within the block the records of this process, from `level` on, go to `stream` and nowhere else."""
    root = logging.getLogger()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter(redact))
    others, level_before = list(root.handlers), root.level
    for other in others:
        root.removeHandler(other)
    root.addHandler(handler)
    root.setLevel(level.upper())
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level_before)
        for other in others:
            root.addHandler(other)
