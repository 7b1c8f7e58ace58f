"""Programs whose agents come from elsewhere: they run in a host, and the gateway is their model.

- The program has its place in the scheduler before its environment is prepared, so that whatever bounds
  programs bounds these, too.
- The agent's one key opens the gateway while it runs, and nothing after it.
- However it ends, it holds nothing afterwards: no key, no call, no environment, no place, no KV.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from urllib.parse import urlsplit

import anyio

from sostenuto.errors import (
    EngineError,
    EnvironmentFailure,
    Overloaded,
    PolicyError,
    ProgramError,
    boundary,
)
from sostenuto.records import Trajectory, validate
from sostenuto.runtime.dispatcher import Dispatcher
from sostenuto.runtime.gateway.lane import Entrance
from sostenuto.runtime.gateway.opening import OpenGateway
from sostenuto.runtime.gateway.sessions import Resident
from sostenuto.runtime.gateway.terms import RoleTerms, Terms
from sostenuto.runtime.gateway.turn import Refused
from sostenuto.runtime.passage import lease_s_of, submitted_for
from sostenuto.runtime.place import Place
from sostenuto.runtime.program import ProgramSpec
from sostenuto.tools.wire import Reward
from sostenuto.types import CallId, Episode, ModelAccess, Outcome, OutcomeKind, StopReason, Usage

RUN = CallId("run")

_log = logging.getLogger(__name__)


class AgentRunner:
    """`run` has the shape of `Dispatcher.run`."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        gateway: OpenGateway,
        roles: Mapping[str, RoleTerms] | None = None,
    ) -> None:
        """`roles`: those that an agent may speak in, by name."""
        self._dispatcher = dispatcher
        self._gateway = gateway
        self._roles = dict(roles or {})

    async def run(self, spec: ProgramSpec) -> Trajectory:
        """Run one agent to its end.  Its failure is the outcome of the record, not an exception."""
        stay = _Stay(spec, self._dispatcher, self._gateway, self._roles)
        try:
            reward = await stay.run()
            trajectory = stay.record(stay.stop, reward)
            with boundary(EngineError, "the record is refused"):
                validate(trajectory)
        except ProgramError as error:
            outcome = Outcome(OutcomeKind.FAILED, str(error), error.blame)
            return replace(stay.record(StopReason.FAILED), outcome=outcome)
        return trajectory


