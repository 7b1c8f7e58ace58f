"""From records to what one training step reads: one Sample per sequence with something to train.

- Token ids are copied from the record; nothing is decoded or encoded.
- A sampled token is masked in one sequence alone, so it is trained once; the reward of a trajectory is
  one advantage, shared by all its sequences.
- Position t is predicted from position t - 1, so the first token of a sequence can never be trained.

Suffix T: tokens of one sequence, cut after its last masked token.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from sostenuto.errors import RecordError
from sostenuto.records import Experts, Floats, Mask, Sequence, Taught, Tokens, Trajectory
from sostenuto.types import Version

TEACHER, TEACHER_TOP_IDS, TEACHER_TOP = "teacher", "teacher_top_ids", "teacher_top"
"""In the extras: a teacher's log-probability of each token (T,); its likeliest ones, with theirs (T, K)."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One sequence to train on.  Raises RecordError when its parts do not fit together.

    `logprobs` (T,) are the engine's, NaN where nothing was sampled.  `rollout_logprobs` (T,) are the
    trainer's own under the weights that sampled, where somebody computed them in time.  `version` is the
    oldest among the masked tokens; None for demonstrations.  `origin` names the program.
    """

    token_ids: Tokens
    mask: Mask
    logprobs: Floats
    advantages: Floats
    version: Version | None = None
    origin: str = ""
    rollout_logprobs: Floats | None = None
    experts: Experts | None = None
    """Of its first tokens, where they were recorded."""
    extras: Mapping[str, Floats] = field(default_factory=dict[str, Floats])
    """(T,) or (T, K) each, NaN where unknown.  start: the trainer's log-probabilities at the batch's
    beginning.  value: what the critic said then.  return: what it should have said."""
    teacher: str = ""
    """Who teaches it; empty: nobody."""

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        arrays = (self.mask, self.logprobs, self.advantages, self.rollout_logprobs)
        flat = all(array is None or array.shape == (length,) for array in arrays)
        if not flat or any(array.shape[:1] != (length,) for array in self.extras.values()):
            raise RecordError(f"sample {self.origin}: every array must have shape ({length},)")
        if self.experts is not None and (self.experts.ndim != 3 or len(self.experts) > length):
            raise RecordError(f"sample {self.origin}: experts of shape {self.experts.shape} do not fit it")
        if length and bool(self.mask[0]):
            raise RecordError(f"sample {self.origin}: the first token has no context to be predicted from")
        if length and int(self.token_ids.min()) < 0:
            raise RecordError(f"sample {self.origin}: a token id is negative")

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def masked_tokens(self) -> int:
        return int(np.count_nonzero(self.mask))

    def check_policy(self) -> None:
        """Raise RecordError unless every masked token has a log-probability and an advantage."""
        if not np.isfinite(self.logprobs[self.mask]).all():
            raise RecordError(f"sample {self.origin}: a trained token has no behaviour log-probability")
        if not np.isfinite(self.advantages[self.mask]).all():
            raise RecordError(f"sample {self.origin}: an advantage is not finite")

    def check_values(self) -> None:
        """Raise RecordError unless every masked token has a value and a return."""
        for name in ("value", "return"):
            known = self.extras.get(name)
            if known is None or not np.isfinite(known[self.mask]).all():
                raise RecordError(
                    f"sample {self.origin}: a trained token has no {name!r}; ask the trainer for values, "
                    "and credit them"
                )


def demonstration(token_ids: list[int] | Tokens, mask: list[bool] | Mask, *, origin: str = "") -> Sample:
    """A sequence to imitate: cross-entropy on the masked tokens."""
    ids, chosen = np.asarray(token_ids, dtype=np.int32), np.asarray(mask, dtype=np.bool_)
    nothing = np.full(len(ids), np.nan, dtype=np.float32)
    return Sample(ids, chosen, nothing, np.zeros(len(ids), dtype=np.float32), origin=origin)


def trajectory_samples(trajectory: Trajectory, advantage: float) -> list[Sample]:
    """The sequences of a trajectory that have something to train, all with the same advantage.

    RecordError when one span is to be trained in two sequences, or a log-probability is missing.
    """
    _refuse_trained_twice(trajectory)
    nothing = (None,) * len(trajectory.sequences)
    parts = [
        _sample(trajectory, sequence, advantage, routed, taught)
        for sequence, routed, taught in zip(
            trajectory.sequences, trajectory.experts or nothing, trajectory.taught or nothing, strict=True
        )
    ]
    return [sample for sample in parts if sample is not None]


def _sample(
    trajectory: Trajectory,
    sequence: Sequence,
    advantage: float,
    experts: Experts | None,
    taught: Taught | None,
) -> Sample | None:
    spans = [span for span in sequence if len(span)]
    mask = np.concatenate([span.mask for span in spans]) if spans else np.zeros(0, dtype=np.bool_)
    trained = np.flatnonzero(mask)
    if not len(trained):
        return None
    end = int(trained[-1]) + 1
    sample = Sample(
        token_ids=np.concatenate([span.token_ids for span in spans])[:end],
        mask=mask[:end],
        logprobs=np.concatenate([span.logprobs for span in spans])[:end],
        advantages=np.where(mask[:end], advantage, 0.0).astype(np.float32),
        version=min(v.version for span in spans if span.mask.any() for v in span.versions),
        origin=trajectory.program_id,
        experts=None if experts is None else experts[:end],
        teacher=trajectory.teacher,
        extras={} if taught is None else _taught_arrays(taught, end),
    )
    sample.check_policy()
    return sample


def _taught_arrays(taught: Taught, end: int) -> dict[str, Floats]:
    arrays = {TEACHER: taught.logprobs[:end]}
    if taught.top_logprobs is not None and taught.top_ids is not None:
        # Ids are exact in float32 up to 2^24, and no vocabulary is larger.
        arrays |= {
            TEACHER_TOP_IDS: taught.top_ids[:end].astype(np.float32),
            TEACHER_TOP: taught.top_logprobs[:end],
        }
    return arrays


def _refuse_trained_twice(trajectory: Trajectory) -> None:
    seen: set[int] = set()
    for span in trajectory.spans():
        if not span.mask.any():
            continue
        if id(span) in seen:
            raise RecordError(
                f"{trajectory.program_id}: a span is trained in two sequences; share it as_context"
            )
        seen.add(id(span))
