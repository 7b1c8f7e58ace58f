"""Where a job that was cut off goes on: its last checkpoint, and finished groups that it did not learn from.

- A checkpoint says up to which step its weights have learnt, and the journal in which step each group was
  trained: so no group is learnt from twice, and none is forgotten.
- What was learnt after the checkpoint is lost; its records are used again where their weights are ancestors
  of these and young enough.  Otherwise their tasks are sampled anew.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, cast

from pydantic import TypeAdapter, ValidationError

from sostenuto.envs.curriculum import Curriculum
from sostenuto.errors import ConfigError, RecordError
from sostenuto.runtime.jobs.diary import Told
from sostenuto.runtime.jobs.job import RLJob
from sostenuto.runtime.jobs.openings import KeptGroup, Start
from sostenuto.runtime.jobs.sources import NAMED as CALLED
from sostenuto.runtime.journal import FactStated, GroupEntry, JournalReader
from sostenuto.runtime.ledger import Stage
from sostenuto.runtime.run_directory import LOST, NOT_TRAINED
from sostenuto.trainer.lineage import Lineage
from sostenuto.trainer.retention import JOB_NOTES, check_checkpoint, checkpoints
from sostenuto.types import Outcome, OutcomeKind, ProgramId, Version

JOB_OVER = "job_over"
NAMED = "weights of "
"""Begins the names of facts: which version is called so, of which job, from which checkpoint."""
START = "start"
_FORMAT = 1
_WITHOUT_END = (NOT_TRAINED, Outcome(OutcomeKind.DROPPED, JOB_OVER))
"""What finished programs came to whose job ended before it could use them."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Notes:
    """What a checkpoint holds beside what is the trainer's."""

    job: str
    """The name that the job keeps over the deaths of its run."""
    seed: int
    environment: str
    step: int
    version: Version
    lineage: Lineage
    supply: dict[str, Any]
    """Tasks, curriculum and sampler, as `GroupSupply.state_dict` says."""
    told: Told

    def to_json(self) -> bytes:
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1).encode()

    @classmethod
    def read(cls, checkpoint: Path) -> Self:
        """Of a checkpoint that is whole; ConfigError when it is of no job."""
        try:
            content = cast("dict[str, Any]", json.loads((checkpoint / JOB_NOTES).read_text()))
            if content.pop("format") != _FORMAT:
                raise ConfigError(f"checkpoint {checkpoint}: of a newer release; install that one")
            return TypeAdapter(cls).validate_python(content)
        except (OSError, KeyError, ValueError, ValidationError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"checkpoint {checkpoint}: {JOB_NOTES}: {error}; name one that a job has saved"
            ) from error


@dataclass(frozen=True, slots=True)
class Past:
    """Of one job."""

    root: str
    """The name that it keeps over the deaths of its run."""
    goes_on: bool = False
    """It began before; without a checkpoint it begins anew."""
    checkpoint: Path | None = None
    notes: Notes | None = None
    known_as: tuple[Version, ...] = ()
    """What the weights that it goes on from were called before, the first name first."""
    groups: tuple[KeptGroup, ...] = ()
    lost_steps: int = 0
    """That were learnt after the checkpoint."""

    @property
    def step(self) -> int:
        """That the weights have learnt."""
        return self.notes.step if self.notes else 0

    def named(self, deployed: Version) -> FactStated:
        """What the weights that the job goes on from are called now."""
        return FactStated(f"{NAMED}{deployed}", f"{self.root} {self.notes.version if self.notes else START}")

    def lineage(self, deployed: Version) -> Lineage:
        """Of the same weights under the name that they have now."""
        before = self.notes.lineage if self.notes else Lineage()
        return before.went_on(self.known_as[0], deployed, self.known_as[1:]) if self.known_as else before


def newest_checkpoint(root: Path, job: RLJob, chosen: Path | None = None) -> tuple[Path, Notes] | None:
    """The one to go on from; None where there is none.  ConfigError for one that does not fit the job."""
    found = [path for _, path in checkpoints(root)]
    if chosen is None and not found:
        return None
    path = chosen or found[-1]
    check_checkpoint(path)
    notes = Notes.read(path)
    for name, was, now in (
        ("seed", notes.seed, job.seed),
        ("environment", notes.environment, environments_of(job)),
    ):
        if was != now:
            raise ConfigError(f"checkpoint {path}: {name} was {was!r}, the job has {now!r}; give the same")
    if notes.step > job.steps:
        raise ConfigError(f"checkpoint {path}: is of step {notes.step}, the job has {job.steps}; give more")
    return path, notes


