"""Workloads drawn from what was published about agents.  The same seed gives the same programs.

| name           | turns           | prefix                       | tools and environment              |
|----------------|-----------------|------------------------------|------------------------------------|
| `swe-light`    | mean 30, <= 150 | 3k of all, 2k of a group     | coding tools; ready in 3 to 26 s   |
| `swe-heavy`    | mean 64, <= 100 | 15k of all, 2k of a group    | coding tools; median 23 s, <= 97 s |
| `rl-groups`    | mean 16, <= 25  | 3k of all, 8k of a group     | coding tools; ready in 3 to 26 s   |
| `remote-tools` | 15              | 3k of all, 500 of its own    | rate-limited services; no sandbox  |

Groups are of 8 unless another size is asked for.
Coding tools follow TraceLab (arXiv 2606.30560): half of all calls are over in 0.3 s, a tenth takes more
than 14 s and one in thirty more than a minute, and these hold most of the time.  They are cut at an hour,
which takes a quarter off their published mean.  What a coding tool appends has the published median of 260
tokens with the calls that append nothing counted in, and 354 without them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sostenuto.errors import ConfigError, nearest
from sostenuto.runtime.simulation.distributions import (
    Constant,
    Law,
    LogNormal,
    Mixture,
    Tool,
    ToolCalls,
    Uniform,
)
from sostenuto.runtime.simulation.plan import Plan, PlannedTurn, Workload
from sostenuto.runtime.simulation.profile import FleetProfile
from sostenuto.scheduler.events import NO_CLAIM, SandboxClaim
from sostenuto.scheduler.kv import Segment
from sostenuto.types import GroupId, ProgramId

MIB = 1 << 20
TOOL_LIMIT_S = 3600.0
_NOTHING = Constant(0.0)

CODING_SECONDS = Mixture(
    (
        (0.908, LogNormal(0.21, 2.96, high=TOOL_LIMIT_S)),
        (0.092, LogNormal(5.9, 1.86, high=TOOL_LIMIT_S)),
    )
)
CODING_TOOLS = ToolCalls(
    CODING_SECONDS,
    (
        Tool("read", 0.28, LogNormal(0.036, 1.7)),
        Tool("search", 0.10, LogNormal(0.12, 1.6)),
        Tool("edit", 0.12, LogNormal(0.095, 1.5)),
        Tool("bash", 0.41, LogNormal(0.41, 2.2)),
        Tool("test", 0.09, LogNormal(22.0, 2.0)),
    ),
)
"""Medians of `read`, `edit` and `bash` near the published ones; test runs, there a part of `bash`, are a
tool of their own: they are one call in eight and four in five of those that take more than a minute."""

REMOTE_TOOLS = ToolCalls(
    LogNormal(10.0, 1.288, high=TOOL_LIMIT_S),
    (
        Tool("search", 0.50, LogNormal(6.0, 0.9)),
        Tool("browse", 0.35, LogNormal(12.0, 1.0)),
        Tool("ask", 0.15, LogNormal(45.0, 1.0)),
    ),
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """The laws of one workload's programs."""

    turns: Law
    all_tokens: int
    """Prefix that every program has in common."""
    task_tokens: int
    """Prompt of the task: common to a group, or its own where a group is one program."""
    result_tokens: Law
    output_tokens: Law
    calls: ToolCalls
    group_size: int = 1
    empty_results: float = 0.12
    """Share of tool calls that append nothing."""
    prepare_s: Law = _NOTHING
    memory_bytes: int = 0
    disk_bytes: Law = _NOTHING
    spike_bytes: Law = _NOTHING
    cpus: float = 0.0
    tool_concurrency: Mapping[str, int] = field(default_factory=dict[str, int])


_CODING = Recipe(
    turns=LogNormal.with_mean(30, 0.6, low=1, high=150),
    all_tokens=3000,
    task_tokens=2000,
    result_tokens=LogNormal(354, 1.8, low=1, high=32_768),
    output_tokens=LogNormal(215, 1.15, low=1, high=16_384),
    calls=CODING_TOOLS,
    group_size=8,
    prepare_s=Uniform(3, 26),
    memory_bytes=185 * MIB,
    disk_bytes=Constant(1024 * MIB),
    spike_bytes=Constant(500 * MIB),
    cpus=1.0,
)

