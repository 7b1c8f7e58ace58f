"""One cell of a sweep: a policy on programs, engines, a size of pool, a seed.  It knows of no other cell."""

from dataclasses import dataclass, field
from enum import StrEnum

from sostenuto.errors import ConfigError
from sostenuto.runtime.bench.alone import alone_s
from sostenuto.runtime.bench.comparison import ENDLESS, RATIO
from sostenuto.runtime.bench.source import Source, expected_concurrency
from sostenuto.runtime.bench.summary import UNKNOWN, Measured, summarize
from sostenuto.runtime.simulation.bounds import lower_bound
from sostenuto.runtime.simulation.plan import Plan, Workload
from sostenuto.runtime.simulation.profile import FleetProfile
from sostenuto.runtime.simulation.program import turn_limit_tokens
from sostenuto.runtime.simulation.workloads import working_set_tokens
from sostenuto.runtime.simulation.world import simulate
from sostenuto.scheduler.frame import Frame
from sostenuto.scheduler.kv import Footprint, KvLedger
from sostenuto.scheduler.policies import make_policy
from sostenuto.scheduler.scheduler import Scheduler
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.types import ProgramId

ENDLESS_TOKENS = 1 << 40
CLAIRVOYANT = "clairvoyant"
"""Our policy, told how long each tool call will take: no competitor, as nobody can know."""


class Pool(StrEnum):
    """Sizes of pool that are no ratio."""

    ENDLESS = ENDLESS
    OWN = "own"
    """As the profile says."""


Ratio = float | Pool
"""Of the working set to the KV of all engines."""


@dataclass(frozen=True, slots=True)
class Cell:
    source: Source
    policy: str
    fleet: FleetProfile
    ratio: Ratio
    seed: int
    notes: dict[str, str] = field(default_factory=dict[str, str])
    """Settings that say what this run is in its place, such as a try of a swept policy."""
    timeline: bool = False
    """Whether curves over time and programs' phases are kept."""

    def __str__(self) -> str:
        where = [f"{name} {value}" for name, value in self.settings.items() if name not in self.notes]
        return ", ".join([self.source.name, self.policy, *where, f"seed {self.seed}"])

    @property
    def settings(self) -> dict[str, str]:
        ratio = self.ratio.value if isinstance(self.ratio, Pool) else f"{self.ratio:g}"
        return {**self.source.settings, RATIO: ratio, **self.notes}


def run_cell(cell: Cell) -> Measured:
    workload = cell.source.load(cell.seed)
    fleet = fleet_of(cell, workload)
    policy = policy_of(cell.policy, workload)
    run = simulate(policy, workload, fleet, seed=cell.seed, timeline=cell.timeline, series=cell.timeline)
    run.policy, run.workload, run.settings = cell.policy, cell.source.name, cell.settings
    if isinstance(policy, Scheduler):
        run.worst_bound_s = policy.patience.longest_bound_s or UNKNOWN
    bound = lower_bound(workload, fleet)
    times_s = alone_s(workload, fleet.engine)
    return Measured(run, summarize(run, times_s, lower_bound_mean_s=bound.mean_completion_s))


def fleet_of(cell: Cell, workload: Workload) -> FleetProfile:
    """The cell's fleet with pools of the size that its ratio asks for."""
    if cell.ratio is Pool.OWN:
        return cell.fleet
    tokens = ENDLESS_TOKENS
    if not isinstance(cell.ratio, Pool):
        live = expected_concurrency(workload, cell.fleet)
        tokens = round(working_set_tokens(workload, live) / cell.ratio / cell.fleet.engines)
    engine = cell.fleet.engine.model_copy(update={"kv_tokens": max(1, tokens)})
    return cell.fleet.model_copy(update={"engine": engine})


def policy_of(name: str, workload: Workload) -> Frame:
    """A new policy.  Programs are held back by no limit on environments, lest that decides in its place."""
    settings = SchedulerSettings(live_programs=max(SchedulerSettings().live_programs, len(workload.programs)))
    if name == CLAIRVOYANT:
        return Scheduler(settings, foresight=_Plans(workload))
    return make_policy(name, settings)


def check_that_programs_fit(cell: Cell) -> None:
    """Raise ConfigError when a program could never run on any of the cell's engines."""
    workload = cell.source.load(cell.seed)
    engine = fleet_of(cell, workload).engine
    pool = KvLedger(engine.kv_tokens, block_tokens=engine.block_tokens)
    for plan in workload.programs:
        most = most_kv(plan)
        if not pool.could_ever_hold(most):
            raise ConfigError(
                f"{cell.source.name}: program {plan.id} (seed {cell.seed}) needs {most.tokens} tokens of KV,"
                f" and an engine at ratio {cell.settings[RATIO]} has {engine.kv_tokens}; {_remedy(cell)}"
            )


def most_kv(plan: Plan) -> Footprint:
    """The most that any turn of the program asks for."""
    own, most = plan.prompt_tokens, 0
    for turn in plan.turns:
        most = max(most, own + turn_limit_tokens(turn.output_tokens))
        own += turn.output_tokens + turn.result_tokens
    return Footprint(most, plan.shared)


def _remedy(cell: Cell) -> str:
    if cell.ratio is Pool.OWN:
        return "take a profile with a larger pool, or leave that program out"
    return "lower the ratio, raise the concurrency, or take fewer engines"


class _Plans:
    """Foresight: reads it in the plans."""

    def __init__(self, workload: Workload) -> None:
        self._tool_s = {plan.id: [turn.tool_s for turn in plan.turns] for plan in workload.programs}

    def tool_s(self, program_id: ProgramId, turn: int) -> float:
        """`turn` counts from 1."""
        return self._tool_s[program_id][turn - 1]