def look_back(
    reader: JournalReader, root: str, job: RLJob, place: tuple[Path, Notes] | None, facts: Mapping[str, str]
) -> Past:
    """What the journal knows of the job beside its checkpoint."""
    path, notes = place or (None, None)
    source = str(notes.version) if notes else START
    names = [Version.parse(name.removeprefix(NAMED)) for name in facts if name.startswith(NAMED)]
    again = sorted(v for v in names if facts[f"{NAMED}{v}"] == f"{root} {source}")
    known_as = (notes.version, *again) if notes else tuple(again)
    entries, step = reader.groups(root), notes.step if notes else 0
    groups = [_kept(reader, entry, job) for entry in _finished(entries, step)]
    _check_tasks(job, groups)
    learnt = max((entry.step or 0 for entry in entries if _is_trained(entry)), default=0)
    lost_steps = max(0, learnt - step)
    return Past(root, True, path, notes, known_as, tuple(groups), lost_steps)


def environments_of(job: RLJob) -> str:
    return ", ".join(part.called for part in job.parts)


def _finished(entries: list[GroupEntry], step: int) -> list[GroupEntry]:
    """Groups whose programs have all ended, and that weights of this step have not learnt from."""
    newest = {entry.ordinal: entry for entry in entries if _may_be_used(entry, step)}
    return sorted(newest.values(), key=lambda entry: entry.ordinal)


def _may_be_used(entry: GroupEntry, step: int) -> bool:
    ends = list(entry.programs.values())
    members = {program_id.partition("+")[0] for program_id in entry.programs}
    cut_off = any(end == LOST or end is Stage.RUNNING or _is_cancelled(end) for end in ends)
    learnt = entry.step is not None and entry.step <= step
    return len(members) == entry.size and not cut_off and not learnt and bool(_waiting(entry))


def _is_trained(entry: GroupEntry) -> bool:
    return any(
        isinstance(end, Outcome) and end.kind is OutcomeKind.TRAINED for end in entry.programs.values()
    )


def _is_cancelled(end: Stage | Outcome) -> bool:
    return isinstance(end, Outcome) and end.kind is OutcomeKind.CANCELLED


def _waiting(entry: GroupEntry) -> list[ProgramId]:
    """Its members that can be learnt from."""
    return [
        program_id
        for program_id, end in entry.programs.items()
        if isinstance(end, Outcome) and (end in _WITHOUT_END or end.kind is OutcomeKind.TRAINED)
    ]


def _kept(reader: JournalReader, entry: GroupEntry, job: RLJob) -> KeptGroup:
    start, programs = Start(entry.ordinal, entry.start), tuple(_waiting(entry))
    try:
        members = tuple(map(reader.record, programs))
    except RecordError as error:
        _log.warning("group %s is sampled anew: %s", entry.group_id, error)
        return KeptGroup(entry.group_id, start, programs, (), "record_lost")
    task_id = members[0].task_id
    part = next(part for part in job.parts if not job.mixed or task_id.startswith(part.called + CALLED))
    # The journal has what each program earned alone.
    fault = "rewards_of_group_lost" if part.group_rewards else ""
    return KeptGroup(entry.group_id, start, programs, members, fault)


def _check_tasks(job: RLJob, groups: list[KeptGroup]) -> None:
    # What a curriculum draws depends on what it has seen, and among histories ordinals are others.
    if job.prefixes or any(isinstance(part.tasks, Curriculum) for part in job.parts):
        return
    source = job.task_source()
    for group in groups:
        if not group.members:
            continue
        was = group.members[0].task_id
        try:
            now = source.at(group.start.ordinal).task_id
        except IndexError:
            now = "none"
        if was != now:
            raise ConfigError(
                f"tasks: the one with ordinal {group.start.ordinal} was {was!r}, it is {now!r} now; "
                "go on with the tasks that the run began with"
            )