class _Stay:
    """One program.  `run` once; then its record."""

    def __init__(
        self,
        spec: ProgramSpec,
        dispatcher: Dispatcher,
        gateway: OpenGateway,
        roles: Mapping[str, RoleTerms],
    ) -> None:
        self._spec = spec
        self._roles = roles
        self._dispatcher = dispatcher
        self._gateway = gateway
        self._tools = dispatcher.around.tools
        self._timeouts = dispatcher.around.timeouts
        self._place: Place | None = None
        """Until the session has it."""
        self._lost = ""
        self._needs_release = False
        self._resident: Resident | None = None
        self._usage = Usage()

    @property
    def stop(self) -> StopReason:
        """Why the agent has ended."""
        limit = self._resident.session.limit if self._resident else None
        return limit or StopReason.ANSWERED

    async def run(self) -> Reward:
        """What the agent returned; ProgramError when it fails."""
        with anyio.CancelScope() as scope:
            try:
                await self._enter(scope.cancel)
                await self._prepare()
                return await self._scored()
            finally:
                await self._close()
        raise EngineError(self._lost)

    def record(self, stop: StopReason, reward: Reward | None = None) -> Trajectory:
        """The record as it stands; also of a program that failed half way."""
        spec = self._spec
        if self._resident is None:
            return Trajectory(
                program_id=spec.id, group_id=spec.group_id, task_id=spec.task_id, purpose=spec.purpose,
                sequences=(), reward=None, stop_reason=stop, usage=self._usage, metrics={"turns": 0.0},
            )  # fmt: skip
        found = self._resident.session.trajectory(
            task_id=spec.task_id, group_id=spec.group_id, reward=reward.value if reward else None, stop=stop
        )
        metrics = {**found.metrics, **(reward.metrics if reward else {})}
        return replace(found, metrics=metrics, usage=found.usage + self._usage)

    async def _enter(self, cancel: Callable[[], None]) -> None:
        """Take a place, and wait until the scheduler wants the environment; Overloaded when it is full."""

        def lost(reason: str) -> None:
            self._lost = reason
            cancel()

        began_s = self._dispatcher.around.now_s()
        self._place = self._dispatcher.admit(submitted_for(self._spec, self._lease_s()), lost)
        await self._place.grant()
        self._usage += Usage(queue_s=self._dispatcher.around.now_s() - began_s)

    async def _prepare(self) -> None:
        began_s = self._dispatcher.around.now_s()
        self._needs_release = True
        await self._tools.prepare(
            self._spec.id,
            self._spec.environment.model_copy(update={"gateway": urlsplit(self._gateway.url).netloc}),
            self._spec.task,
            seed=self._spec.environment_seed,
            timeout_s=self._timeouts.prepare_s,
        )
        self._usage += Usage(environment_s=self._dispatcher.around.now_s() - began_s)

    async def _scored(self) -> Reward:
        """Let the agent run, and say whose fault it is when nothing comes of it."""
        resident = self._resident = self._open()
        session = resident.session
        episode = Episode(
            (), StopReason.ANSWERED, seed=self._spec.environment_seed, model=self._access(resident)
        )
        try:
            reward = await self._in_time(episode)
        except EnvironmentFailure as error:
            if session.failure is not None:
                raise EngineError(f"{error}; a call of its model had failed: {session.failure}") from error
            if session.limit is not None:
                raise PolicyError(f"{error}; it had come to its limit ({session.limit})") from error
            raise
        if session.failure is not None:
            raise EngineError(f"a call of the agent's model failed: {session.failure}")
        if not session.calls:
            raise EnvironmentFailure(
                f"agent {self._spec.environment.name} ended without a call of its model; let it call "
                "`base_url` with `api_key`"
            )
        return reward

    async def _in_time(self, episode: Episode) -> Reward:
        """The tool server's own deadline is later.

        An agent in a thread, which nothing can cancel, then has the time to see that its key is over.
        """
        wall_s = self._spec.limits.wall_s
        with anyio.move_on_after(wall_s):
            return await self._tools.reward(
                self._spec.id, RUN, episode, timeout_s=wall_s + self._timeouts.call_margin_s
            )
        raise EnvironmentFailure(
            f"agent {self._spec.environment.name}: took longer than {wall_s:g} s; raise limits.wall_s"
        )

    def _open(self) -> Resident:
        assert self._place is not None, "it was entered"
        entrance = Entrance(submitted_for(self._spec, self._lease_s()), self._place)
        spec = self._spec
        terms = Terms(
            spec.purpose, spec.temperature, spec.seed, spec.limits, spec.routed_experts, self._roles
        )
        try:
            resident = self._gateway.sessions.open(spec.id, terms, id_=spec.id, entrance=entrance)
        except Refused as error:
            raise Overloaded(str(error)) from error
        self._place = None
        return resident

    def _access(self, resident: Resident) -> ModelAccess:
        key = self._gateway.keys.mint(resident.name)
        return ModelAccess(f"{self._gateway.url}/v1", key, self._spec.limits.wall_s)

    async def _close(self) -> None:
        """Give everything back, the place last.  Shielded, bounded."""
        if self._resident is not None:
            self._gateway.keys.program_over(self._resident.name)
            with anyio.move_on_after(self._timeouts.release_s, shield=True):
                await self._resident.session.stop()
        with anyio.move_on_after(self._timeouts.release_s, shield=True):
            await self._release_environment()
        if self._resident is not None:
            self._gateway.sessions.end(self._resident)
        if self._place is not None:
            self._place.leave()

    async def _release_environment(self) -> None:
        if not self._needs_release:
            return
        try:
            await self._tools.release(self._spec.id)
        except ProgramError as error:
            # It comes back when its lease ends.
            _log.warning("environment of %s was not given back: %s", self._spec.id, error)

    def _lease_s(self) -> float:
        return lease_s_of(self._spec, self._timeouts)
