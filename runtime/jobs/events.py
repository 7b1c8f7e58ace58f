"""What a job says while it runs, and what it comes to.  Values; all times in seconds."""

import math
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter

from sostenuto.runtime.inspection import Sighting
from sostenuto.runtime.ledger import LedgerStatistics
from sostenuto.trainer.reports import StepReport
from sostenuto.types import Usage, Version


@dataclass(frozen=True, slots=True)
class JobStarted:
    job: str
    model: str
    version: Version
    isolation: str


@dataclass(frozen=True, slots=True)
class Resumed:
    """The job goes on where it was cut off."""

    job: str
    step: int
    """That its weights have learnt."""
    version: Version
    """What they are called now."""
    checkpoint: str
    """Empty: there was none, and it begins anew."""
    kept: int
    """Groups that had finished, and can be learnt from."""
    dropped: int
    """Finished groups whose weights are no ancestors of these, or too old; their tasks are sampled anew."""
    lost_steps: int
    """That were learnt after the checkpoint."""


@dataclass(frozen=True, slots=True)
class WarmStartStep:
    stage: str
    step: int
    steps: int
    report: StepReport


@dataclass(frozen=True, slots=True)
class WarmStartChecked:
    """What a warm start has learnt, measured on conversations that it has not seen."""

    step: int
    lessons_exact: float
    answers_exact: float
    passed: bool


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Held-out tasks, each run as often as was asked for."""

    step: int
    version: Version
    """That was deployed when it began."""
    temperature: float
    programs: int
    """That were scored."""
    failed: int
    reward: float
    """Mean over tasks of the mean over their scored programs."""
    turns: float
    elapsed_s: float
    tasks: int = 0
    """With a scored program."""
    versions: tuple[Version, ...] = ()
    """That sampled, all of them: one, unless a newer one opened meanwhile."""
    low: float = math.nan
    high: float = math.nan
    """The 95 % interval of the reward; NaN of one task alone."""
    interval: str = "none"
    """How that was computed: wilson, student, none; see runtime/jobs/estimates.py."""
    pass_at: dict[int, float] = field(default_factory=dict[int, float])
    """The estimated chance that one of k samples on a task succeeds, by k."""
    stops: dict[str, int] = field(default_factory=dict[str, int])
    """Scored programs by why their last turn was the last."""
    environment: str = ""
    """Of several in one job."""


@dataclass(frozen=True, slots=True)
class FlowSeen:
    """A batch's programs, the skipped ones included, and the groups behind them when it was taken."""

    success: float
    """Share of programs that have succeeded, by `eval_sampling.success`."""
    spread: float
    """Mean over groups of the standard deviation of their rewards."""
    zero_spread: float
    """Share of groups with equal rewards."""
    buffered: int
    """Groups that are ready and wait."""
    buffered_staleness: int
    """Of the oldest of them."""
    in_flight: int
    """Groups that run."""
    in_flight_staleness: int
    """Of the one that was opened first, if it were used now."""
    versions_mean: float
    """Versions that have sampled one program."""
    versions_max: int
    cut_short: float
    """Share of programs that a limit on tokens ended."""
    stops: dict[str, int]
    """Programs by why their last turn was the last."""


@dataclass(frozen=True, slots=True)
class StepTrained:
    """One batch taken, learnt and published."""

    step: int
    steps: int
    version: Version
    reward: float
    """Mean over the batch's programs that have one; NaN: none has."""
    groups: int
    """That were learnt from."""
    skipped: int
    """Groups of the batch with equal rewards, which teach nothing."""
    staleness_mean: float
    staleness_max: int
    report: StepReport
    usage: Usage
    """Summed over the batch's programs."""
    wait_s: float
    """The trainer waited for a batch."""
    learn_s: float
    publish_s: float
    pause_s: float
    """Decoding stood still for the swap."""
    flow: FlowSeen | None = None
    environments: dict[str, float] = field(default_factory=dict[str, float])
    """Mean reward of each, where the job has several."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something is wrong with training; it goes on."""

    step: int
    name: str
    value: float
    threshold: float
    remedy: str

    def __str__(self) -> str:
        return f"{self.name} is {self.value:.3g} at step {self.step}, above {self.threshold:g}: {self.remedy}"


