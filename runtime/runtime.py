"""The runtime: one run directory, one tool server or several, any number of jobs.

Invariants:
- Every job is a task of the runtime's own group; leaving the runtime ends them all, and nothing is left.
- A job that fails does so for whoever asks for its result; the other jobs go on.
- When a runtime takes up a directory again, the run epoch rises by one, and programs that the last
  runtime left open have failed, or are dropped where they had finished.
- A job that is taken up again goes on under a name and an epoch of its own: no id, no version comes twice.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup

from sostenuto.envs.environment import Environment
from sostenuto.errors import ConfigError, SostenutoError
from sostenuto.runtime.config import EngineEntry, RuntimeConfig
from sostenuto.runtime.control import serve_control
from sostenuto.runtime.engine_pool import EnginePool
from sostenuto.runtime.engine_view import EngineView
from sostenuto.runtime.engines.client import Tap
from sostenuto.runtime.gateway.opening import OpenGateway
from sostenuto.runtime.given_weights import GivenTensors
from sostenuto.runtime.jobs.assess import assess
from sostenuto.runtime.jobs.careers import Careers
from sostenuto.runtime.jobs.events import JobEvent, JobFailed, JobResult, as_json
from sostenuto.runtime.jobs.group import Group
from sostenuto.runtime.jobs.job import EvalJob, RLJob, RolloutJob
from sostenuto.runtime.jobs.serve import ServeJob, serving
from sostenuto.runtime.jobs.stream import Desk, GroupStream, rollout_job
from sostenuto.runtime.jobs.workshop import Premises, Say
from sostenuto.runtime.journal import FactStated, Journal, ProgramEnded, open_journal, read_journal
from sostenuto.runtime.ledger import Ledger, LedgerStatistics
from sostenuto.runtime.publishing import Publication
from sostenuto.runtime.rendering.folder import ModelFolder
from sostenuto.runtime.run_directory import RunDirectory, cut_off_by_death, hold
from sostenuto.runtime.teaching import check_tokenizers
from sostenuto.runtime.tools_opened import open_tools
from sostenuto.trainer.retention import checkpoints
from sostenuto.types import ProgramId, Version

_EPOCH = "epoch"

J = TypeVar("J", bound=RLJob | EvalJob | ServeJob | RolloutJob)


class JobCancelled(SostenutoError):  # noqa: N818 - reads as the fact it states
    """The job was cancelled before it had a result."""


class JobHandle:
    """One submitted job: follow it, wait for it, or cancel it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._events: list[JobEvent] = []
        self._news = anyio.Event()
        self._scope = anyio.CancelScope()
        self._over = anyio.Event()
        self._result: JobResult | None = None
        self._error: SostenutoError | None = None

    async def events(self) -> AsyncIterator[JobEvent]:
        """Everything the job says, from its beginning, until it is over."""
        seen = 0
        while True:
            news = self._news
            while seen < len(self._events):
                yield self._events[seen]
                seen += 1
            if self._over.is_set():
                return
            await news.wait()

    async def result(self) -> JobResult:
        """Wait for the end; raise the job's error, or JobCancelled."""
        await self._over.wait()
        if self._error is not None:
            raise self._error
        if self._result is None:
            raise JobCancelled(f"job {self.name} was cancelled")
        return self._result

    def cancel(self) -> None:
        """End the job; its programs are in the ledger as cancelled.  Safe to call twice."""
        self._scope.cancel()

    def say(self, event: JobEvent) -> None:
        """For the job itself."""
        self._events.append(event)
        self._announce()

    async def run(self, work: Callable[[], Awaitable[JobResult]], say: Say) -> None:
        """For the runtime: carry the job out and keep what it came to."""
        try:
            with self._scope:
                self._result = await work()
                say(self._result)
        except SostenutoError as error:
            self._error = error
            with suppress(ConfigError):  # It may be the log that failed.
                say(JobFailed(self.name, type(error).__name__, str(error)))
        finally:
            self._over.set()
            self._announce()

    def _announce(self) -> None:
        news, self._news = self._news, anyio.Event()
        news.set()