WORKLOADS: Mapping[str, Recipe] = {
    "swe-light": _CODING,
    "swe-heavy": replace(
        _CODING,
        turns=LogNormal.with_mean(64, 0.5, low=1, high=100),
        all_tokens=15_000,
        prepare_s=LogNormal(23, 0.53, high=97),
        disk_bytes=LogNormal.with_mean(4200 * MIB, 0.6, low=2970 * MIB, high=17_700 * MIB),
        spike_bytes=LogNormal(1414 * MIB, 0.8, low=500 * MIB, high=4096 * MIB),
    ),
    "rl-groups": replace(_CODING, turns=LogNormal.with_mean(16, 0.5, low=1, high=25), task_tokens=8000),
    "remote-tools": Recipe(
        turns=Constant(15),
        all_tokens=3000,
        task_tokens=500,
        result_tokens=LogNormal.with_mean(3000, 0.8, low=1, high=32_768),
        output_tokens=LogNormal.with_mean(300, 1.15, low=1, high=16_384),
        calls=REMOTE_TOOLS,
        empty_results=0.0,
        tool_concurrency={"search": 32, "browse": 32, "ask": 32},
    ),
}

_OWN_TOKENS = 16
"""What tells the prompts of one group's members apart."""


def generate(
    name: str,
    *,
    programs: int,
    seed: int,
    group_size: int | None = None,
    concurrency: int | None = None,
    arrival_rate_s: float | None = None,
    order_seed: int | None = None,
) -> Workload:
    """So many programs of the workload `name`, closed (`concurrency`) or open (`arrival_rate_s`).

    Program number i depends on `seed` and i alone: more programs or another order change none of them.
    A group's members come one right after the other, and in an open workload at the same moment: groups
    then arrive as a Poisson process, the first at 0 s, at `arrival_rate_s` programs a second.
    `order_seed` permutes the groups, and the members in each.  `group_size` None is the workload's own; the
    last group may be smaller.
    """
    recipe = _recipe(name)
    size = recipe.group_size if group_size is None else group_size
    _check(name, programs=programs, group_size=size, concurrency=concurrency, arrival_rate_s=arrival_rate_s)
    groups = [range(first, min(first + size, programs)) for first in range(0, programs, size)]
    plans = [[_plan(name, recipe, seed, index, group) for index in group] for group in groups]
    if order_seed is not None:
        plans = _permuted(plans, np.random.default_rng(order_seed))
    if arrival_rate_s is not None:
        plans = _arriving(plans, arrival_rate_s / size, np.random.default_rng((seed, programs)))
    ordered = tuple(plan for group in plans for plan in group)
    return Workload(name, ordered, concurrency, dict(recipe.tool_concurrency))


def working_set_tokens(workload: Workload, concurrency: int | None = None) -> float:
    """KV that `concurrency` programs of the workload need to keep, so that nothing is ever recomputed.

    The context at the end of a turn, averaged over all turns of all programs (a slot of a closed workload
    is in each of them about equally long), times the concurrency.  A prefix that k programs have in
    common counts as 1 / min(k, concurrency) of its tokens for each of them: what all have in common
    counts once, and a group's prefix once for as many groups as are live when they come one after
    another.  None: the workload's own concurrency.  Divided by the pool it is the working-set ratio.
    """
    concurrency = concurrency or workload.concurrency
    if concurrency is None:
        raise ConfigError(f"{workload.name}: an open workload has no concurrency; give one to size it by")
    live = min(concurrency, len(workload.programs))
    holders = Counter(segment.key for plan in workload.programs for segment in plan.shared)
    turns = tokens = 0.0
    for plan in workload.programs:
        shared = sum(segment.tokens / min(holders[segment.key], live) for segment in plan.shared)
        turns += len(plan.turns)
        tokens += shared * len(plan.turns) + _private_tokens(plan)
    return live * tokens / turns


def unavoidable(workload: Workload) -> int:
    """Tokens that have to be prefilled whatever the policy: each prompt and tool result once, and each
    common prefix once for all engines together."""
    segments = {segment.key: segment.tokens for plan in workload.programs for segment in plan.shared}
    own = sum(
        plan.prompt_tokens + sum(turn.result_tokens for turn in plan.turns) for plan in workload.programs
    )
    return own + sum(segments.values())