@dataclass(frozen=True, slots=True)
class Published:
    """A trainer that is not ours has published; what it says it has learnt from since the last time."""

    step: int
    version: Version
    groups: int
    reward: float | None
    """Mean over the groups' programs; None without any, like the next two."""
    staleness_mean: float | None
    staleness_max: int | None
    pause_s: float
    """Decoding stood still for the swap."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """Finished programs that will not be trained."""

    reason: str
    programs: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Replaced:
    """A member of a group that failed or came too late, and the program in its place."""

    program: str
    by: str
    reason: str


@dataclass(frozen=True, slots=True)
class RewardAwaited:
    """A program has ended, and its reward is still to be given."""

    program: str
    task: str
    within_s: float


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A group that ran for so long that it could not be used any more."""

    group: str
    programs: int
    reason: str
    again: bool
    """Its task is started anew."""


@dataclass(frozen=True, slots=True)
class NoSignal:
    """In every group of a whole batch the rewards were equal: nothing to learn from, another is sampled."""

    groups: int
    reward: float
    """Mean over their programs."""


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A task that failed for infrastructure reasons too often to be tried again."""

    task_id: str


@dataclass(frozen=True, slots=True)
class Stalled:
    """No group has been completed for a while."""

    seconds: float
    programs: tuple[str, ...]
    """Some of those that are waited for."""
    oldest: Sighting | None = None
    """The one of them that was submitted first."""

    def __str__(self) -> str:
        who = str(self.oldest) if self.oldest else ", ".join(self.programs)
        return f"no group was completed for {self.seconds:.0f} s; waiting for {who}"


@dataclass(frozen=True, slots=True)
class Saved:
    step: int
    path: str


@dataclass(frozen=True, slots=True)
class TimeSplit:
    """Where the time of a job went.  Program-seconds overlap; the trainer's are wall time."""

    decode_s: float = 0.0
    prefill_s: float = 0.0
    tool_s: float = 0.0
    environment_s: float = 0.0
    queue_s: float = 0.0
    learn_s: float = 0.0
    publish_s: float = 0.0
    wait_s: float = 0.0

    def __add__(self, other: "TimeSplit") -> "TimeSplit":
        return TimeSplit(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class JobResult:
    """What a job came to."""

    job: str
    steps: int
    version: Version
    evaluations: tuple[Evaluated, ...]
    rewards: tuple[float, ...]
    """Mean reward of each step's batch."""
    time: TimeSplit
    ledger: LedgerStatistics
    elapsed_s: float
    checkpoint: Path | None = None
    quarantined: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class JobFailed:
    """An error ended the job; `result` of its handle raises it."""

    job: str
    error: str
    message: str


JobEvent = (
    JobStarted
    | Resumed
    | WarmStartStep
    | WarmStartChecked
    | Evaluated
    | StepTrained
    | Alarm
    | Published
    | Dropped
    | Replaced
    | RewardAwaited
    | GivenUp
    | NoSignal
    | Quarantined
    | Stalled
    | Saved
    | JobResult
    | JobFailed
)

_JSON = TypeAdapter(dict[str, Any])


def as_json(event: JobEvent, *, at: str) -> bytes:
    """One line of the event log; `at` is the wall time."""
    fields = {key: _plain(value) for key, value in asdict(event).items()}
    return _JSON.dump_json({"at": at, "event": type(event).__name__, **fields})


def _plain(value: object) -> object:
    if isinstance(value, Version):
        return str(value)
    if isinstance(value, tuple):
        return [_plain(part) for part in cast("tuple[object, ...]", value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value
