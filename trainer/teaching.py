"""What teachers say of the tokens that a student sampled, in the contexts that the student made.

    sampled       sg[log p teacher - log p student] of the sampled token    0.2 against 0.4: +0.693
    distribution  KL(student || teacher) of the two next-token distributions

A teacher is a model beside the policy, or an engine whose answers came with the records; a micro-batch has
one.  Suffix M: masked tokens, K: the teacher's likeliest tokens.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from sostenuto.errors import ConfigError, RecordError
from sostenuto.trainer.batching import MicroBatch
from sostenuto.trainer.kl import kl_of, with_rest
from sostenuto.trainer.logprobs import beside, pairs, token_logprobs
from sostenuto.trainer.model import Policy
from sostenuto.trainer.parts import Teaching
from sostenuto.trainer.samples import TEACHER, TEACHER_TOP, TEACHER_TOP_IDS, Sample
from sostenuto.trainer.tensors import as_tensor


class Teachers:
    """The models among the teachers, by name; the others' answers are in the samples."""

    def __init__(self, policy: Policy, models: Mapping[str, Policy]) -> None:
        self._policy = policy
        self._models = models

    def check(self, samples: Iterable[Sample], part: Teaching) -> None:
        """Raise ConfigError or RecordError for a sample of which no teacher has or can say what is needed."""
        for sample in samples:
            if sample.teacher not in self._models:
                _check_answers(sample, part)

    def signal(self, part: Teaching, batch: MicroBatch, student: Tensor, temperature: float) -> Tensor:
        """(M,) log p teacher - log p student, without gradient; within the part's bound."""
        gap = self._logprobs(batch, temperature) - student.detach()
        return gap if part.bound is None else gap.clamp(-part.bound, part.bound)

    def distance(self, part: Teaching, batch: MicroBatch, temperature: float) -> Tensor:
        """(M,) KL(student || teacher) in nats, with the student's gradient.

        With top_k over the teacher's k likeliest tokens and all others together as one more, which is never
        more than the whole.
        """
        model = self._models.get(batch.teacher)
        if model is None:
            return self._recorded_distance(part, batch, temperature)

        def compare(logits: Tensor, others: Tensor) -> Tensor:
            ours = (logits / temperature).log_softmax(-1)
            theirs = (others / temperature).log_softmax(-1)
            if part.top_k is not None and part.top_k < ours.shape[-1]:
                theirs, kept = theirs.topk(part.top_k, dim=-1)
                return kl_of(with_rest(ours.gather(-1, kept)), with_rest(theirs))
            return kl_of(ours, theirs)

        return pairs(self._policy, model, batch, compare)

    def _logprobs(self, batch: MicroBatch, temperature: float) -> Tensor:
        model = self._models.get(batch.teacher)
        if model is None:
            return _recorded(batch, TEACHER)
        with torch.no_grad():
            return token_logprobs(model, batch, temperature)

    def _recorded_distance(self, part: Teaching, batch: MicroBatch, temperature: float) -> Tensor:
        ids, logprobs = (_recorded(batch, name)[:, : part.top_k] for name in (TEACHER_TOP_IDS, TEACHER_TOP))
        count = ids.shape[-1]

        def compare(logits: Tensor, given: Tensor) -> Tensor:
            kept, theirs = given[:, :count].long(), given[:, count:]
            ours = (logits / temperature).log_softmax(-1).gather(-1, kept)
            return kl_of(with_rest(ours), with_rest(theirs))

        return beside(self._policy, batch, torch.cat([ids, logprobs], dim=-1), compare)


def _recorded(batch: MicroBatch, name: str) -> Tensor:
    found = batch.extra(name)
    if found is None:
        raise RecordError(f"teacher {batch.teacher!r}: the batch has no {name} of it")
    return as_tensor(found)


def _check_answers(sample: Sample, part: Teaching) -> None:
    if not sample.teacher:
        raise ConfigError(f"teaching: sample {sample.origin} has no teacher; assign one to every task")
    if part.signal == "distribution" and part.top_k is None:
        raise ConfigError(
            f"teaching: teacher {sample.teacher!r} is an engine, which gives no whole distributions; give "
            'top_k, or place = "trainer"'
        )
    for name in (TEACHER,) if part.signal == "sampled" else (TEACHER_TOP_IDS, TEACHER_TOP):
        known = sample.extras.get(name)
        if known is None or not bool((known[sample.mask] == known[sample.mask]).all()):
            raise RecordError(f"sample {sample.origin}: teacher {sample.teacher!r} gave no {name} of a token")
