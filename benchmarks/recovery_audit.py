"""What the books of a run say that was killed many times and has come to its end.

Read from the journal and the event log alone; nothing of the runtime is asked.
"""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.outside import sandbox_folders
from sostenuto.runtime.journal import GroupEntry, read_journal
from sostenuto.runtime.run_directory import LOST, NOT_TRAINED
from sostenuto.types import Outcome, OutcomeKind, Version

_JOB_OVER = "job_over"
_OF_THE_DEAD = {"lineage", NOT_TRAINED.reason}
"""Why records of a dead runtime are dropped; their tasks have to come again."""


@dataclass(frozen=True, slots=True)
class Audit:
    open_programs: int
    """Without an outcome."""
    unbalanced: int
    """1: the ledger does not close."""
    doubled: int
    """Tasks that were learnt from twice."""
    lost: int
    """Tasks that were drawn, or passed over, and have come to nothing but through a death."""
    missing_groups: int
    """That a job of so many steps has learnt from, and the journal does not know."""
    versions_back: int
    """Versions that are not above all before them."""
    steps_missing: int
    """In the result."""
    sandboxes: int

    def faults(self) -> dict[str, int]:
        """What is not as it has to be."""
        return {name: value for name in self.__slots__ if (value := getattr(self, name))}


def audit(run: Path, job: str, *, steps: int, groups_per_step: int | None) -> Audit:
    """Of a job of this root.  `groups_per_step`: None where batches may have groups that teach nothing."""
    with read_journal(run / "journal.db") as reader:
        ledger, groups = reader.ledger().statistics(), reader.groups(job)
        versions = reader.versions()
    trained = Counter(group.ordinal for group in groups if _is_trained(group))
    return Audit(
        open_programs=ledger.running + ledger.sealed,
        unbalanced=int(not ledger.closes),
        doubled=sum(count > 1 for count in trained.values()),
        lost=len(_lost(groups)),
        missing_groups=0 if groups_per_step is None else abs(steps * groups_per_step - len(trained)),
        versions_back=_backwards(versions),
        steps_missing=abs(steps - len(result(run)["rewards"])),
        sandboxes=sandbox_folders(run),
    )


def events(run: Path) -> list[dict[str, Any]]:
    """What the run has told so far."""
    log = run / "events.jsonl"
    if not log.is_file():
        return []
    # The last line may be under way.
    return [json.loads(line) for line in log.read_bytes().split(b"\n")[:-1]]


def result(run: Path) -> dict[str, Any]:
    """Of its last job."""
    return next(event for event in reversed(events(run)) if event["event"] == "JobResult")


def _outcomes(group: GroupEntry) -> list[Outcome]:
    return [end for end in group.programs.values() if isinstance(end, Outcome)]


def _is_trained(group: GroupEntry) -> bool:
    return any(outcome.kind is OutcomeKind.TRAINED for outcome in _outcomes(group))


def _lost(groups: list[GroupEntry]) -> set[int]:
    drawn = range(max((group.ordinal for group in groups), default=-1) + 1)
    return set(drawn) - {group.ordinal for group in groups if _has_come_to_its_end(group)}


def _has_come_to_its_end(group: GroupEntry) -> bool:
    """As a group of a living job: trained, dropped for what it is, or not needed any more."""
    return not any(
        outcome == LOST
        or (outcome.kind is OutcomeKind.CANCELLED and outcome.reason != _JOB_OVER)
        or (outcome.kind is OutcomeKind.DROPPED and outcome.reason in _OF_THE_DEAD)
        for outcome in _outcomes(group)
    )


def _backwards(versions: list[Version]) -> int:
    highest, found = Version(-1, -1), 0
    for version in versions:
        found += version <= highest or version.number <= highest.number
        highest = max(highest, version)
    return found
