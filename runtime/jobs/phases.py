"""A job whose method changes on its way, such as from a teacher to rewards.  Values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from sostenuto.errors import ConfigError
from sostenuto.trainer.algorithms import Algorithm, AnyAlgorithm

_SHARED = ("group_size", "temperature", "zero_spread", "critic")
"""What programs are started and kept by, some being under way when a phase begins, and what is loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Another method from some step on.  The optimizer and its schedule go on as they are."""

    from_step: int
    """Of the job; its steps are counted from 1."""
    algorithm: AnyAlgorithm

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}


def method_at(step: int, first: Algorithm, phases: Sequence[Phase]) -> Algorithm:
    """What the batch of this step is learnt by."""
    begun = [phase.algorithm for phase in phases if phase.from_step <= step]
    return begun[-1] if begun else first


def check_phases(first: Algorithm, phases: Sequence[Phase], steps: int) -> None:
    """ConfigError unless they come one after the other and are sampled for alike."""
    begins = [phase.from_step for phase in phases]
    if begins != sorted(set(begins)) or any(not 1 < begin <= steps for begin in begins):
        raise ConfigError(
            f"phases: they begin at steps {begins} of {steps}; give later ones later steps, from 2 on"
        )
    for phase in phases:
        for name in _SHARED:
            given, wanted = getattr(phase.algorithm, name), getattr(first, name)
            if given != wanted:
                raise ConfigError(
                    f"phases: from step {phase.from_step}: {name} is {given!r} and algorithm has {wanted!r}; "
                    "it holds for all phases, give both the same"
                )
