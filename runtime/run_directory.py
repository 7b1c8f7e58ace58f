"""The folder of one run: its journal, its logs, its checkpoints.  One runtime at a time.

journal.db        what happened, see runtime/journal.py
records/          arrays of long records, see runtime/bulk.py
events.jsonl      the same for people and programs that follow along
checkpoints/      what `Learner.save` writes
logs/             stderr of the processes
weights/          versions for engines that read them from disk
control.sock      what the living runtime says of its engines
lock              held by the living runtime; its pid is in it
"""

import fcntl
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sostenuto.errors import Blame, ConfigError
from sostenuto.runtime.journal import read_journal
from sostenuto.runtime.ledger import Ledger, Stage
from sostenuto.types import Outcome, OutcomeKind, ProgramId

LOST = Outcome(OutcomeKind.FAILED, "the runtime process ended", Blame.INFRASTRUCTURE)
NOT_TRAINED = Outcome(OutcomeKind.DROPPED, "runtime_ended")
"""Of a program that had finished, and waited for the trainer when the runtime died."""
_NEEDED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class RunDirectory:
    path: Path

    @property
    def journal(self) -> Path:
        return self.path / "journal.db"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoints_of(self, job: str) -> Path:
        """Of one job, by the name that it keeps over the deaths of its run."""
        return self.checkpoints / job

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    @property
    def control(self) -> Path:
        """Socket on which a living runtime says how it is."""
        return self.path / "control.sock"

    @property
    def is_in_use(self) -> bool:
        """Whether a living runtime holds the run."""
        try:
            with (self.path / "lock").open("r") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False


@contextmanager
def hold(path: Path) -> Generator[RunDirectory]:
    """Make the folder if need be and keep every other runtime out of it."""
    run = RunDirectory(path)
    try:
        for folder in (path, run.logs, run.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
        lock = (path / "lock").open("a+")
    except OSError as error:
        raise ConfigError(f"run directory {path}: {error.strerror or error}; choose another one") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "another process"
            raise ConfigError(
                f"run directory {path} is in use by {holder}; wait for it to end or choose another directory"
            ) from None
        lock.truncate(0)
        lock.write(f"pid {os.getpid()}")
        lock.flush()
        _refuse_a_full_disk(path)
        yield run


def _refuse_a_full_disk(path: Path) -> None:
    free = shutil.disk_usage(path).free
    if free < _NEEDED_BYTES:
        raise ConfigError(
            f"run directory {path}: {free >> 20} MiB free on its disk, at least {_NEEDED_BYTES >> 20} MiB "
            "are needed; free some or choose another directory"
        )


def settled_ledger(run: RunDirectory) -> tuple[Ledger, list[ProgramId]]:
    """The ledger as it stands, and whom the death of a runtime cut off.

    While a runtime lives, its programs are running.  When it is gone, what was open has failed, or is dropped
    where it had finished.
    """
    with read_journal(run.journal) as reader:
        ledger = reader.ledger()
    cut_off = {} if run.is_in_use else cut_off_by_death(ledger)
    for program_id, outcome in cut_off.items():
        ledger.end(program_id, outcome)
    return ledger, list(cut_off)


def cut_off_by_death(ledger: Ledger) -> dict[ProgramId, Outcome]:
    """What the open programs of a runtime come to that is gone."""
    return {
        program_id: NOT_TRAINED if stage is Stage.SEALED else LOST
        for program_id, stage in ledger.open_programs().items()
    }
