"""What the tool server has to know after its own death, on disk.

- One SQLite file in WAL mode and one thread that writes it.  What is handed in while a commit runs goes
  into the next one, in order: many calls that start together cost one commit.
- A commit survives the death of the process; the last ones may be lost with the machine's power.
- Results, and what a program can go on from, hang on the row of their program and go with it in one commit:
  none is ever without owner.
- A journal without a file keeps nothing and costs nothing.
"""

import sqlite3
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from enum import StrEnum
from logging import getLogger
from pathlib import Path

import anyio
from anyio import to_thread

from sostenuto.errors import ConfigError, ToolServerError
from sostenuto.sandbox.protocol import Snapshot

log = getLogger(__name__)

_RETRY_S = 1.0
_SCHEMA = """
PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA wal_autocheckpoint=4000;
CREATE TABLE IF NOT EXISTS programs (id TEXT PRIMARY KEY, owner TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS results (
    program TEXT, kind TEXT, call TEXT, state TEXT NOT NULL, size INTEGER NOT NULL, outcome BLOB,
    PRIMARY KEY (program, kind, call));
CREATE TABLE IF NOT EXISTS sandboxes (name TEXT PRIMARY KEY, backend TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS snapshots (
    backend TEXT, reference TEXT, size INTEGER NOT NULL, PRIMARY KEY (backend, reference));
CREATE TABLE IF NOT EXISTS layers (
    backend TEXT, reference TEXT, content TEXT NOT NULL, seal TEXT NOT NULL,
    PRIMARY KEY (backend, reference));
CREATE TABLE IF NOT EXISTS epochs (name TEXT PRIMARY KEY, epoch INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS rests (program TEXT PRIMARY KEY, why_not TEXT NOT NULL, content BLOB NOT NULL);
DELETE FROM results WHERE program NOT IN (SELECT id FROM programs);
DELETE FROM rests WHERE program NOT IN (SELECT id FROM programs);
"""

_OPEN = "INSERT OR REPLACE INTO results VALUES (?, ?, ?, ?, 0, NULL)"
_Command = tuple[str, tuple[object, ...]]


class Kind(StrEnum):
    CALL = "call"
    REWARD = "reward"


class Ran(StrEnum):
    """What is known of a call."""

    OPENED = "opened"
    """It was about to start; whether it did, and how far it came, nobody knows."""
    DONE = "done"
    FAILED = "failed"
    """Its outcome is an error."""
    FORGOTTEN = "forgotten"
    """It ended, and its result is no longer kept."""


@dataclass(frozen=True, slots=True)
class ResultRow:
    program: str
    kind: Kind
    call_id: str
    ran: Ran
    outcome: bytes | None


@dataclass(frozen=True, slots=True)
class LayerRow:
    snapshot: Snapshot
    seal: str
    """Of what it was when it was made, see `sandbox.snapshots`."""


@dataclass(frozen=True, slots=True)
class RestRow:
    """What a program could go on from after the server's death, see `tools.rests`."""

    why_not: str
    """Why it cannot; empty: it can."""
    content: bytes


@dataclass(frozen=True, slots=True)
class Left:
    """What the server before this one had not given back."""

    programs: dict[str, str] = field(default_factory=dict[str, str])
    """Program to owner."""
    results: tuple[ResultRow, ...] = ()
    sandboxes: dict[str, str] = field(default_factory=dict[str, str])
    """Name to backend."""
    snapshots: tuple[Snapshot, ...] = ()
    epochs: dict[str, int] = field(default_factory=dict[str, int])
    layers: dict[str, "LayerRow"] = field(default_factory=dict[str, "LayerRow"])
    """By what they hold; those of `snapshots` that are layers."""
    rests: dict[str, RestRow] = field(default_factory=dict[str, RestRow])
    """By program."""


@dataclass(slots=True, eq=False)
class _Batch:
    commands: list[_Command] = field(default_factory=list[_Command])
    done: anyio.Event = field(default_factory=anyio.Event)
    error: sqlite3.Error | None = None


