import numpy as np
import pytest

from sostenuto.errors import RecordError
from sostenuto.records import Producer, Span, Trajectory, VersionSpan
from sostenuto.trainer.aggregation import token_weights
from sostenuto.trainer.samples import Sample, demonstration, trajectory_samples
from sostenuto.types import Version
from trainer_world import sampled, trajectory


def test_the_trainer_receives_the_ids_that_were_generated_not_their_text_encoded_again():
    record = trajectory("a", 1.0, sequences=((Span.fed(Producer.USER, [7]), sampled([101, 202])),))
    (sample,) = trajectory_samples(record, 1.0)
    assert sample.token_ids.tolist() == [7, 101, 202]
    assert sample.mask.tolist() == [False, True, True]


def test_a_sample_ends_with_its_last_trained_token():
    spans = (Span.fed(Producer.USER, [1, 2]), sampled([3]), Span.fed(Producer.ENVIRONMENT, [4, 5, 6]))
    (sample,) = trajectory_samples(trajectory("a", 1.0, sequences=(spans,)), 0.5)
    assert sample.token_ids.tolist() == [1, 2, 3]


def test_a_branch_shares_its_origin_as_context_and_every_token_is_trained_once():
    start, first = Span.fed(Producer.USER, [1]), sampled([2, 3])
    record = trajectory("a", 1.0, sequences=((start, first), (start, first.as_context(), sampled([4]))))
    samples = trajectory_samples(record, 1.0)
    assert sum(s.masked_tokens for s in samples) == record.trained_tokens == 3
    assert samples[1].mask.tolist() == [False, False, False, True]


def test_a_span_that_would_be_trained_in_two_sequences_is_refused():
    start, first = Span.fed(Producer.USER, [1]), sampled([2, 3])
    with pytest.raises(RecordError, match="two sequences"):
        trajectory_samples(trajectory("a", 1.0, sequences=((start, first), (start, first))), 1.0)


def test_a_sample_claims_the_oldest_version_of_what_it_trains():
    mixed = Span(
        Producer.POLICY, np.array([5, 6], np.int32), np.array([-1, -1], np.float32), np.ones(2, np.bool_),
        (VersionSpan(Version(0, 3), 0, 1), VersionSpan(Version(0, 4), 1, 2)),
    )  # fmt: skip
    (sample,) = trajectory_samples(
        trajectory("a", 1.0, sequences=((Span.fed(Producer.USER, [1]), mixed),)), 1.0
    )
    assert sample.version == Version(0, 3)


def test_an_empty_trajectory_and_one_without_trained_tokens_give_no_samples():
    assert trajectory_samples(trajectory("a", 1.0, sequences=()), 1.0) == []
    assert trajectory_samples(trajectory("a", 1.0, sequences=((),)), 1.0) == []
    assert trajectory_samples(trajectory("a", 1.0, sequences=((Span.fed(Producer.USER, [1]),),)), 1.0) == []


def _with_first_token_trained() -> Trajectory:
    return trajectory("a", 1.0, sequences=((sampled([1, 2]),),))


def test_what_cannot_be_trained_is_refused_with_the_program_named():
    with pytest.raises(RecordError, match="sample a: the first token has no context"):
        trajectory_samples(_with_first_token_trained(), 1.0)
    spans = (Span.fed(Producer.USER, [1]), sampled([2], logprob=float("nan")))
    with pytest.raises(RecordError, match=r"sample a: .* no behaviour log-probability"):
        trajectory_samples(trajectory("a", 1.0, sequences=(spans,)), 1.0)
    with pytest.raises(RecordError, match="an advantage is not finite"):
        trajectory_samples(trajectory("a", 1.0), float("inf"))
    with pytest.raises(RecordError, match=r"must have shape \(2,\)"):
        demonstration([1, 2], [False, True, True])


def test_token_mean_counts_every_token_the_same_and_sequence_mean_every_trajectory():
    one = demonstration([1, 2, 3], [False, True, True], origin="a")
    branch = demonstration([1, 2], [False, True], origin="a")
    other = demonstration([1, 2, 3, 4, 5, 6], [False, True, True, True, True, True], origin="b")
    assert token_weights([one, branch, other], "token_mean") == pytest.approx([1 / 8] * 3)
    assert token_weights([one, branch, other], "sequence_mean") == pytest.approx([1 / 6, 1 / 6, 1 / 10])
    empty: list[Sample] = [demonstration([1, 2], [False, False])]
    with pytest.raises(RecordError, match="no token to train"):
        token_weights(empty, "token_mean")
