"""Several optimizer steps from one batch: how it is cut, and what they come to together."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from sostenuto.trainer.reports import StepReport
from sostenuto.trainer.samples import Sample


def minibatches(samples: list[Sample], *, epochs: int, parts: int, seed: int) -> Iterator[list[Sample]]:
    """In each epoch every sample once, in `parts` batches of about as many trained tokens.

    The sequences of one program stay together.  A part with nothing to train is left out.
    """
    programs: dict[str, list[Sample]] = {}
    for index, sample in enumerate(samples):
        programs.setdefault(sample.origin or f"#{index}", []).append(sample)
    of_program = list(programs.values())
    for epoch in range(epochs):
        order = np.random.default_rng((seed, epoch)).permutation(len(of_program)).tolist()
        for part in _spread([of_program[index] for index in order], parts):
            if any(sample.masked_tokens for sample in part):
                yield part


def together(reports: Sequence[StepReport]) -> StepReport:
    """One report of several steps on parts of a batch: sums of counts, means weighed by trained tokens."""
    last = reports[-1]
    weights = np.array([report.masked_tokens for report in reports], dtype=np.float64)

    def mean(name: str) -> float:
        return float(np.average([getattr(report, name) for report in reports], weights=weights))

    def known(name: str) -> float | None:
        return None if any(getattr(report, name) is None for report in reports) else mean(name)

    def total(name: str) -> int:
        return sum(getattr(report, name) for report in reports)

    largest = [report.max_abs_dlogp for report in reports if report.max_abs_dlogp is not None]
    return replace(
        last,
        loss=mean("loss"),
        grad_norm=mean("grad_norm"),
        entropy=mean("entropy"),
        mean_abs_dlogp=known("mean_abs_dlogp"),
        max_abs_dlogp=max(largest, default=None),
        mismatch_k3=known("mismatch_k3"),
        engine_difference=known("engine_difference"),
        update_difference=known("update_difference"),
        clip_share=mean("clip_share"),
        truncated_share=mean("truncated_share"),
        rejected_share=mean("rejected_share"),
        kl=known("kl"),
        teacher_kl=known("teacher_kl"),
        value_loss=known("value_loss"),
        explained_variance=known("explained_variance"),
        value_clip_share=known("value_clip_share"),
        samples=total("samples"),
        micro_batches=total("micro_batches"),
        tokens=total("tokens"),
        masked_tokens=total("masked_tokens"),
        elapsed_s=float(sum(report.elapsed_s for report in reports)),
        cpu_s=float(sum(report.cpu_s for report in reports)),
        refused="; ".join(report.refused for report in reports if report.refused),
    )


def _spread(programs: list[list[Sample]], parts: int) -> list[list[Sample]]:
    """Each program to the part that has the fewest trained tokens so far."""
    spread: list[list[Sample]] = [[] for _ in range(parts)]
    tokens = [0] * parts
    for samples in programs:
        fewest = tokens.index(min(tokens))
        spread[fewest] += samples
        tokens[fewest] += sum(sample.masked_tokens for sample in samples)
    return spread