def check_fits(workload: Workload, fleet: FleetProfile) -> None:
    """ConfigError for a program whose context grows larger than any engine's pool."""
    pool = fleet.engine.kv_tokens
    for plan in workload.programs:
        if plan.peak_tokens > pool:
            raise ConfigError(
                f"{workload.name}: program {plan.id} grows to {plan.peak_tokens} tokens, and an engine "
                f"({fleet.engine.name}) holds {pool}; leave it out, or raise kv_tokens"
            )


def _private_tokens(plan: Plan) -> int:
    """Summed over the turns: its context at the end of each, without common prefixes."""
    context, total = plan.prompt_tokens, 0
    for turn in plan.turns:
        context += turn.output_tokens
        total += context
        context += turn.result_tokens
    return total


def _recipe(name: str) -> Recipe:
    if name not in WORKLOADS:
        raise ConfigError(f"workload: unknown name {name!r}; {nearest(name, list(WORKLOADS))}")
    return WORKLOADS[name]


def _check(
    name: str, *, programs: int, group_size: int, concurrency: int | None, arrival_rate_s: float | None
) -> None:
    counts = {"programs": programs, "group_size": group_size, "concurrency": concurrency}
    for what, count in counts.items():
        if count is not None and count < 1:
            raise ConfigError(f"{name}: {what} is {count}; give at least 1")
    if (concurrency is None) == (arrival_rate_s is None):
        raise ConfigError(f"{name}: give either concurrency (closed) or arrival_rate_s (open), and not both")
    if arrival_rate_s is not None and not 0 < arrival_rate_s < float("inf"):
        raise ConfigError(f"{name}: arrival_rate_s is {arrival_rate_s}; give programs a second, above 0")


def _plan(name: str, recipe: Recipe, seed: int, index: int, group: Sequence[int]) -> Plan:
    rng = np.random.default_rng((seed, index))
    group_id = f"g{group[0]:04d}"
    shared = [Segment(f"{name}/{seed}", recipe.all_tokens)]
    if len(group) > 1:
        shared.append(Segment(f"{name}/{seed}/{group_id}", recipe.task_tokens))
    return Plan(
        id=ProgramId(f"p{index:04d}"),
        group=GroupId(group_id),
        group_size=len(group),
        shared=tuple(shared),
        prompt_tokens=_OWN_TOKENS if len(group) > 1 else recipe.task_tokens,
        turns=_turns(recipe, rng),
        prepare_s=float(recipe.prepare_s.draw(rng, 1)[0]),
        sandbox=_claim(recipe, rng),
        spike_bytes=int(recipe.spike_bytes.draw(rng, 1)[0]),
    )


def _turns(recipe: Recipe, rng: np.random.Generator) -> tuple[PlannedTurn, ...]:
    count = int(np.rint(recipe.turns.draw(rng, 1)[0]))
    output = np.rint(recipe.output_tokens.draw(rng, count)).astype(int).tolist()
    result = np.rint(recipe.result_tokens.draw(rng, count)).astype(int)
    appended = np.where(rng.random(count) < recipe.empty_results, 0, result).tolist()
    names, seconds = recipe.calls.draw(rng, count)
    calls = zip(output, names, seconds.tolist(), appended, strict=True)
    *acting, (answer, *_) = calls
    return (*(PlannedTurn(*call) for call in acting), PlannedTurn(answer))


def _claim(recipe: Recipe, rng: np.random.Generator) -> SandboxClaim:
    if not recipe.memory_bytes:
        return NO_CLAIM
    return SandboxClaim(recipe.memory_bytes, int(recipe.disk_bytes.draw(rng, 1)[0]), recipe.cpus)


def _permuted(groups: list[list[Plan]], rng: np.random.Generator) -> list[list[Plan]]:
    order: list[int] = rng.permutation(len(groups)).tolist()
    return [[groups[at][member] for member in rng.permutation(len(groups[at])).tolist()] for at in order]


def _arriving(groups: list[list[Plan]], rate_s: float, rng: np.random.Generator) -> list[list[Plan]]:
    arrivals = [0.0, *np.cumsum(rng.exponential(1 / rate_s, len(groups) - 1)).tolist()]
    return [
        [replace(plan, arrival_s=at) for plan in group] for group, at in zip(groups, arrivals, strict=True)
    ]
