"""Groups for a trainer that is not ours, and the way back for its weights.

Invariants:
- A group that was handed out ends in the ledger once: as trained or as dropped, however the consumer ends.
- Groups are handed out within the staleness bound, and none is trained beyond it.
- What the consumer waits for when the job breaks is the job's error.
- A consumer that lets go of its `GroupStream` lets the job end.
"""

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import fields
from types import TracebackType
from typing import Any, Protocol, Self, cast

import anyio
from anyio import to_thread

from sostenuto.envs.environment import Environment
from sostenuto.errors import ConfigError, SostenutoError, lone_error, nearest
from sostenuto.runtime.given_weights import GivenTensors, GivenWeights
from sostenuto.runtime.jobs.diary import Diary
from sostenuto.runtime.jobs.events import JobResult, JobStarted, Published
from sostenuto.runtime.jobs.group import Group
from sostenuto.runtime.jobs.group_rewards import judge_of
from sostenuto.runtime.jobs.job import RolloutJob
from sostenuto.runtime.jobs.plan import plan_of_rollouts
from sostenuto.runtime.jobs.supply import GroupSupply
from sostenuto.runtime.jobs.workshop import Premises, Say, Workshop, open_workshop
from sostenuto.runtime.publishing import Publication
from sostenuto.runtime.reward_models import open_reward_models
from sostenuto.trainer.buffer import ReadyGroup
from sostenuto.trainer.publication.manifest import Manifest
from sostenuto.types import Version

NOT_USED = "not_used"
_CLOSED = "the rollouts are closed; call runtime.rollouts again"


class Writer(Protocol):
    """Makes publications of weights.  Blocking."""

    def write(self, weights: GivenTensors, version: Version) -> Manifest: ...

    def close(self) -> None: ...


class Desk:
    """Where a job that samples and the one who learns meet.  One for each job."""

    def __init__(self, job: RolloutJob) -> None:
        self.job = job
        self.opened = anyio.Event()
        """Groups can be taken, or nothing will come."""
        self.closing = anyio.Event()
        self.over = anyio.Event()
        self._error: SostenutoError | None = None
        self._turn = anyio.Lock()
        self._waiting = False
        self._published = 0
        self._trained: list[ReadyGroup] = []
        """Since the last publication."""

    async def run(self, premises: Premises, say: Say) -> JobResult:
        """Sample until the consumer has gone."""
        try:
            return await self._run(premises, say)
        except SostenutoError as error:
            self._error = error
            raise
        finally:
            self._error = self._error or ConfigError(_CLOSED)
            if self.opened.is_set():
                self._supply.broken(self._error)
            self.opened.set()
            self.over.set()

    async def _run(self, premises: Premises, say: Say) -> JobResult:
        job, diary = self.job, Diary(anyio.current_time())
        with lone_error():
            async with (
                open_reward_models(job, premises) as scored,
                open_workshop(
                    scored,
                    job,
                    at_update=job.update_terms,
                    agents=job.agents,
                    roles=job.roles,
                    around=premises.awaiting(job.late_rewards, say),
                ) as shop,
            ):
                say(
                    JobStarted(job.name, str(job.model_folder()), shop.dispatcher.version, premises.isolation)
                )
                place, dtype = premises.run.path / "published", premises.config.engine.dtype
                await self.serve(shop, GivenWeights(job.model_folder(), place, dtype), say)
                return diary.result(
                    job.name,
                    shop.dispatcher.version,
                    premises.ledger.statistics(),
                    tuple(shop.rollouts.quarantined),
                    ended_s=anyio.current_time(),
                )

    async def serve(self, shop: Workshop, weights: Writer, say: Say) -> None:
        """Keep groups in flight until the consumer has gone; then end what has no outcome."""
        self._shop, self._weights, self._say = shop, weights, say
        self._supply = GroupSupply(
            plan_of_rollouts(self.job), shop.rollouts, lambda: shop.dispatcher.version, say,
            judge=judge_of({self.job.env.__name__: self.job.group_rewards}, shop.renderer),
            inspect=shop.oldest_of,
        )  # fmt: skip
        try:
            async with anyio.create_task_group() as generation:
                generation.start_soon(self._supply.generate)
                self.opened.set()
                with shop.rollouts.ended_by_errors():
                    await self.closing.wait()
                shop.rollouts.cancelled_by = "job_over"
                generation.cancel_scope.cancel()
        finally:
            self.closing.set()
            self._supply.close(NOT_USED)
            with anyio.CancelScope(shield=True):
                async with self._turn:
                    await to_thread.run_sync(self._weights.close)

    # ---- for the consumer ----

    @property
    def version(self) -> Version:
        """What is deployed."""
        self._check_open()
        return self._shop.dispatcher.version

    async def take(self) -> ReadyGroup | None:
        """The next group; None when the tasks are used up."""
        if self._waiting:
            raise ConfigError(
                f"rollouts {self.job.name!r}: two tasks wait for groups of one job; let one take them and "
                "share them out"
            )
        self._waiting = True
        try:
            await self.opened.wait()
            self._check_open()
            return await self._supply.next_group()
        finally:
            self._waiting = False

    def commit(self, groups: Sequence[ReadyGroup]) -> None:
        self._check_in_hand(groups)
        self._check_fresh(groups)
        self._supply.trained(groups)
        self._trained += groups

    def abandon(self, group: ReadyGroup, reason: str) -> None:
        self._check_in_hand([group])
        self._supply.dropped(group, reason)

    async def publish(self, weights: GivenTensors, trained: Iterable[Group] | None) -> Publication:
        async with self._turn:
            self._check_open()
            groups = self._supply.in_hand if trained is None else [group.ready for group in trained]
            self._check_in_hand(groups)
            self._check_fresh(groups)
            # To the end, so that groups and version agree however the caller ends.
            done: list[Publication] = []
            with anyio.CancelScope(shield=True):
                done.append(await self._publish(weights, groups))
            return done[0]

    async def _publish(self, weights: GivenTensors, groups: Sequence[ReadyGroup]) -> Publication:
        deployed, version = self.version, self._shop.premises.new_version()
        manifest = await to_thread.run_sync(self._weights.write, weights, version)
        self._check_open()
        publication = await self._shop.publish(manifest, step=self._published + 1)
        self._note(groups, publication, deployed)
        return publication

    def _note(self, groups: Sequence[ReadyGroup], publication: Publication, deployed: Version) -> None:
        # A job that broke meanwhile has ended what was in hand.
        here = {group.group_id for group in self._supply.in_hand}
        groups = [group for group in groups if group.group_id in here]
        self._supply.trained(groups)
        self._supply.deployed()
        self._published += 1
        trained, self._trained = [*self._trained, *groups], []
        members = [member for group in trained for member in group.members]
        staleness = [member.staleness(deployed) for member in members]
        rewards = [member.reward or 0.0 for member in members]
        self._say(
            Published(
                step=self._published,
                version=publication.version,
                groups=len(trained),
                reward=sum(rewards) / len(rewards) if rewards else None,
                staleness_mean=sum(staleness) / len(staleness) if staleness else None,
                staleness_max=max(staleness, default=None),
                pause_s=publication.pause_s,
            )
        )

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error
        if not self.opened.is_set():
            raise ConfigError(f"rollouts {self.job.name!r}: nothing was taken yet; take a group first")
        if self.closing.is_set():
            raise ConfigError(_CLOSED)

    def _check_in_hand(self, groups: Sequence[ReadyGroup]) -> None:
        self._check_open()
        here = {group.group_id for group in self._supply.in_hand}
        if gone := [group.group_id for group in groups if group.group_id not in here]:
            raise ConfigError(f"group {gone[0]}: has its outcome already; leave it out")

    def _check_fresh(self, groups: Sequence[ReadyGroup]) -> None:
        deployed, bound = self.version, self.job.max_staleness
        for group in groups:
            staleness = deployed.number - group.oldest_version.number
            if staleness > bound:
                raise ConfigError(
                    f"group {group.group_id}: is {staleness} versions old by now, max_staleness is {bound}; "
                    "drop it, and learn from a group before two more publications"
                )


