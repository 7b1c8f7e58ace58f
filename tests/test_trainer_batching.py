import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sostenuto.trainer.batching import collate, plan
from sostenuto.trainer.samples import demonstration
from trainer_world import random_samples

LENGTHS, BUDGETS = st.lists(st.integers(1, 300), max_size=60), st.integers(50, 2000)


@given(LENGTHS, BUDGETS)
def test_every_sample_is_in_one_micro_batch_within_the_budget_and_no_two_would_fit_in_one(
    lengths: list[int], budget: int
):
    batches = plan(lengths, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    tokens = [sum(lengths[index] for index in batch) for batch in batches]
    assert all(size <= budget for size, batch in zip(tokens, batches, strict=True) if len(batch) > 1)
    sizes = sorted(tokens)
    assert len(sizes) < 2 or sizes[0] + sizes[1] > budget


@given(LENGTHS, BUDGETS)
def test_where_a_model_pads_half_of_a_micro_batch_is_real(lengths: list[int], budget: int):
    batches = plan(lengths, budget, padded=True)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        padded = len(batch) * max(lengths[index] for index in batch)
        assert padded <= budget or len(batch) == 1
        assert sum(lengths[index] for index in batch) >= padded / 2


def test_a_masked_token_is_predicted_from_the_position_before_it():
    samples = random_samples(5)
    batch = collate(samples, [3, 0], [0.1] * 5, [False] * 5)
    starts = np.cumsum([0, *batch.lengths])
    for row, index in enumerate(batch.indices):
        here, masked = batch.sequences == row, np.flatnonzero(samples[index].mask)
        context = batch.token_ids[starts[row] : starts[row + 1]]
        assert context.tolist() == samples[index].token_ids[: masked[-1]].tolist()
        assert (batch.positions[here] - starts[row]).tolist() == (masked - 1).tolist()
        assert batch.targets[here].tolist() == samples[index].token_ids[masked].tolist()
        assert batch.behaviour[here].tolist() == samples[index].logprobs[masked].tolist()


def test_what_stands_behind_the_last_masked_token_does_not_run():
    batch = collate([demonstration([5, 6, 7, 8, 9], [False, True, True, False, False])], [0], [1.0], [False])
    assert (batch.token_ids.tolist(), batch.lengths) == ([5, 6], (2,))
