"""Jobs that learn, over every death: of their trainer, which they survive, and of the runtime before.

- A job keeps one name, its root, under which its groups are in the journal and its checkpoints lie.
- Each time it is taken up it has an epoch of its own, and goes on from its newest checkpoint.
- A trainer that dies is started again, so often and no more; then the job ends with the reason.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio
from anyio import to_thread

from sostenuto.errors import ConfigError, nearest
from sostenuto.runtime.jobs.events import JobEvent, JobResult, JobStarted
from sostenuto.runtime.jobs.job import RLJob
from sostenuto.runtime.jobs.past import Past, look_back, newest_checkpoint
from sostenuto.runtime.jobs.reinforce import reinforce
from sostenuto.runtime.jobs.workshop import Premises, Say
from sostenuto.runtime.journal import FactStated, Journal, read_journal
from sostenuto.runtime.run_directory import RunDirectory
from sostenuto.trainer.client import TrainerLost
from sostenuto.trainer.retention import checkpoints
from sostenuto.types import Version

_JOB = "job "
"""Begins the names of facts: under which root the last job of a name is."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_COUNTED_S = 600.0
"""For so long a restart counts."""

_log = logging.getLogger(__name__)


class Careers:
    """Of the jobs of one runtime."""

    def __init__(
        self,
        premises: Premises,
        run: RunDirectory,
        journal: Journal,
        new_epoch: Callable[[], int],
        new_version: Callable[[int], Version],
    ) -> None:
        self._premises = premises
        self._run = run
        self._journal = journal
        self._new_epoch = new_epoch
        self._new_version = new_version

    async def begin(self, job: RLJob, say: Say, *, given: str) -> JobResult:
        """`given`: the name by which whoever goes on will ask for the job."""
        # Another job of that name keeps it.
        root = job.name if await self.knows(given) else given
        self._journal.write(FactStated(f"{_JOB}{given}", root))
        return await self.go_on(job, Past(root), say)

    async def knows(self, name: str) -> bool:
        """Whether a job of this name has begun here."""
        await self._journal.flush()
        with read_journal(self._run.journal) as reader:
            return name in _roots(reader.facts(), self._run)

    async def past(self, job: RLJob, checkpoint: Path | None = None) -> Past:
        """Of a job of an earlier runtime."""
        await self._journal.flush()
        return await to_thread.run_sync(self._past, job, None, checkpoint)

    async def go_on(self, job: RLJob, past: Past, say: Say) -> JobResult:
        """To its end, however often its trainer dies within bounds."""
        premises, root, given, begun = self._premises, past.root, job, list[JobStarted]()

        def note(event: JobEvent) -> None:
            begun.extend([event] if isinstance(event, JobStarted) else [])
            say(event)

        restarts, allowed, pause_s = list[float](), premises.config.trainer.restarts, _FIRST_PAUSE_S
        while True:
            try:
                return await reinforce(job, premises, note, past)
            except TrainerLost as error:
                now_s = anyio.current_time()
                restarts = [at_s for at_s in restarts if now_s - at_s < _COUNTED_S]
                # What it ends with before it has begun does not change by trying.
                if len(restarts) >= allowed or not (begun or error.killed):
                    raise TrainerLost(_given_up(error, len(restarts))) from error
                _log.warning("%s: goes on from its last checkpoint: %s", root, error)
            restarts.append(now_s)
            await anyio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            await self._journal.flush()
            past = await to_thread.run_sync(self._past, given, root, None)
            epoch = self._new_epoch()
            job = replace(given, name=f"{root}.{epoch}")
            premises = replace(premises, new_version=partial(self._new_version, epoch))

    def _past(self, job: RLJob, root: str | None, checkpoint: Path | None) -> Past:
        with read_journal(self._run.journal) as reader:
            facts = reader.facts()
            root = root or _root(job, facts, self._run)
            place = newest_checkpoint(self._run.checkpoints_of(root), job, checkpoint)
            return look_back(reader, root, job, place, facts)


def _given_up(error: TrainerLost, times: int) -> str:
    return f"{error}; it was started again {times} times, and is given up" if times else str(error)


def _root(job: RLJob, facts: Mapping[str, str], run: RunDirectory) -> str:
    roots = _roots(facts, run)
    if job.name not in roots:
        raise ConfigError(f"resume: {run.path} has had no job {job.name!r}; {nearest(job.name, list(roots))}")
    return roots[job.name]


def _roots(facts: Mapping[str, str], run: RunDirectory) -> dict[str, str]:
    """By the name of a job.  Where the journal was lost, checkpoints are there still."""
    saved = {folder.name: folder.name for folder in run.checkpoints.iterdir() if checkpoints(folder)}
    begun = {name.removeprefix(_JOB): root for name, root in facts.items() if name.startswith(_JOB)}
    return {**saved, **begun}
