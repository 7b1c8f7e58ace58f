"""The quickstart's recipe: the numbers that were found to learn, each with its unit.

Copying, then demonstrations until the gate is passed, then GRPO.  The warm start is judged by what was
measured, never by time: a student that does not copy what a tool said cannot be taught by reward.
"""

from pydantic import Field

from sostenuto.trainer.algorithms import GRPO, AnyAlgorithm
from sostenuto.trainer.settings import Schedule, Section
from sostenuto.types import Limits


class ModelShape(Section):
    """A Llama of half a million parameters with tied embeddings, in float32."""

    layers: int = Field(default=2, gt=0)
    hidden: int = Field(default=128, gt=0)
    heads: int = Field(default=4, gt=0)
    feed_forward: int = Field(default=384, gt=0)
    context_tokens: int = Field(default=512, gt=0)


class CopyShape(Section):
    """One sequence of copying: fresh random tokens, then spans of them again."""

    fresh_tokens: int = Field(default=32, gt=0)
    spans: int = Field(default=8, gt=0)
    span_tokens: int = Field(default=4, gt=1)

    @property
    def tokens(self) -> int:
        return self.fresh_tokens + self.spans * self.span_tokens


class Copying(Section):
    """Copy pre-training.  Its loss hardly falls, yet the demonstrations are then learnt many times sooner."""

    shape: CopyShape = CopyShape()
    steps: int = Field(default=300, gt=0)
    batch: int = Field(default=16, gt=0)
    """Sequences in one step."""
    schedule: Schedule = Schedule(learning_rate=3e-3, warmup_steps=20)


class Gate(Section):
    """What the warm start has to show, greedily and exactly, on conversations it has not seen."""

    lessons: int = Field(default=200, gt=0)
    answers: int = Field(default=100, gt=0)
    lessons_exact: float = Field(default=0.98, gt=0, le=1)
    """Share of lessons whose every assistant turn comes out exactly."""
    answers_exact: float = Field(default=0.97, gt=0, le=1)
    """Share of answers that say exactly what calc said."""


class Demonstrating(Section):
    """Imitation of the teacher, lessons first."""

    steps: int = Field(default=600, gt=0)
    """After these the gate is asked."""
    most_steps: int = Field(default=1200, gt=0)
    """While the gate is closed, it goes on this far, and asks again every `check_every`."""
    check_every: int = Field(default=100, gt=0)
    batch: int = Field(default=16, gt=0)
    """Conversations in one step."""
    lessons_at_start: float = Field(default=0.9, ge=0, le=1)
    lessons_at_end: float = Field(default=0.4, ge=0, le=1)
    schedule: Schedule = Schedule(
        learning_rate=3e-3, final_learning_rate=3e-4, shape="linear", warmup_steps=20, total_steps=600
    )
    gate: Gate = Gate()


class Reinforcing(Section):
    """Asynchronous, by GRPO where nothing else is said."""

    steps: int = Field(default=60, gt=0)
    groups: int = Field(default=8, gt=0)
    """In one step."""
    algorithm: AnyAlgorithm = GRPO(group_size=8)
    schedule: Schedule = Schedule(
        learning_rate=3e-4, final_learning_rate=5e-5, shape="linear", warmup_steps=5, total_steps=60
    )
    """Without a warm-up, the first steps on stale batches can lose the policy for a while.  With 5e-4 it
    learns as fast and wanders further when the rewards say nothing."""
    staleness: int = Field(default=2, ge=0)
    """Versions that a batch may lag behind when it is used."""


class Recipe(Section):
    """The whole quickstart."""

    model: ModelShape = ModelShape()
    copying: Copying = Copying()
    demonstrating: Demonstrating = Demonstrating()
    reinforcing: Reinforcing = Reinforcing()
    limits: Limits = Limits(turns=6, turn_tokens=40, total_tokens=256)
    held_out_tasks: int = Field(default=200, gt=0)
