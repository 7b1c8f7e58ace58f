"""What a run of programs was measured to be; written by simulation and live runs alike, read by reports."""

from dataclasses import dataclass, field

from sostenuto.types import GroupId, ProgramId

Series = list[tuple[float, float]]
"""(time in seconds, value from then on)."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of one program's life, for the timeline.  `what`: a phase of the scheduler."""

    what: str
    start_s: float
    end_s: float
    engine: str = ""


@dataclass(slots=True)
class ProgramResult:
    """One program, from its submission on.  Times in seconds of the run's clock."""

    id: ProgramId
    group: GroupId
    group_size: int
    submitted_s: float
    finished_s: float = float("nan")
    failed: str = ""
    """Why it ended before its plan; empty when it went to its end."""
    turns: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    """Of its first turn."""
    context_tokens: int = 0
    """Sum over turns of the tokens sent."""
    needed_tokens: int = 0
    """Tokens that had to be prefilled whatever the policy: what is new in each turn."""
    prefilled_tokens: int = 0
    """Tokens that were prefilled."""
    cached_tokens: int = 0
    decode_s: float = 0.0
    prefill_s: float = 0.0
    tool_s: float = 0.0
    tool_queue_s: float = 0.0
    turn_contexts: list[int] = field(default_factory=list[int])
    """For each turn: tokens sent."""
    turn_waits_s: list[float] = field(default_factory=list[float])
    """For each turn: from the moment when nothing was missing but the engine to its first prefill step."""
    admission_waits_s: list[float] = field(default_factory=list[float])
    """For each turn: from that moment to the scheduler's Decode."""
    environment_wait_s: float = 0.0
    """Waited for its environment alone: KV and a slot were free for it."""
    prepare_s: float = 0.0
    """What making its environment took, queues included."""
    sandbox_s: float = 0.0
    """From the environment's start to its release."""
    evictions: int = 0
    moves: int = 0
    """Turns on another engine than the one before."""
    waits_by_reason_s: dict[str, float] = field(default_factory=dict[str, float])
    stretches: list[Stretch] = field(default_factory=list[Stretch])
    """Empty unless a timeline was asked for."""

    @property
    def completion_s(self) -> float:
        return self.finished_s - self.submitted_s

    @property
    def recomputed_tokens(self) -> int:
        return max(0, self.prefilled_tokens - self.needed_tokens)


@dataclass(slots=True)
class EngineResult:
    """One engine over the run."""

    id: str
    kv_tokens: int
    busy_s: float = 0.0
    idle_with_work_waiting_s: float = 0.0
    """Nothing ran on it while a program waited for an engine."""
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    evicted_tokens: int = 0
    used_tokens: Series = field(default_factory=Series)
    decoding: Series = field(default_factory=Series)


@dataclass(slots=True)
class RunResult:
    """One policy on one workload, fleet and seed."""

    policy: str
    workload: str
    fleet: str
    seed: int
    makespan_s: float
    programs: list[ProgramResult]
    engines: list[EngineResult]
    peak_sandbox_bytes: int = 0
    peak_disk_bytes: int = 0
    peak_sandboxes: int = 0
    waiting: Series = field(default_factory=Series)
    """Programs that nothing is missing but an engine."""
    settings: dict[str, str] = field(default_factory=dict[str, str])
    """What tells this run from others of a sweep, such as the pool's size."""
    worst_bound_s: float = float("nan")
    """The longest admission wait that the policy allowed itself, where it computes one."""
    events: int = 0
    """What the scheduler took in."""
    wall_s: float = 0.0
