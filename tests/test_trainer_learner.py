"""The learner on real forward passes of tiny models."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sostenuto.errors import ConfigError, RecordError
from sostenuto.records import Producer, Span
from sostenuto.trainer.algorithms import GRPO, SFT
from sostenuto.trainer.credit import credit
from sostenuto.trainer.learner import Learner
from sostenuto.trainer.model import load_policy
from sostenuto.trainer.parts import Aggregation
from sostenuto.trainer.samples import Sample, demonstration
from sostenuto.types import Version
from trainer_world import (
    V0,
    Recorder,
    learner,
    random_samples,
    sampled,
    trajectory,
    write_bigram,
    write_gpt2,
    write_model,
)

P, U, B, D, A, C = range(6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gpt2(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def bigram(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """p(u | P) = 0.5, p(b | P, u) = 0.2, p(d | P, u, b) = 0.4."""
    table = {P: {U: 0.5}, U: {B: 0.2, A: 0.3}, B: {D: 0.4}, A: {C: 0.1}}
    return write_bigram(tmp_path_factory.mktemp("bigram"), table, size=6)


def chosen(*token_ids: int, logprob: float = -1.0, advantage: float = 1.0) -> Sample:
    """A prompt of one token and the response to it."""
    n = len(token_ids)
    return Sample(
        np.array(token_ids, dtype=np.int32), np.arange(n) > 0, np.full(n, logprob, dtype=np.float32),
        np.full(n, advantage, dtype=np.float32), V0, "program",
    )  # fmt: skip


def gradient(
    folder: Path, samples: list[Sample], algorithm: GRPO | SFT, *, microbatch_tokens: int = 4096
) -> tuple[float, dict[str, torch.Tensor], Learner]:
    """Loss and gradient in float64."""
    subject = learner(folder, microbatch_tokens=microbatch_tokens)
    subject.policy.module.double()
    subject.optimizer = recorder = Recorder(subject.policy.module, subject.settings)
    isinstance_grpo = isinstance(algorithm, GRPO)
    report = subject.learn(samples, algorithm) if isinstance_grpo else subject.fit(samples, algorithm)
    return report.loss, recorder.gradient, subject


def test_recorded_choices_are_scored_at_three_positions_of_one_forward_pass(bigram: Path):
    subject = learner(bigram)
    passes: list[tuple[int, ...]] = []
    subject.policy.module.base_model.register_forward_hook(
        lambda _module, _args, output: passes.append(tuple(output.last_hidden_state.shape[:2]))
    )
    (found,) = subject.logprobs([chosen(P, U, B, D)], 1.0)
    assert np.exp(found[1:]) == pytest.approx([0.5, 0.2, 0.4], rel=1e-5)
    assert math.isnan(found[0])
    assert passes == [(1, 3)]


def test_sft_scores_the_target_path_in_the_targets_own_contexts(bigram: Path):
    target = demonstration([P, U, A, C], [False, True, True, True])
    report = learner(bigram).fit([target], SFT())
    assert report.loss == pytest.approx(-np.log([0.5, 0.3, 0.1]).mean(), rel=1e-5)


def test_the_ratio_of_a_step_is_current_over_recorded(bigram: Path):
    """Recorded 0.5 / 1.2, now 0.5: r = 1.2, and the loss is -r A."""
    stale = replace(chosen(P, U, logprob=math.log(0.5 / 1.2), advantage=0.6), version=Version(0, -1))
    report = learner(bigram).learn([stale], GRPO())
    assert report.loss == pytest.approx(-1.2 * 0.6, rel=1e-5)
    assert report.clip_share == 0
    assert report.max_abs_dlogp == pytest.approx(math.log(1.2), rel=1e-4)


@pytest.mark.parametrize(("recorded", "advantage"), [(0.5 / 1.3, 1.0), (0.5 / 0.75, -1.0)])
def test_a_clipped_token_leaves_the_weights_without_a_gradient(
    bigram: Path, recorded: float, advantage: float
):
    stale = replace(chosen(P, U, logprob=math.log(recorded), advantage=advantage), version=Version(0, -1))
    report = learner(bigram).learn([stale], GRPO())
    assert (report.clip_share, report.grad_norm) == (1.0, 0.0)


def test_engine_and_update_difference_are_reported_apart(bigram: Path):
    """Engine v1 0.48, trainer v1 0.52, trainer now 0.50."""
    known = np.full(2, math.log(0.52), dtype=np.float32)
    sample = replace(chosen(P, U, logprob=math.log(0.48)), version=Version(0, -1), rollout_logprobs=known)
    report = learner(bigram).learn([sample], GRPO())
    assert report.engine_difference == pytest.approx(math.log(0.52 / 0.48), rel=1e-4)
    assert report.update_difference == pytest.approx(math.log(0.52 / 0.50), rel=1e-4)
    assert report.mean_abs_dlogp == pytest.approx(math.log(0.50 / 0.48), rel=1e-4)
    assert report.loss == pytest.approx(-0.50 / 0.48, rel=1e-4)


def test_a_fresh_sample_has_an_engine_difference_alone_and_a_stale_one_cannot_tell(bigram: Path):
    fresh = learner(bigram).learn([chosen(P, U, logprob=math.log(0.4))], GRPO())
    assert (fresh.engine_difference, fresh.update_difference) == (
        pytest.approx(math.log(1.25), rel=1e-4),
        0.0,
    )
    stale = replace(chosen(P, U, logprob=math.log(0.4)), version=Version(0, -1))
    report = learner(bigram).learn([stale], GRPO())
    assert report.engine_difference is report.update_difference is None
    assert report.mismatch_k3 == pytest.approx(1.25 - 1 - math.log(1.25), rel=1e-4)


def test_temperature_is_that_of_the_distribution_sampled_from(bigram: Path):
    (found,) = learner(bigram).logprobs([chosen(P, U)], 0.6)
    rows = np.array([0.5] + [0.1] * 5) ** (1 / 0.6)
    assert np.exp(found[1]) == pytest.approx(rows[0] / rows.sum(), rel=1e-5)


def test_rows_without_a_text_are_no_part_of_the_distribution(folder: Path):
    subject = learner(folder)
    assert (subject.policy.tokenizer_size, subject.policy.vocabulary_size) == (20, 24)
    everything = [chosen(1, token) for token in range(20)]
    total = sum(math.exp(found[1]) for found in subject.logprobs(everything, 1.0))
    assert total == pytest.approx(1.0, rel=1e-5)
    with pytest.raises(RecordError, match="no text"):
        subject.logprobs([chosen(1, 22)], 1.0)
    with pytest.raises(RecordError, match="beyond the model's vocabulary"):
        subject.logprobs([chosen(99, 1)], 1.0)


def test_padding_and_neighbours_do_not_change_log_probabilities(gpt2: Path):
    samples = random_samples(9)
    subject = learner(gpt2)
    subject.policy.module.double()
    together = subject.logprobs(samples, 1.0)
    for sample, found in zip(samples, together, strict=True):
        (alone,) = subject.logprobs([sample], 1.0)
        assert found[sample.mask] == pytest.approx(alone[sample.mask], abs=1e-6)
        assert np.isnan(found[~sample.mask]).all()


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("algorithm", [GRPO(), SFT()])
def test_any_cut_into_micro_batches_gives_the_same_gradient(
    gpt2: Path, algorithm: GRPO | SFT, aggregation: Aggregation
):
    chosen_algorithm = algorithm.model_copy(update={"aggregation": aggregation})
    samples = random_samples(12)
    loss, whole, _ = gradient(gpt2, samples, chosen_algorithm)
    for budget in (1, 30):
        part_loss, parts, _ = gradient(gpt2, samples, chosen_algorithm, microbatch_tokens=budget)
        assert part_loss == pytest.approx(loss, rel=1e-6)
        for name, value in whole.items():
            assert torch.allclose(parts[name], value, rtol=1e-6, atol=1e-9), name


@pytest.mark.parametrize("algorithm", [GRPO(correction=None), SFT(), GRPO(aggregation="sequence_mean")])
def test_the_gradient_is_that_of_finite_differences(gpt2: Path, algorithm: GRPO | SFT):
    samples = random_samples(4, seed=5)
    if isinstance(algorithm, GRPO):
        samples = [replace(sample, version=Version(0, -1)) for sample in samples]
    _, found, subject = gradient(gpt2, samples, algorithm)
    noise = np.random.default_rng(0)
    for name, parameter in subject.policy.module.named_parameters():
        place = tuple(int(noise.integers(n)) for n in parameter.shape)
        losses: list[float] = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                parameter[place] += step
            run = subject.learn if isinstance(algorithm, GRPO) else subject.fit
            losses.append(run(samples, algorithm).loss)  # pyright: ignore[reportArgumentType]
            with torch.no_grad():
                parameter[place] -= step
        slope = (losses[0] - losses[1]) / 2e-5
        assert float(found[name][place]) == pytest.approx(slope, rel=1e-4, abs=1e-8), name


def test_the_policy_loss_is_that_of_plain_arithmetic(folder: Path):
    """Random masks, stale samples, correction off: sum over tokens of the clipped loss over their number."""
    samples = [replace(sample, version=Version(0, -1)) for sample in random_samples(10, seed=3)]
    subject = learner(folder)
    now = subject.logprobs(samples, 1.0)
    terms: list[float] = []
    for sample, found in zip(samples, now, strict=True):
        for position in np.flatnonzero(sample.mask):
            exponent = float(found[position]) - float(sample.logprobs[position])
            r, a = math.exp(min(20.0, max(-20.0, exponent))), float(sample.advantages[position])
            terms.append(min(r * a, min(max(r, 0.8), 1.28) * a))
    report = subject.learn(samples, GRPO(correction=None))
    assert report.loss == pytest.approx(-sum(terms) / len(terms), rel=1e-4)
    assert report.masked_tokens == len(terms)


def test_learning_raises_good_choices_and_lowers_bad_ones(folder: Path):
    subject = learner(folder, schedule={"learning_rate": 1e-3})
    good, bad = chosen(1, 2, 3, advantage=1.0), chosen(4, 5, 6, advantage=-1.0)
    before = subject.logprobs([good, bad], 1.0)
    recorded = [replace(s, logprobs=found) for s, found in zip([good, bad], before, strict=True)]
    report = subject.learn(recorded, GRPO())
    after = subject.logprobs([good, bad], 1.0)
    assert (report.step, report.refused, report.mean_abs_dlogp) == (1, "", 0.0)
    assert (after[0][1:] > before[0][1:]).all()
    assert (after[1][1:] < before[1][1:]).all()


def test_fitting_until_every_masked_token_is_the_most_likely_one(folder: Path):
    subject = learner(folder, schedule={"learning_rate": 2e-2})
    samples = [
        demonstration([1, 2, 3, 4], [False, True, True, True]),
        demonstration([5, 4, 3], [False, True, True]),
    ]
    assert subject.exact(samples).exact_share < 1.0
    for _ in range(60):
        subject.fit(samples, SFT())
    found = subject.exact(samples)
    assert (found.exact_share, found.token_accuracy, found.masked_tokens) == (1.0, 1.0, 5)


def test_a_gradient_that_is_not_finite_leaves_everything_as_it_was(folder: Path):
    subject = learner(folder)
    name, parameter = next(iter(subject.policy.module.named_parameters()))
    with torch.no_grad():
        parameter[0, 0] = math.nan
    before = {key: value.clone() for key, value in subject.policy.module.state_dict().items()}
    report = subject.fit([demonstration([0, 1, 2], [False, True, True])], SFT())
    assert "the loss is nan" in report.refused
    assert (report.step, subject.step, subject.version, subject.optimizer.steps) == (0, 0, V0, 0)
    for key, value in subject.policy.module.state_dict().items():
        assert torch.equal(value.nan_to_num(7.0), before[key].nan_to_num(7.0)), (key, name)
    with torch.no_grad():
        parameter[0, 0] = 0.0
    assert subject.fit([demonstration([0, 1, 2], [False, True, True])], SFT()).refused == ""


def test_the_gradient_is_clipped_by_its_global_norm(folder: Path):
    subject = learner(folder, clip_norm=1e-3)
    report = subject.fit([demonstration([1, 2, 3], [False, True, True])], SFT())
    assert report.grad_norm > 1e-2


def test_a_bfloat16_model_moves_by_steps_that_it_could_not_hold_itself(folder: Path):
    """Small updates add up in the float32 master weights."""
    subject = learner(folder, dtype="bfloat16", schedule={"learning_rate": 1e-4})
    samples = [demonstration([1, 2, 3, 4], [False, True, True, True])]
    losses = [subject.fit(samples, SFT()).loss for _ in range(150)]
    assert subject.policy.dtype == "bfloat16"
    assert losses[-1] < losses[0] - 0.1


def test_batches_that_cannot_be_trained_say_why(folder: Path):
    subject = learner(folder)
    with pytest.raises(RecordError, match="no token to train"):
        subject.fit([demonstration([1, 2], [False, False])], SFT())
    with pytest.raises(RecordError, match="no token to train"):
        subject.learn([], GRPO())
    with pytest.raises(RecordError, match="no behaviour log-probability"):
        subject.learn([demonstration([1, 2], [False, True], origin="p")], GRPO())
    with pytest.raises(RecordError, match=r"sampled under 0\.9, the newest version is 0\.0"):
        subject.learn([replace(chosen(1, 2), version=Version(0, 9))], GRPO())


def test_a_version_is_never_used_twice(folder: Path):
    subject = learner(folder)
    subject.fit([demonstration([1, 2], [False, True])], SFT())
    assert subject.version is None
    with pytest.raises(ConfigError, match="used already"):
        subject.name(V0)
    subject.name(Version(0, 1))
    assert subject.version == Version(0, 1)


def test_a_folder_that_cannot_be_used_is_named_with_the_remedy(tmp_path: Path, folder: Path):
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        load_policy(tmp_path, "float32")
    copy = write_model(tmp_path / "m")
    config = copy / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 24', '"vocab_size": 30'))
    with pytest.raises(ConfigError, match=r"do not fit config\.json: .*embed_tokens.*24, 16.*30, 16"):
        load_policy(copy, "float32")
    (copy / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        load_policy(copy, "float32")
    config.unlink()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_policy(copy, "float32")


def test_groups_of_samples_and_their_rewards_teach_which_token_pays(folder: Path):
    """Sample, compare, credit, learn: the whole loop on a choice of one token, of which one is right."""
    subject = learner(folder, schedule={"learning_rate": 3e-3})
    noise = np.random.default_rng(0)
    options = [chosen(1, token) for token in range(20)]
    algorithm = GRPO(group_size=16)
    start = Span.fed(Producer.USER, [1])
    before = [float(found[1]) for found in subject.logprobs(options, 1.0)]
    paying = int(np.argsort(before)[-4])
    assert math.exp(before[paying]) < 0.2
    for number in range(1, 31):
        table = np.array([float(found[1]) for found in subject.logprobs(options, 1.0)])
        picks = noise.choice(20, size=(4, 16), p=np.exp(table) / np.exp(table).sum())
        batch: list[Sample] = []
        for group in picks.tolist():
            version = subject.version or V0
            spans = [sampled([token], version=version, logprob=float(table[token])) for token in group]
            members = tuple(
                trajectory(f"{index}", float(span.token_ids[0] == paying), sequences=((start, span),))
                for index, span in enumerate(spans)
            )
            batch += credit([members], algorithm)
        report = subject.learn(batch, algorithm)
        assert report.max_abs_dlogp == pytest.approx(0.0, abs=1e-5)
        subject.name(Version(0, number))
    assert math.exp(subject.logprobs([options[paying]], 1.0)[0][1]) > 0.9
