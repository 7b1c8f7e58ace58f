import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sostenuto.trainer.batching import collate, plan
from trainer_world import random_samples


@given(st.lists(st.integers(1, 300), max_size=60), st.integers(50, 2000))
def test_every_sample_is_in_one_micro_batch_within_the_budget_and_half_of_it_is_real(
    lengths: list[int], budget: int
):
    batches = plan(lengths, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        padded = len(batch) * max(lengths[index] for index in batch)
        assert padded <= budget or len(batch) == 1
        assert sum(lengths[index] for index in batch) >= padded / 2


def test_a_masked_token_is_predicted_from_the_position_before_it():
    samples = random_samples(5)
    batch = collate(samples, [3, 0], [0.1] * 5, [False] * 5)
    for row, index in enumerate(batch.indices):
        here = batch.rows == row
        positions = np.flatnonzero(samples[index].mask)
        assert batch.columns[here].tolist() == (positions - 1).tolist()
        assert batch.targets[here].tolist() == samples[index].token_ids[positions].tolist()
        assert batch.behaviour[here].tolist() == samples[index].logprobs[positions].tolist()