class Runtime:
    """An async context manager.

    async with Runtime(RuntimeConfig(directory="runs/first")) as runtime:
        job = await runtime.submit(RLJob(...))
        async for event in job.events():
            ...
    """

    def __init__(self, config: RuntimeConfig | None = None, *, tap: Tap | None = None) -> None:
        """`tap` sees the bytes on the engines' sockets; for checks that compare records with them."""
        self.config = config or RuntimeConfig()
        self._tap = tap
        self._names: set[str] = set()
        self._desk: Desk | None = None
        """Of the last rollouts for a trainer of the user's."""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await self._open(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._group.cancel_scope.cancel()
        await self._stack.aclose()

    @property
    def ledger(self) -> LedgerStatistics:
        """The sums as they stand; they close at any moment."""
        return self._ledger.statistics()

    @property
    def directory(self) -> RunDirectory:
        return self._run

    async def submit(self, job: RLJob | EvalJob) -> JobHandle:
        """Start a job; ConfigError at once when it cannot run.

        In a directory that is taken up for the n-th time, `.n` is added to its name.
        """
        await _check(job)
        named = self._named(job)
        handle = JobHandle(named.name)
        say = self._logged(handle)

        async def work() -> JobResult:
            if isinstance(named, RLJob):
                return await self._careers.begin(named, say, given=job.name)
            return await assess(named, self._premises, say)

        self._group.start_soon(handle.run, work, say)
        return handle

    async def resume(
        self, job: RLJob, *, checkpoint: Path | None = None, or_begin: bool = False
    ) -> JobHandle:
        """Go on with a job of an earlier runtime in this directory, from its newest checkpoint or this one.

        `job`: as it was submitted.  What it had finished and not learnt from is used, the rest of what was
        under way is sampled anew; without a checkpoint it begins anew.  `or_begin`: submit it where no
        runtime has come so far.  ConfigError at once when there was no such job, or when the checkpoint is
        damaged or of another one.
        """
        if or_begin and not await self._careers.knows(job.name):
            return await self.submit(job)
        await _check(job)
        past = await self._careers.past(job, checkpoint)
        named = self._named(job)
        handle = JobHandle(named.name)
        say = self._logged(handle)

        async def work() -> JobResult:
            return await self._careers.go_on(named, past, say)

        self._group.start_soon(handle.run, work, say)
        return handle

    def rollouts(self, env: type[Environment[Any]] | RolloutJob, **job: Any) -> GroupStream:  # noqa: ANN401
        """Groups of finished programs for a trainer of your own, until the loop over them is left.

        `job`: what `RolloutJob` has beside the environment.  ConfigError at once when it cannot run; another
        one of this runtime has to be over first.  `publish` is the way back for your weights.
        """
        given = env if isinstance(env, RolloutJob) and not job else rollout_job(env, job)
        given.environment()
        given.model_folder()
        return GroupStream(Desk(given), self._start_rollouts)

    async def publish(self, weights: GivenTensors, *, trained: Iterable[Group] | None = None) -> Publication:
        """Bring the weights that were learnt from `rollouts` to every engine, and open them as a version.

        `weights`: a folder with *.safetensors, or tensors by the names of the model's state dict, which must
        not change meanwhile.  `trained`: the groups that they were learnt from; None: all that were handed
        out and have no outcome.  Programs that run go on and are sampled under the new version from then.
        ConfigError for weights that are not the model's, and nothing has changed.
        """
        if self._desk is None:
            raise ConfigError("publish: there are no rollouts; take groups from runtime.rollouts first")
        return await self._desk.publish(weights, trained)

    def reward(self, program_id: str, value: float, *, metrics: Mapping[str, float] | None = None) -> None:
        """The reward of a program that ended with `later()`, or will; the first one counts.

        ConfigError for a program that does not wait for one, or a number that is not finite.
        """
        self._premises.awaited.give(ProgramId(program_id), value, metrics or {})

    @property
    def awaiting_rewards(self) -> tuple[ProgramId, ...]:
        """Programs that have ended, and whose rewards are still to be given."""
        return self._premises.awaited.waiting

    async def _start_rollouts(self, desk: Desk) -> None:
        while self._desk is not None and not self._desk.over.is_set():
            if not self._desk.closing.is_set():
                raise ConfigError(
                    f"rollouts: those of job {self._desk.job.name!r} are open, and `publish` is theirs; "
                    "leave their loop or close them first, or use a runtime for each"
                )
            await self._desk.over.wait()
        desk.job = self._named(desk.job)
        self._desk = desk
        handle = JobHandle(desk.job.name)
        say = self._logged(handle)

        async def work() -> JobResult:
            return await desk.run(self._premises, say)

        self._group.start_soon(handle.run, work, say)

    @asynccontextmanager
    async def serve(self, job: ServeJob) -> AsyncGenerator[OpenGateway]:
        """A gateway in front of the job's engines, until the block is left; `url` is where it answers.

        ConfigError at once when it cannot run.  Its programs are in the ledger as served.
        """
        async with serving(self._named(job), self._premises) as gateway:
            yield gateway

    async def add_engine(self, engine: EngineEntry) -> None:
        """Give one more engine to the jobs that run and to those that come.

        ConfigError or EngineError, and nothing has changed, when it does not join a job that runs.
        """
        await self._premises.engines.add(engine)

    async def remove_engine(self, engine_id: str, *, within_s: float = 60.0) -> None:
        """Let an engine go, by the id of its entry.

        Nothing new starts there.  Turns that run may end within the deadline; what does not is done again
        elsewhere, with the same tokens.  ConfigError when it is not there, or the last one that serves.
        """
        await self._premises.engines.remove(engine_id, within_s=within_s)

    async def engines(self) -> list[EngineView]:
        """The engines of all jobs that run, as they stand."""
        return await self._premises.engines.view()

    async def _open(self, stack: AsyncExitStack) -> None:
        self._run = stack.enter_context(hold(Path(self.config.directory)))
        self._log = stack.enter_context(self._run.events.open("ab", buffering=0))
        self._journal = await stack.enter_async_context(open_journal(self._run.journal))
        self._epoch, self._number, self._ledger = _what_was_before(self._run)
        self._last_epoch = self._epoch
        self._settle(self._journal)
        tools = await stack.enter_async_context(open_tools(self.config, self._run))
        self._group: TaskGroup = await stack.enter_async_context(anyio.create_task_group())
        self._premises = Premises(
            config=self.config,
            run=self._run,
            journal=self._journal,
            ledger=self._ledger,
            tools=tools.server,
            isolation=tools.isolation,
            limiting=tools.limiting,
            new_version=partial(self._new_version, self._epoch),
            engines=EnginePool(self.config),
            tap=self._tap,
        )
        self._careers = Careers(self._premises, self._run, self._journal, self._new_epoch, self._new_version)
        await stack.enter_async_context(serve_control(self._run, self._premises.engines.view))

    def _named(self, job: J) -> J:
        """The job, under a name that none of the run has had; ConfigError for one that was used."""
        if job.name in self._names:
            raise ConfigError(f"job name {job.name!r} was used in this run before; give another name")
        self._names.add(job.name)
        # The programs of an earlier runtime keep their ids.
        return replace(job, name=f"{job.name}.{self._epoch}") if self._epoch else job

    def _settle(self, journal: Journal) -> None:
        """Enter what the last runtime's open programs have come to, and that this is a new epoch."""
        journal.write(FactStated(_EPOCH, str(self._epoch)))
        for program_id, outcome in cut_off_by_death(self._ledger).items():
            self._ledger.end(program_id, outcome)
            journal.write(ProgramEnded(program_id, outcome))

    def _new_epoch(self) -> int:
        self._last_epoch += 1
        self._journal.write(FactStated(_EPOCH, str(self._last_epoch)))
        return self._last_epoch

    def _new_version(self, epoch: int) -> Version:
        self._number += 1
        return Version(epoch, self._number)

    def _logged(self, handle: JobHandle) -> Say:
        def say(event: JobEvent) -> None:
            handle.say(event)
            at = datetime.now(UTC).isoformat(timespec="milliseconds")
            try:
                self._log.write(as_json(event, at=at) + b"\n")
            except OSError as error:
                raise ConfigError(f"{self._run.events}: {error.strerror}; free some of the disk") from error

        return say


async def _check(job: RLJob | EvalJob) -> None:
    job.environment()
    await to_thread.run_sync(ModelFolder.open, job.model_folder())
    if isinstance(job, RLJob):
        for part in job.mixed:
            part.environment()
        await to_thread.run_sync(check_tokenizers, job.model_folder(), job.teachers)


def _what_was_before(run: RunDirectory) -> tuple[int, int, Ledger]:
    """The new run epoch, the highest version number ever used, and the ledger.

    Checkpoints count too: the journal may be of another machine, and lack them.
    """
    with read_journal(run.journal) as reader:
        highest = reader.highest_version()
        epoch = int(reader.facts().get(_EPOCH, "-1")) + 1
        saved = [version.number for folder in run.checkpoints.iterdir() for version, _ in checkpoints(folder)]
        used = [*saved, *([highest.number] if highest else [])]
        return epoch, max(used, default=-1), reader.ledger()