class Journal:
    """The writing side.  Use `open_journal`."""

    def __init__(self, connection: sqlite3.Connection | None, left: Left) -> None:
        self.left = left
        self._connection = connection
        self._batch = _Batch()
        self._kept: list[_Command] = []
        """Commands of a batch that failed and that nobody waits for."""
        self._wake = anyio.Event()
        self._thread = anyio.CapacityLimiter(1)

    @property
    def keeps(self) -> bool:
        """Whether anything that is written is kept."""
        return self._connection is not None

    def program_came(self, program: str, owner: str) -> None:
        self._write("INSERT OR REPLACE INTO programs VALUES (?, ?)", program, owner)

    def program_went(self, program: str) -> None:
        """Forget the program with all its results and what it could go on from."""
        for table in ("results", "rests"):
            self._write(f"DELETE FROM {table} WHERE program = ?", program)
        self._write("DELETE FROM programs WHERE id = ?", program)

    async def call_opens(self, program: str, kind: Kind, call_id: str) -> None:
        """Return when it is on disk that the call may run from now on; ToolServerError when it cannot be."""
        if self._connection is None:
            return
        self._write(_OPEN, program, kind, call_id, Ran.OPENED)
        await self._settled("the call was not started: its result could not be kept")

    def call_closes(self, program: str, kind: Kind, call_id: str, ran: Ran, outcome: bytes | None) -> None:
        """Record what came of an open call."""
        statement = (
            "UPDATE results SET state = ?, size = ?, outcome = ? WHERE program = ? AND kind = ? AND call = ?"
        )
        self._write(statement, ran, len(outcome or b""), outcome, program, kind, call_id)

    def sandbox_comes(self, name: str, backend: str) -> None:
        self._write("INSERT OR REPLACE INTO sandboxes VALUES (?, ?)", name, backend)

    def sandbox_went(self, name: str) -> None:
        self._write("DELETE FROM sandboxes WHERE name = ?", name)

    def snapshot_came(self, snapshot: Snapshot) -> None:
        values = (snapshot.backend, snapshot.reference, snapshot.size_bytes)
        self._write("INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?)", *values)

    def snapshot_went(self, snapshot: Snapshot) -> None:
        for table in ("layers", "snapshots"):
            statement = f"DELETE FROM {table} WHERE backend = ? AND reference = ?"
            self._write(statement, snapshot.backend, snapshot.reference)

    def layer_came(self, content: str, layer: LayerRow) -> None:
        """Of a snapshot that was written down before."""
        snapshot = layer.snapshot
        values = (snapshot.backend, snapshot.reference, content, layer.seal)
        self._write("INSERT OR REPLACE INTO layers VALUES (?, ?, ?, ?)", *values)

    async def rest_comes(self, program: str, rest: RestRow) -> None:
        """Return when it is on disk, in place of the one before it; ToolServerError when it cannot be."""
        if self._connection is not None:
            self._write("INSERT OR REPLACE INTO rests VALUES (?, ?, ?)", program, rest.why_not, rest.content)
            await self._settled("what the program could go on from could not be written down")

    async def rest_ends(self, program: str, why_not: str) -> None:
        """Return when it is on disk that the program cannot go on; ToolServerError when it cannot be."""
        if self._connection is not None:
            self._write("UPDATE rests SET why_not = ? WHERE program = ?", why_not, program)
            await self._settled("nothing was done: what the program could go on from cannot be given up")

    def rest_went(self, program: str) -> None:
        self._write("DELETE FROM rests WHERE program = ?", program)

    def epoch_rose(self, name: str, epoch: int) -> None:
        self._write("INSERT OR REPLACE INTO epochs VALUES (?, ?)", name, epoch)

    async def commit_for_ever(self) -> None:
        while True:
            await self._wake.wait()
            self._wake = anyio.Event()
            if not await self.commit():
                await anyio.sleep(_RETRY_S)

    async def commit(self) -> bool:
        """Put everything handed in on disk; False when the disk refuses."""
        batch, self._batch = self._batch, _Batch()
        commands = self._kept + batch.commands
        if self._connection is None or not commands:
            return True
        with anyio.CancelScope(shield=True):
            try:
                await to_thread.run_sync(_execute, self._connection, commands, limiter=self._thread)
                self._kept = []
            except sqlite3.Error as error:
                self._fail(batch, error)
            finally:
                batch.done.set()
        return batch.error is None

    async def _settled(self, failing: str) -> None:
        """Wait for the batch that is being gathered, which is not empty."""
        batch = self._batch
        await batch.done.wait()
        if batch.error is not None:
            raise ToolServerError(f"{failing}: {batch.error}")

    def _write(self, statement: str, *values: object) -> None:
        if self._connection is not None:
            self._batch.commands.append((statement, values))
            self._wake.set()

    def _fail(self, batch: _Batch, error: sqlite3.Error) -> None:
        batch.error = error
        # Whoever waits for a call to open is told; everything else is tried again.
        self._kept += [command for command in batch.commands if command[0] is not _OPEN]
        self._wake.set()
        log.error("the result log cannot be written: %s; is the disk full?", error)


@asynccontextmanager
async def open_journal(path: Path | None) -> AsyncGenerator[Journal]:
    """The journal at `path`, with what is left in it; None: one that keeps nothing.

    On leaving, everything handed in is committed.
    """
    if path is None:
        yield Journal(None, Left())
        return
    try:
        connection = sqlite3.connect(path, check_same_thread=False)
        connection.executescript(_SCHEMA)
        left = _read(connection)
    except sqlite3.Error as error:
        raise ConfigError(f"state_dir: no journal can be opened at {path}: {error}") from error
    with closing(connection):
        journal = Journal(connection, left)
        async with anyio.create_task_group() as group:
            group.start_soon(journal.commit_for_ever)
            try:
                yield journal
            finally:
                group.cancel_scope.cancel()
                await journal.commit()


def _execute(connection: sqlite3.Connection, commands: list[_Command]) -> None:
    with connection:
        for statement, values in commands:
            connection.execute(statement, values)


def _read(connection: sqlite3.Connection) -> Left:
    programs = dict(connection.execute("SELECT id, owner FROM programs"))
    rows = connection.execute("SELECT program, kind, call, state, outcome FROM results ORDER BY rowid")
    snapshots = connection.execute("SELECT backend, reference, size FROM snapshots")
    layers = connection.execute(
        "SELECT content, seal, backend, reference, size FROM layers JOIN snapshots USING (backend, reference)"
    )
    rests = connection.execute("SELECT program, why_not, content FROM rests")
    return Left(
        programs,
        tuple(ResultRow(program, Kind(kind), call, Ran(ran), out) for program, kind, call, ran, out in rows),
        dict(connection.execute("SELECT name, backend FROM sandboxes")),
        tuple(Snapshot(*row) for row in snapshots),
        dict(connection.execute("SELECT name, epoch FROM epochs")),
        {content: LayerRow(Snapshot(*snapshot), seal) for content, seal, *snapshot in layers},
        {program: RestRow(why, content) for program, why, content in rests},
    )
