"""The journal of a tool server, read from outside."""

import sqlite3
from contextlib import closing
from pathlib import Path


def rows_of(folder: Path) -> int:
    """What the journal holds of programs, results, sandboxes and snapshots."""
    tables = ("programs", "results", "sandboxes", "snapshots", "rests")
    with closing(sqlite3.connect(folder / "state" / "journal.sqlite")) as connection:
        counts = (connection.execute(f"SELECT count(*) FROM {table}").fetchone() for table in tables)
        return sum(count for (count,) in counts)
