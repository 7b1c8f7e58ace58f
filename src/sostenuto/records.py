"""What the trainer sees of a program: spans, sequences, trajectories.

- A span is what entered the context together.  Nothing in it was ever decoded and encoded again.
- The mask is 1 only where the policy sampled and the engine gave a log-probability under a known version.
- A program whose history was rewritten has several sequences; a sampled token is masked in one alone.

Suffix of array names: T = tokens of one span.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from sostenuto.errors import RecordError
from sostenuto.types import GroupId, Outcome, ProgramId, Purpose, StopReason, Usage, Version

Tokens = NDArray[np.int32]
Floats = NDArray[np.float32]
Mask = NDArray[np.bool_]
Experts = NDArray[np.int16]
"""(tokens, layers with a router, experts a token) expert numbers, -1 where they are not known."""


class Producer(StrEnum):
    """Who put tokens into the context."""

    POLICY = "policy"
    ENVIRONMENT = "environment"
    """Tool results and other observations."""
    USER = "user"
    TEMPLATE = "template"
    """Role markers, separators and terminators that the policy did not sample."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens [start, end) of a span were sampled under `version`."""

    version: Version
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Tokens that entered the context together, exactly as the engine saw them.

    `logprobs` (T,) float32, of the distribution that was sampled from; NaN where nothing was sampled.
    `mask` (T,) bool, True where the token is trained.  `versions` cover every masked token.
    """

    producer: Producer
    token_ids: Tokens
    logprobs: Floats
    mask: Mask
    versions: tuple[VersionSpan, ...] = ()
    started_s: float = 0.0
    ended_s: float = 0.0

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def fed(cls, producer: Producer, token_ids: list[int] | Tokens, *, at_s: float = 0.0) -> "Span":
        """Context that nobody sampled."""
        ids = np.asarray(token_ids, dtype=np.int32)
        nan = np.full(len(ids), np.nan, dtype=np.float32)
        return cls(producer, ids, nan, np.zeros(len(ids), dtype=np.bool_), (), at_s, at_s)

    def as_context(self) -> "Span":
        """The same tokens with nothing to train: what a branch shares with its origin."""
        return Span(
            self.producer, self.token_ids, self.logprobs, np.zeros(len(self), dtype=np.bool_),
            self.versions, self.started_s, self.ended_s,
        )  # fmt: skip


Sequence = tuple[Span, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Taught:
    """What a teacher engine said of the masked tokens of one sequence of T tokens; NaN elsewhere."""

    version: str
    """Of the teacher, as its engine calls it."""
    logprobs: Floats
    """(T,)"""
    top_ids: Tokens | None = None
    """(T, K) its likeliest tokens in the same contexts; None: not asked for."""
    top_logprobs: Floats | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """The finished record of one program.

    `outcome` is set when the rollout itself decided it (failed, cancelled, evaluated); a trajectory
    that waits to be trained has none yet.
    """

    program_id: ProgramId
    group_id: GroupId
    task_id: str
    purpose: Purpose
    sequences: tuple[Sequence, ...]
    reward: float | None
    stop_reason: StopReason
    usage: Usage = field(default_factory=Usage)
    outcome: Outcome | None = None
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    experts: tuple[Experts | None, ...] = ()
    """For each sequence what its first tokens were routed to; empty where nothing was recorded."""
    teacher: str = ""
    """Who teaches it; empty: nobody."""
    taught: tuple[Taught | None, ...] = ()
    """For each sequence what the teacher said of it; empty where no engine was asked."""
    turn_rewards: tuple[float, ...] = ()
    """What each turn earned, which adds up to the reward; empty where only that is known."""
    roles: tuple[str, ...] = ()
    """For each sequence the role that its policy tokens were said in; empty where there is one alone."""
    history: str = ""
    """Which history its one turn continues, of a program that has no environment and no reward."""

    def spans(self) -> Iterator[Span]:
        for sequence in self.sequences:
            yield from sequence

    @property
    def trained_tokens(self) -> int:
        return sum(int(span.mask.sum()) for span in self.spans())

    @property
    def version_spans(self) -> tuple[VersionSpan, ...]:
        """Of the spans with something to train."""
        return tuple(v for span in self.spans() if span.mask.any() for v in span.versions)

    @property
    def oldest_version(self) -> Version | None:
        """The version this record may claim; None when nothing in it is trained."""
        return min((v.version for v in self.version_spans), default=None)

    def staleness(self, deployed: Version) -> int:
        """Deployed version number minus the oldest trained one, taken when the record is used.

        Raises RecordError for a record of another run epoch's future: staleness is never negative.
        """
        oldest = self.oldest_version
        if oldest is None:
            return 0
        if oldest > deployed:
            raise RecordError(f"{self.program_id}: sampled under {oldest}, deployed is {deployed}")
        return deployed.number - oldest.number


def validate(trajectory: Trajectory) -> None:
    """Raise RecordError for a record that breaks invariants 2 or 3."""
    _check_experts(trajectory)
    for index, span in enumerate(trajectory.spans()):
        try:
            _check(span)
        except RecordError as error:
            where = f"{trajectory.program_id}: span {index} ({span.producer})"
            raise RecordError(f"{where}: {error}") from None


def _check_experts(trajectory: Trajectory) -> None:
    if not trajectory.experts:
        return
    name, sequences = trajectory.program_id, trajectory.sequences
    if len(trajectory.experts) != len(sequences):
        raise RecordError(
            f"{name}: experts of {len(trajectory.experts)} sequences, there are {len(sequences)}"
        )
    for index, (sequence, experts) in enumerate(zip(sequences, trajectory.experts, strict=True)):
        if experts is not None and (experts.ndim != 3 or len(experts) > sum(map(len, sequence))):
            raise RecordError(f"{name}: sequence {index}: experts of shape {experts.shape} do not fit it")


def _check(span: Span) -> None:
    _check_shapes(span)
    is_trained = bool(span.mask.any())
    if is_trained:
        _check_trained(span)
    if is_trained or span.versions:
        _check_versions(span)


def _check_shapes(span: Span) -> None:
    if not (len(span.token_ids) == len(span.logprobs) == len(span.mask)):
        raise RecordError("token_ids, logprobs and mask differ in length")
    if len(span) and int(span.token_ids.min()) < 0:
        raise RecordError("a token id is negative")


def _check_trained(span: Span) -> None:
    if span.producer is not Producer.POLICY:
        raise RecordError("trained tokens that the policy did not sample")
    trained = span.logprobs[span.mask]
    if not np.isfinite(trained).all():
        raise RecordError("a trained token has no log-probability")
    if (trained > 1e-5).any():
        raise RecordError("a log-probability is above zero")


def _check_versions(span: Span) -> None:
    covered = np.zeros(len(span), dtype=np.bool_)
    previous: VersionSpan | None = None
    for version in span.versions:
        if not 0 <= version.start < version.end <= len(span):
            raise RecordError(f"version {version.version} covers no tokens of the span")
        if previous and (version.start < previous.end or version.version < previous.version):
            raise RecordError("versions overlap or go back")
        covered[version.start : version.end] = True
        previous = version
    if (span.mask & ~covered).any():
        raise RecordError("a trained token has no version")
