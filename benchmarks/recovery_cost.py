"""What recovery costs a job that nothing befalls, and how soon one that was cut off samples again."""

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio

from benchmarks.figure import Tell
from benchmarks.recovery_torture import Small, open_folder
from sostenuto.runtime.config import RuntimeConfig
from sostenuto.runtime.engines.client import Tap
from sostenuto.runtime.job_file import load_train_file
from sostenuto.runtime.jobs.events import JobStarted, Saved
from sostenuto.runtime.jobs.job import RLJob
from sostenuto.runtime.runtime import Runtime
from sostenuto.trainer.retention import check_checkpoint


class _Watched(Runtime):
    """One whose journal says what it has cost."""

    @property
    def journal_busy_s(self) -> float:
        return self._journal.busy_s

    @property
    def journal_waited_for_s(self) -> float:
        return self._journal.waited_for_s


@dataclass(slots=True)
class _FirstToken:
    """When an engine has answered for the first time."""

    at_s: float | None = None

    def __call__(self, request_id: str, sent: bytes, received: bytes) -> None:
        del request_id, sent, received
        self.at_s = self.at_s or time.perf_counter()


async def measure_cost(tell: Tell, job: Small) -> None:
    """Run the job once, cut a second one off after its first checkpoint, and take that up."""
    with open_folder() as folder:
        await _measure_whole(tell, job, folder / "whole")
        checkpoint = await _cut_off(job, folder / "cut_off")
        began_s = time.perf_counter()
        check_checkpoint(checkpoint)
        tell("checkpoint_verified", time.perf_counter() - began_s, "s")
        await _measure_resumed(tell, job, folder / "cut_off")


async def _measure_whole(tell: Tell, job: Small, run: Path) -> None:
    async with _opened(job, run) as (runtime, asked):
        result = await (await runtime.submit(asked)).result()
        busy_s, waited_s = runtime.journal_busy_s, runtime.journal_waited_for_s
    share = "% of the job's time"
    tell("journal_thread", 100 * busy_s / result.elapsed_s, share, "<= 2")
    tell("journal_waited_for", 100 * waited_s / result.elapsed_s, share, "<= 2")
    tell("journal_bytes", _journal_bytes(run), "bytes")


async def _cut_off(job: Small, run: Path) -> Path:
    async with _opened(job, run) as (runtime, asked):
        handle = await runtime.submit(asked)
        async for event in handle.events():
            if isinstance(event, Saved):
                handle.cancel()
                return Path(event.path)
    raise RuntimeError("the job has saved no checkpoint")


async def _measure_resumed(tell: Tell, job: Small, run: Path) -> None:
    first, began_s, loaded_s = _FirstToken(), time.perf_counter(), 0.0
    async with _opened(job, run, first) as (runtime, asked):
        handle = await runtime.resume(asked)
        async for event in handle.events():
            if isinstance(event, JobStarted):
                loaded_s = time.perf_counter()
                break
        with anyio.fail_after(120):
            while first.at_s is None:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        handle.cancel()
    tell("resume_first_token", first.at_s - began_s, "s")
    tell("resume_models_loaded", loaded_s - began_s, "s")
    tell("resume_beside_loading", first.at_s - loaded_s, "s", "<= 5")


def _journal_bytes(run: Path) -> int:
    return sum(file.stat().st_size for file in run.glob("journal.db*"))


@asynccontextmanager
async def _opened(job: Small, run: Path, tap: Tap | None = None) -> AsyncGenerator[tuple[_Watched, RLJob]]:
    file = run.with_suffix(".toml")
    job.write(file, run)
    settings = load_train_file(file)
    config: RuntimeConfig = settings.runtime()
    async with _Watched(config, tap=tap) as runtime:
        yield runtime, await settings.job()