class GroupStream:
    """The groups of one job, as an async iterator; also a context manager, which ends the job.

    async for group in runtime.rollouts(Ledger, model=..., tasks=...):
        ...
    """

    def __init__(self, desk: Desk, start: Callable[[Desk], Awaitable[None]]) -> None:
        """`start` submits the job."""
        self._desk = desk
        self._start = start
        self._started = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Group:
        await self._begin()
        ready = await self._desk.take()
        if ready is None:
            raise StopAsyncIteration
        return Group(ready, self._desk)

    async def __aenter__(self) -> Self:
        await self._begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def version(self) -> Version:
        """What is deployed.  ConfigError before the first group."""
        return self._desk.version

    async def publish(self, weights: GivenTensors, *, trained: Iterable[Group] | None = None) -> Publication:
        """As `Runtime.publish`."""
        return await self._desk.publish(weights, trained)

    async def aclose(self) -> None:
        """End the job: what was handed out and has no outcome is dropped.  Idempotent."""
        self._desk.closing.set()
        if self._started:
            with anyio.CancelScope(shield=True):
                await self._desk.over.wait()

    async def _begin(self) -> None:
        if self._started:
            return
        self._started = True
        await self._start(self._desk)
        _close_with(self, self._desk)


def rollout_job(env: object, fields_given: dict[str, Any]) -> RolloutJob:
    """ConfigError for a field that there is not, or a missing one."""
    known = {field.name: field for field in fields(RolloutJob)}
    if unknown := [name for name in fields_given if name not in known]:
        raise ConfigError(f"rollouts: no field {unknown[0]!r}; {nearest(unknown[0], list(known))}")
    if missing := [name for name in ("model", "tasks") if name not in fields_given]:
        raise ConfigError(f"rollouts: {missing[0]} is missing; give {missing[0]}=...")
    if isinstance(env, RolloutJob):
        raise ConfigError("rollouts: give a RolloutJob, or an environment and the job's fields, not both")
    return RolloutJob(env=cast("type[Environment[Any]]", env), **fields_given)


def _close_with(stream: GroupStream, desk: Desk) -> None:
    """Let the job end when nobody holds the stream any more, in whichever thread that is found out."""
    loop = asyncio.get_running_loop()

    def close() -> None:
        with suppress(RuntimeError):  # The loop is over, and with it the job.
            loop.call_soon_threadsafe(desk.closing.set)

    weakref.finalize(stream, close).atexit = False
