"""What a run has done, on disk.  SQLite in WAL mode; writes are batched, one commit for a batch.

- `write` returns at once; `flush` returns when everything written before it is committed.
- The death of any process loses nothing that was flushed.
- Records of finished programs are in it; the arrays of long ones lie beside it (`bulk`), written before.
- Only one runtime writes to a journal at a time (the run directory is locked); anyone may read it.
"""

import sqlite3
import time
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import anyio
from anyio import to_thread

from sostenuto.errors import Blame, ConfigError, RecordError, lone_error
from sostenuto.records import Trajectory
from sostenuto.runtime.bulk import FOLDER, bulk_path, read_bulk, write_bulk
from sostenuto.runtime.ledger import Ledger, Stage
from sostenuto.runtime.records import (
    array_bytes,
    decode_trajectory,
    encode_trajectory,
    join_trajectory,
    split_trajectory,
)
from sostenuto.types import GroupId, Outcome, OutcomeKind, ProgramId, Purpose, Version

_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS programs (
    id TEXT PRIMARY KEY, group_id TEXT NOT NULL, task_id TEXT NOT NULL, purpose TEXT NOT NULL,
    stage TEXT NOT NULL, kind TEXT, reason TEXT, blame TEXT);
CREATE TABLE IF NOT EXISTS trajectories (program_id TEXT PRIMARY KEY, record BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS bulk (program_id TEXT PRIMARY KEY);
CREATE TABLE IF NOT EXISTS groups (
    id TEXT PRIMARY KEY, job TEXT NOT NULL, ordinal INTEGER NOT NULL, start INTEGER NOT NULL,
    size INTEGER NOT NULL, step INTEGER);
CREATE INDEX IF NOT EXISTS programs_by_group ON programs (group_id);
CREATE TABLE IF NOT EXISTS versions (
    epoch INTEGER, number INTEGER, step INTEGER, PRIMARY KEY (epoch, number));
"""

_ENDED = "ended"
BULK_BYTES = 64 << 10
"""Arrays of so many bytes and more lie beside the journal; less is read and written faster within it."""


@dataclass(frozen=True, slots=True)
class ProgramSubmitted:
    program_id: ProgramId
    group_id: GroupId
    task_id: str
    purpose: Purpose


@dataclass(frozen=True, slots=True)
class ProgramSealed:
    """The rollout is over; what becomes of it is decided later."""

    trajectory: Trajectory


@dataclass(frozen=True, slots=True)
class ProgramEnded:
    program_id: ProgramId
    outcome: Outcome
    trajectory: Trajectory | None = None
    """Given for a program that was not sealed before and has a record worth keeping."""


@dataclass(frozen=True, slots=True)
class VersionPublished:
    version: Version
    step: int


@dataclass(frozen=True, slots=True)
class FactStated:
    name: str
    value: str


@dataclass(frozen=True, slots=True)
class GroupOpened:
    group_id: GroupId
    job: str
    """The name that a job keeps over the deaths of its run."""
    ordinal: int
    """Of its draw, among the tasks of the job."""
    start: int
    """1, or more where the draw was started before and given up."""
    size: int
    """Members that it begins with."""


@dataclass(frozen=True, slots=True)
class GroupTrained:
    """Its programs were learnt from in this step."""

    group_id: GroupId
    step: int


@dataclass(frozen=True, slots=True)
class ProgramReopened:
    """What became of a program with a record is void: its run died, and it waits for the trainer again."""

    program_id: ProgramId


Entry = (
    ProgramSubmitted
    | ProgramSealed
    | ProgramEnded
    | ProgramReopened
    | GroupOpened
    | GroupTrained
    | VersionPublished
    | FactStated
)


class Journal:
    """The writing side.  Use `open_journal`."""

    def __init__(self, connection: sqlite3.Connection, folder: Path | None = None) -> None:
        """`folder`: for the arrays of long records; None: they are in the journal as well."""
        self._connection = connection
        self._folder = folder
        self._pending: list[Entry] = []
        self._wake = anyio.Event()
        self._written = 0
        self._committed = 0
        self._progress = anyio.Condition()
        self._broken: ConfigError | None = None
        self._thread = anyio.CapacityLimiter(1)
        self.busy_s = 0.0
        """That its thread has spent on commits."""
        self.waited_for_s = 0.0
        """That who called `flush` has waited."""

    def write(self, entry: Entry) -> None:
        """Take `entry` into the next commit."""
        self._pending.append(entry)
        self._written += 1
        self._wake.set()

    async def flush(self) -> None:
        """Return when everything written so far is on disk; ConfigError when the disk refuses."""
        goal, began_s = self._written, anyio.current_time()
        async with self._progress:
            while self._committed < goal:
                if self._broken is not None:
                    raise self._broken
                await self._progress.wait()
        self.waited_for_s += anyio.current_time() - began_s

    async def commit_for_ever(self) -> None:
        while True:
            await self._wake.wait()
            self._wake = anyio.Event()
            await self.commit_pending()

    async def commit_pending(self) -> None:
        batch, self._pending = self._pending, []
        with anyio.CancelScope(shield=True):
            try:
                self.busy_s += await to_thread.run_sync(
                    _commit, self._connection, self._folder, batch, limiter=self._thread
                )
                self._committed += len(batch)
            except (sqlite3.Error, OSError) as error:
                self._broken = ConfigError(f"the journal cannot be written: {error}; is the disk full?")
                raise self._broken from error
            finally:
                async with self._progress:
                    self._progress.notify_all()


@asynccontextmanager
async def open_journal(path: Path) -> AsyncGenerator[Journal]:
    """Write to the journal at `path`; on leaving, everything written is committed."""
    try:
        connection = sqlite3.connect(path, check_same_thread=False)
        connection.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;" + _SCHEMA)
    except sqlite3.Error as error:
        raise ConfigError(
            f"no journal can be opened at {path}: {error}; choose another run directory"
        ) from error
    journal = Journal(connection, path.parent / FOLDER)
    with closing(connection), lone_error():
        async with anyio.create_task_group() as group:
            group.start_soon(journal.commit_for_ever)
            try:
                yield journal
            finally:
                group.cancel_scope.cancel()
                await journal.commit_pending()


def _commit(connection: sqlite3.Connection, folder: Path | None, batch: list[Entry]) -> float:
    """How long that took."""
    began_s = time.perf_counter()
    with connection:
        for entry in batch:
            _execute(connection, folder, entry)
    return time.perf_counter() - began_s


def _execute(connection: sqlite3.Connection, folder: Path | None, entry: Entry) -> None:
    match entry:
        case ProgramSubmitted(program_id, group_id, task_id, purpose):
            row = (program_id, group_id, task_id, purpose, Stage.RUNNING)
            connection.execute("INSERT INTO programs VALUES (?, ?, ?, ?, ?, NULL, NULL, NULL)", row)
        case ProgramSealed(trajectory):
            _keep(connection, folder, trajectory)
            row = (Stage.SEALED, trajectory.program_id)
            connection.execute("UPDATE programs SET stage = ? WHERE id = ?", row)
        case ProgramEnded(program_id, outcome, trajectory):
            if trajectory is not None:
                _keep(connection, folder, trajectory)
            row = (_ENDED, outcome.kind, outcome.reason, outcome.blame, program_id)
            connection.execute("UPDATE programs SET stage=?, kind=?, reason=?, blame=? WHERE id=?", row)
        case ProgramReopened(program_id):
            row = (Stage.SEALED, program_id)
            query = "UPDATE programs SET stage=?, kind=NULL, reason=NULL, blame=NULL WHERE id=?"
            connection.execute(query, row)
            query = "UPDATE groups SET step=NULL WHERE id=(SELECT group_id FROM programs WHERE id=?)"
            connection.execute(query, (program_id,))
        case _:
            _execute_other(connection, entry)


def _execute_other(
    connection: sqlite3.Connection, entry: GroupOpened | GroupTrained | VersionPublished | FactStated
) -> None:
    match entry:
        case GroupOpened(group_id, job, ordinal, start, size):
            row = (group_id, job, ordinal, start, size)
            connection.execute("INSERT INTO groups VALUES (?, ?, ?, ?, ?, NULL)", row)
        case GroupTrained(group_id, step):
            connection.execute("UPDATE groups SET step = ? WHERE id = ?", (step, group_id))
        case VersionPublished(version, step):
            row = (version.epoch, version.number, step)
            connection.execute("INSERT INTO versions VALUES (?, ?, ?)", row)
        case FactStated(name, value):
            connection.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))


def _keep(connection: sqlite3.Connection, folder: Path | None, trajectory: Trajectory) -> None:
    program_id = trajectory.program_id
    if folder is None or array_bytes(trajectory) < BULK_BYTES:
        record = encode_trajectory(trajectory)
    else:
        record, arrays = split_trajectory(trajectory)
        write_bulk(bulk_path(folder, program_id), arrays)
        connection.execute("INSERT OR REPLACE INTO bulk VALUES (?)", (program_id,))
    connection.execute("INSERT OR REPLACE INTO trajectories VALUES (?, ?)", (program_id, record))


@dataclass(frozen=True, slots=True)
class GroupEntry:
    """What the journal holds of one group."""

    group_id: GroupId
    ordinal: int
    start: int
    size: int
    step: int | None
    """In which it was trained, at last."""
    programs: Mapping[ProgramId, Stage | Outcome]
    """Of its members, those that were replaced included."""


class JournalReader:
    """The reading side; opens the file read-only and can be used while a runtime writes."""

    def __init__(self, connection: sqlite3.Connection, folder: Path) -> None:
        self._connection = connection
        self._folder = folder

    def ledger(self) -> Ledger:
        rows = self._connection.execute("SELECT id, stage, kind, reason, blame FROM programs")
        return Ledger.replay(
            (ProgramId(id_), _state(stage, kind, reason, blame)) for id_, stage, kind, reason, blame in rows
        )

    def facts(self) -> dict[str, str]:
        return dict(self._connection.execute("SELECT name, value FROM facts"))

    def highest_version(self) -> Version | None:
        """The newest version that was ever published; None before the first."""
        row = self._connection.execute("SELECT epoch, number FROM versions ORDER BY epoch DESC, number DESC")
        first = row.fetchone()
        return Version(*first) if first else None

    def versions(self) -> list[Version]:
        """All that were published, in the order in which that was."""
        return [
            Version(*row)
            for row in self._connection.execute("SELECT epoch, number FROM versions ORDER BY rowid")
        ]

    def groups(self, job: str) -> list[GroupEntry]:
        """Of a job, in the order in which they were opened."""
        query = (
            "SELECT g.id, g.ordinal, g.start, g.size, g.step, p.id, p.stage, p.kind, p.reason, p.blame "
            "FROM groups g JOIN programs p ON p.group_id = g.id WHERE g.job = ? ORDER BY g.rowid, p.rowid"
        )
        rows = self._connection.execute(query, (job,))
        return [
            GroupEntry(
                GroupId(id_), ordinal, start, size, step, {row[5]: _state(*row[6:]) for row in members}
            )
            for (id_, ordinal, start, size, step), members in groupby(rows, key=itemgetter(0, 1, 2, 3, 4))
        ]

    def record(self, program_id: ProgramId) -> Trajectory:
        """Of one program; RecordError when it has none that can be read."""
        found = next(self._records("WHERE t.program_id = ?", (program_id,)), None)
        if found is None:
            raise RecordError(f"{program_id}: the journal has no record of it")
        return found

    def trajectories(self, *, purpose: Purpose | None = None) -> Iterator[Trajectory]:
        """Every record that was kept, in the order in which the programs were submitted."""
        where, values = ("WHERE p.purpose = ?", (purpose,)) if purpose else ("", ())
        return self._records(where, values)

    def _records(self, where: str, values: tuple[str, ...]) -> Iterator[Trajectory]:
        query = (
            "SELECT t.program_id, t.record, b.program_id FROM trajectories t "
            "JOIN programs p ON p.id = t.program_id LEFT JOIN bulk b ON b.program_id = t.program_id "
            f"{where} ORDER BY p.rowid"
        )
        for program_id, record, is_bulk in self._connection.execute(query, values):
            if is_bulk:
                yield join_trajectory(record, read_bulk(bulk_path(self._folder, program_id)))
            else:
                yield decode_trajectory(record)


@contextmanager
def read_journal(path: Path) -> Generator[JournalReader]:
    """Raise ConfigError when there is no journal at `path`, or none that can be read."""
    if not path.is_file():
        raise ConfigError(f"no journal at {path}; is this a run directory?")
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
            yield JournalReader(connection, path.parent / FOLDER)
    except sqlite3.Error as error:
        raise ConfigError(
            f"the journal {path} cannot be read: {error}; restore the file, or choose another run directory"
        ) from error


def _state(stage: str, kind: str | None, reason: str | None, blame: str | None) -> Stage | Outcome:
    if kind is None:
        return Stage(stage)
    return Outcome(OutcomeKind(kind), reason or "", Blame(blame) if blame else None)
