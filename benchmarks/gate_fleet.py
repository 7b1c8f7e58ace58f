"""A fleet in which one engine is slow and one fails, watched from inside its engines.

The real dispatcher and scheduler run it on virtual time.  What is counted is seen where requests arrive and
where answers leave, not told by the gate; that is only asked what it says is deployed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from sostenuto.errors import EngineError
from sostenuto.runtime.engines.wire import FinishReason, GenerateReply, GenerateRequest, Spans
from sostenuto.runtime.simulation.clock import Clock
from sostenuto.runtime.simulation.dispatched.engine import DispatchedEngine
from sostenuto.runtime.simulation.dispatched.run import Publications, simulate_dispatched
from sostenuto.runtime.simulation.dispatched.script import Stage
from sostenuto.runtime.simulation.dispatched.transfer import Transfer
from sostenuto.runtime.simulation.engine import SimulatedEngine
from sostenuto.runtime.simulation.plan import Plan, PlannedTurn, Workload
from sostenuto.runtime.simulation.profile import EngineProfile, FleetProfile
from sostenuto.runtime.simulation.results import RunResult
from sostenuto.scheduler.actions import Action, Opened
from sostenuto.scheduler.events import Event
from sostenuto.scheduler.gate import Gate
from sostenuto.scheduler.kv import Segment
from sostenuto.scheduler.scheduler import Scheduler
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.scheduler.update_terms import UpdateTerms
from sostenuto.types import EngineId, GroupId, ProgramId, Version

STAGE_S, SWAP_S = 0.5, 0.05
SLOW, FAILS = 10.0, 0.3
EVERY_S = 2.0


@dataclass(slots=True)
class Seen:
    """What engines saw."""

    requests: int = 0
    unverified: int = 0
    """Requests that an engine was given while what it had was not verified."""
    unopened: int = 0
    """Requests that were given to an engine with a version that had not opened."""
    behind: int = 0
    """Requests for an older version than the deployed one, by programs that are not pinned to it."""
    pinned: int = 0
    """Requests of programs that are."""
    misstamped: int = 0
    """Spans of a version that their engine did not have between request and reply, or out of order."""
    went_back: int = 0
    """Versions that an engine, the gate or a program that is not pinned saw after a newer one."""
    interrupted: int = 0
    opened: int = 0
    failures: int = 0
    late: dict[EngineId, int] = field(default_factory=dict[EngineId, int])
    """How often a version opened without the engine."""
    _of_engine: dict[EngineId, Version] = field(default_factory=dict[EngineId, Version], repr=False)
    _of_program: dict[ProgramId, Version] = field(default_factory=dict[ProgramId, Version], repr=False)
    _opened: Version | None = field(default=None, repr=False)

    def arrives(self, engine: "WatchedEngine", request: GenerateRequest, deployed: Version) -> None:
        version = engine.version
        is_pinned = request.exact_version == str(version)
        self.requests += 1
        self.unverified += not engine.is_verified
        self.unopened += version > deployed
        self.behind += version < deployed and not is_pinned
        self.pinned += is_pinned
        self.went_back += version < self._of_engine.get(engine.engine_id, version)
        self._of_engine[engine.engine_id] = version

    def leaves(
        self, engine: "WatchedEngine", request: GenerateRequest, reply: GenerateReply, before: Version
    ) -> None:
        versions = [Version.parse(span.version) for span in reply.versions]
        ordered = all(one < other for one, other in pairwise(versions))
        within = all(before <= version <= engine.version for version in versions)
        covered = sum(span.end - span.start for span in reply.versions) == len(reply.token_ids)
        self.misstamped += not (ordered and within and covered)
        self.interrupted += reply.finish_reason is FinishReason.ABORT
        program = ProgramId(request.program_id)
        if versions and request.exact_version is None:
            self.went_back += versions[0] < self._of_program.get(program, versions[0])
            self._of_program[program] = versions[-1]

    def opens(self, version: Version, behind: list[EngineId]) -> None:
        self.opened += 1
        self.went_back += self._opened is not None and version <= self._opened
        self._opened = version
        for engine_id in behind:
            self.late[engine_id] = self.late.get(engine_id, 0) + 1


class WatchedEngine(DispatchedEngine):
    """Tells what arrives and what leaves."""

    seen: Seen
    deployed: Callable[[], Version]

    def __init__(
        self, engine: SimulatedEngine, stage: Stage, clock: Clock, transfer: Transfer | None = None
    ) -> None:
        super().__init__(engine, stage, clock, transfer)
        self._simulated = engine

    @property
    def engine_id(self) -> EngineId:
        return self._simulated.id

    @property
    def version(self) -> Version:
        return self._simulated.version

    async def generate(self, request: GenerateRequest, *, spans: Spans | None = None) -> GenerateReply:
        before = self.version
        self.seen.arrives(self, request, self.deployed())
        reply = await super().generate(request, spans=spans)
        self.seen.leaves(self, request, reply, before)
        return reply


class _Watched(Scheduler):
    """Tells what opens."""

    def __init__(self, seen: Seen) -> None:
        super().__init__(SchedulerSettings(live_programs=64, prepare_ahead=64))
        self._seen = seen

    def apply(self, event: Event, now_s: float) -> list[Action]:
        actions = super().apply(event, now_s)
        for action in actions:
            if isinstance(action, Opened):
                late = [engine_id for engine_id in self._engines if not self.gate.serves(engine_id)]
                self._seen.opens(action.version, [e for e in late if self.gate.version(e) is not None])
        return actions


class _Open(Gate):
    """Lets everything start everywhere."""

    def may_start(self, engine_id: EngineId) -> bool:
        return engine_id in self.states()


def watched(
    terms: UpdateTerms, count: int, *, transfers: dict[int, Transfer], gated: bool = True, seed: int = 0
) -> tuple[Seen, RunResult]:
    """An engine for each transfer, and so many publications.

    `gated`: False for a gate that is always open, which has to be found out.
    """
    seen = Seen()
    policy = _Watched(seen)
    if not gated:
        policy.gate = _Open()
    engine = type("Engine", (WatchedEngine,), {"seen": seen, "deployed": staticmethod(_deployed(policy))})
    result = simulate_dispatched(
        policy,
        _workload(seed),
        _fleet(len(transfers)),
        grain=1,
        publications=Publications(EVERY_S, terms, transfers, count, engine),
    )
    seen.failures = sum(transfer.failures for transfer in transfers.values())
    return seen, result


def slow_and_failing(seed: int = 0) -> dict[int, Transfer]:
    """One engine that is quick, one that is slow by ten, one that fails at a random chunk or in the swap."""
    return {0: Transfer(), 1: Transfer(slowness=SLOW), 2: Transfer(fails=FAILS, seed=seed)}


def quantizing() -> dict[int, Transfer]:
    """One engine that takes weights as they are, one that converts and quantizes what it gets."""
    return {0: Transfer(), 1: Transfer(slowness=3.0)}


def _deployed(policy: Scheduler) -> Callable[[], Version]:
    def deployed() -> Version:
        version = policy.gate.deployed
        if version is None:
            raise EngineError("no engine has joined")
        return version

    return deployed


def _fleet(engines: int) -> FleetProfile:
    return FleetProfile(
        engines=engines,
        engine=EngineProfile(
            name="small", kv_tokens=4096, concurrency=8, prefill_tokens_s=2000.0,
            itl_s=((1, 0.02), (8, 0.03)), stage_s=STAGE_S, swap_s=SWAP_S,
        ),
    )  # fmt: skip


def _workload(seed: int) -> Workload:
    """Turns of half a second to two, tools of one to nine: some of them act through several versions."""
    system = Segment("system", 64)
    plans = tuple(
        Plan(
            ProgramId(f"p{n}"), GroupId(f"g{n // 4}"), 4, (system,), 32 + n,
            (
                PlannedTurn(20 + 7 * (n % 5), "bash", 1.0 + (n + seed) % 4, 16),
                PlannedTurn(30 + 11 * (n % 3), "bash", 2.0 + n % 8, 24),
                PlannedTurn(25),
            ),
        )
        for n in range(24)
    )  # fmt: skip
    return Workload("watched", plans, concurrency=10)
