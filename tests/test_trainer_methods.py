"""Every method on real forward passes of tiny models, from rewards to weights."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from sostenuto.errors import ConfigError
from sostenuto.records import Producer, Span, Trajectory
from sostenuto.trainer.algorithms import (
    CISPO,
    GRPO,
    GSPO,
    RECIPES,
    RLOO,
    SAPO,
    Algorithm,
    AnyAlgorithm,
    DecoupledPPO,
    DrGRPO,
    Reinforce,
)
from sostenuto.trainer.learner import Learner
from sostenuto.trainer.model import load_policy, load_reference
from sostenuto.trainer.parts import (
    KL,
    TIS,
    BatchNormalized,
    GroupRelative,
    GSPOClip,
    IcePop,
    PolicyGradient,
    PPOClip,
    Rejection,
)
from sostenuto.trainer.penalties import distances
from sostenuto.trainer.samples import Sample
from sostenuto.trainer.updates import minibatches
from sostenuto.trainer.wire import sample_from_wire, sample_to_wire
from sostenuto.types import Version
from trainer_world import (
    V0,
    Recorder,
    credit_by,
    learner,
    random_samples,
    sampled,
    trajectory,
    write_bigram,
    write_gpt2,
    write_model,
)

READ = TypeAdapter[Algorithm](AnyAlgorithm)
FOUR = {0: {1: 0.5, 2: 0.2, 3: 0.2}, 1: {1: 0.1, 2: 0.6}, 2: {0: 0.7}, 3: {3: 0.4, 0: 0.4}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gpt2(tmp_path_factory.mktemp("gpt2"))


def choices(subject: Learner, size: int) -> tuple[list[Sample], NDArray[np.float64]]:
    """One sample for each token after token 1, and the policy's probabilities."""
    nothing = np.zeros(2, dtype=np.float32)
    options = [
        Sample(np.array([1, token], np.int32), np.array([False, True]), nothing, nothing)
        for token in range(size)
    ]
    logprobs = np.array([float(found[1]) for found in subject.logprobs(options, 1.0)])
    return options, np.exp(logprobs)


def chosen(name: str, token: int, version: Version, *, reward: float, p: float) -> Trajectory:
    """Token 1, and what was sampled after it."""
    span = sampled([token], version=version, logprob=math.log(p))
    group, _, _ = name.partition("-")
    return trajectory(name, reward, group=group, sequences=((Span.fed(Producer.USER, [1]), span),))


# ---- whole methods ----


@pytest.mark.parametrize("method", sorted(RECIPES.keys() - {"opd"}))
def test_every_method_learns_to_choose_what_pays(folder: Path, method: str):
    algorithm = RECIPES[method](group_size=16)
    subject = learner(folder, critic=algorithm.critic, schedule={"learning_rate": 2e-2})
    noise = np.random.default_rng(0)
    _, before = choices(subject, 20)
    paying = int(np.argsort(before)[-4])
    assert before[paying] < 0.2
    for number in range(1, 41):
        _, table = choices(subject, 20)
        now = subject.version or V0
        groups = [
            tuple(
                chosen(f"{row}-{index}", token, now, reward=float(token == paying), p=float(table[token]))
                for index, token in enumerate(picks)
            )
            for row, picks in enumerate(noise.choice(20, size=(4, 16), p=table / table.sum()).tolist())
        ]
        report = subject.learn(credit_by(subject, groups, algorithm), algorithm)
        assert report.refused == ""
        if algorithm.updates == 1:
            assert report.max_abs_dlogp == pytest.approx(0.0, abs=1e-5)
        subject.name(Version(0, number))
    _, after = choices(subject, 20)
    assert after[paying] > 0.85


def exactly(folder: Path, reference: Path | None = None) -> tuple[Learner, Recorder]:
    """In float64, and without moving."""
    subject = learner(folder)
    subject.policy.module.double()
    if reference is not None:
        subject.reference = load_reference(reference, subject.policy, "float32")
        subject.reference.module.double()
    subject.optimizer = recorder = Recorder(subject.policy.module, subject.settings)
    return subject, recorder


def near(folder: Path, count: int = 6) -> list[Sample]:
    """Samples whose engine was about right, so that bounds are met by some and not by all."""
    samples = random_samples(count)
    known = learner(folder).logprobs(samples, 1.0)
    noise = np.random.default_rng(4)
    return [
        replace(
            sample,
            logprobs=(now + noise.normal(0, 0.3, len(now))).astype(np.float32),
            rollout_logprobs=(now + noise.normal(0, 0.2, len(now))).astype(np.float32),
            version=Version(0, -1),
        )
        for sample, now in zip(samples, known, strict=True)
    ]


@pytest.mark.parametrize(
    "algorithm",
    [
        GRPO(),
        GRPO(loss=PPOClip(dual=2.0), correction=IcePop(low=0.8, high=1.3)),
        DrGRPO(aggregation_tokens=14),
        SAPO(),
        GRPO(correction=TIS(level="geometric"), rejection=Rejection(high=0.03)),
        GRPO(kl=KL(coefficient=0.3), correction=None),
        GRPO(kl=KL(coefficient=0.3, estimator="k1"), correction=None),
        GRPO(kl=KL(coefficient=0.3, estimator="exact")),
    ],
    ids=str,
)
def test_the_gradient_of_a_method_is_that_of_finite_differences(
    gpt2: Path, folder: Path, algorithm: Algorithm
):
    del folder
    samples = near(gpt2)
    subject, recorder = exactly(gpt2, gpt2 if algorithm.kl else None)
    if subject.reference is not None:
        with torch.no_grad():
            for weight in subject.reference.module.parameters():
                weight.mul_(1.02)
    subject.learn(samples, algorithm)
    name = "transformer.h.1.mlp.c_fc.weight"
    gradient = recorder.gradient[name]
    weight = dict(subject.policy.module.named_parameters())[name]
    step = 1e-6
    for row, column in ((0, 3), (5, 20), (11, 40)):
        losses: list[float] = []
        for sign in (1, -1):
            with torch.no_grad():
                weight[row, column] += sign * step
            losses.append(subject.learn(samples, algorithm).loss)
            with torch.no_grad():
                weight[row, column] -= sign * step
        found = float(gradient[row, column])
        assert found == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("algorithm", [GSPO(), CISPO(), DrGRPO(), DecoupledPPO(minibatches=1)], ids=str)
def test_micro_batches_do_not_change_the_gradient(gpt2: Path, algorithm: Algorithm):
    samples = near(gpt2)
    gradients: list[dict[str, torch.Tensor]] = []
    for tokens in (4096, 16):
        subject, recorder = exactly(gpt2)
        subject.settings = subject.settings.model_copy(update={"microbatch_tokens": tokens})
        subject.learn(samples, algorithm)
        gradients.append(recorder.gradient)
    for name, whole in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], whole, rtol=1e-7, atol=1e-10)


def test_what_is_rejected_still_counts_in_the_denominator(gpt2: Path):
    samples = near(gpt2)
    far = [replace(samples[0], logprobs=(samples[0].logprobs - 3.0).astype(np.float32)), *samples[1:]]
    strict = GRPO(rejection=Rejection(estimator="k1", low=-1.0, high=1.0))
    report = exactly(gpt2)[0].learn(far, strict)
    assert report.rejected_share == pytest.approx(
        samples[0].masked_tokens / sum(sample.masked_tokens for sample in samples)
    )
    silent = replace(far[0], advantages=np.zeros_like(far[0].advantages))
    assert report.loss == pytest.approx(exactly(gpt2)[0].learn([silent, *far[1:]], GRPO()).loss)


# ---- the distance to a reference ----


def bigrams(tmp_path: Path) -> tuple[Learner, Path]:
    """A policy, and a reference that says something else."""
    policy = write_bigram(tmp_path / "policy", FOUR, size=4)
    other = {0: {1: 0.25, 2: 0.25, 3: 0.4}, 1: {1: 0.3, 2: 0.3}, 2: {0: 0.4}, 3: {3: 0.1, 0: 0.6}}
    return learner(policy), write_bigram(tmp_path / "reference", other, size=4)


def after_zero(token: int, logprob: float) -> Sample:
    return Sample(
        np.array([0, token], np.int32), np.array([False, True]),
        np.full(2, logprob, np.float32), np.zeros(2, np.float32), V0,
    )  # fmt: skip


P = np.array([0.1, 0.5, 0.2, 0.2])
Q = np.array([0.1, 0.25, 0.25, 0.4])


def test_a_divergence_compares_whole_distributions_of_two_models(tmp_path: Path):
    subject, reference = bigrams(tmp_path)
    subject.reference = load_reference(reference, subject.policy, "float32")
    kl = KL(coefficient=0.5, estimator="exact")
    report = subject.learn([after_zero(1, math.log(0.5))], GRPO(kl=kl))
    divergence = float((P * np.log(P / Q)).sum())
    assert report.kl == pytest.approx(divergence, rel=1e-5)
    assert report.loss == pytest.approx(0.5 * divergence, rel=1e-5)


def test_of_the_likeliest_tokens_alone_the_others_count_as_one(tmp_path: Path):
    subject, reference = bigrams(tmp_path)
    subject.reference = load_reference(reference, subject.policy, "float32")
    report = subject.learn([after_zero(1, 0.0)], GRPO(kl=KL(coefficient=1, estimator="exact", top_k=1)))
    assert report.kl == pytest.approx(0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75), rel=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k2"])
def test_on_its_own_samples_the_gradient_of_an_estimate_is_that_of_the_divergence(
    tmp_path: Path, estimator: str
):
    """Weighed by how often each token is sampled, one sample of each gives the expectation."""
    folder = write_bigram(tmp_path / "policy", FOUR, size=4)
    _, reference = bigrams(tmp_path / "other")
    gradients: list[torch.Tensor] = []
    for kind in (estimator, "exact"):
        expected: torch.Tensor | None = None
        for token, p in enumerate(P.tolist()):
            subject, recorder = exactly(folder, reference)
            algorithm = GRPO(kl=KL.model_validate({"coefficient": 1, "estimator": kind}))
            subject.learn([after_zero(token, math.log(p))], algorithm)
            part = p * recorder.gradient["lm_head.weight"]
            expected = part if expected is None else expected + part
        assert expected is not None
        gradients.append(expected)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-8)


def test_a_method_with_a_reference_is_refused_without_one(folder: Path):
    with pytest.raises(ConfigError, match="no reference model"):
        learner(folder).learn(random_samples(2), GRPO(kl=KL(coefficient=0.1)))


def test_a_reference_with_another_tokenizer_is_refused_naming_both(folder: Path, tmp_path: Path):
    other = write_model(tmp_path, texts=12)
    said = rf"reference: the tokenizers of {tmp_path} \(12 tokens\) and of the policy {folder} \(20 tokens\)"
    with pytest.raises(ConfigError, match=said):
        load_reference(other, load_policy(folder, "float32"), "float32")


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_distance_that_is_taken_off_a_reward_is_the_sum_over_its_tokens(estimator: str):
    one = Sample(
        np.arange(4, dtype=np.int32), np.array([False, True, False, True]),
        np.log(np.array([1, 0.5, 1, 0.2], np.float32)), np.zeros(4, np.float32), V0, "a",
    )  # fmt: skip
    other = replace(one, mask=np.array([False, True, False, False]))
    against = np.log(np.array([1, 0.25, 1, 0.4], np.float32))
    d = np.log([0.5 / 0.25, 0.2 / 0.4])
    each = {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d}[estimator]
    found = distances([one, other], [against, against], estimator)
    assert found == {"a": pytest.approx(each.sum() + each[0], rel=1e-5)}


# ---- several steps from one batch ----


def test_several_steps_compare_with_the_weights_that_sampled_and_count_as_steps(gpt2: Path):
    subject = learner(gpt2)
    samples = [
        replace(s, logprobs=now)
        for s, now in zip(random_samples(8), subject.logprobs(random_samples(8), 1.0), strict=True)
    ]
    report = subject.learn(samples, GRPO(epochs=3, minibatches=2))
    assert report.step == subject.step == 6
    assert report.masked_tokens == 3 * sum(sample.masked_tokens for sample in samples)
    assert report.engine_difference == pytest.approx(0.0, abs=1e-5)
    assert report.update_difference is not None
    assert report.update_difference > 1e-4


def test_a_decoupled_step_clips_what_the_batch_changed_and_weighs_what_came_before(gpt2: Path):
    samples = near(gpt2)
    first = exactly(gpt2)[0].learn(samples, DecoupledPPO(minibatches=1, correction=TIS(high=1e6)))
    now = exactly(gpt2)[0].logprobs(samples, 1.0)
    tokens = sum(sample.masked_tokens for sample in samples)
    expected = -sum(
        float((np.exp(c - s.logprobs) * s.advantages)[s.mask].sum())
        for c, s in zip(now, samples, strict=True)
    )
    assert first.loss == pytest.approx(expected / tokens, rel=1e-5)
    assert first.clip_share == 0


@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 9))
def test_every_epoch_has_every_sample_once_and_programs_stay_together(epochs: int, parts: int, programs: int):
    samples = [replace(s, origin=f"p{n // 2}") for n, s in enumerate(random_samples(2 * programs))]
    cut = list(minibatches(samples, epochs=epochs, parts=parts, seed=1))
    seen = [id(sample) for part in cut for sample in part]
    assert sorted(seen) == sorted([id(sample) for sample in samples] * epochs)
    for part in cut:
        origins = [sample.origin for sample in part]
        assert all(origins.count(origin) == 2 for origin in origins)


# ---- how they are said ----


@pytest.mark.parametrize("method", sorted(RECIPES))
def test_a_method_travels_as_json(method: str):
    algorithm = RECIPES[method]()
    assert READ.validate_json(algorithm.model_dump_json()) == algorithm
    assert READ.validate_python({"method": method}) == algorithm


def test_samples_travel_with_what_is_known_of_them():
    (sample,) = random_samples(1)
    known = np.arange(len(sample), dtype=np.float32)
    there = sample_from_wire(sample_to_wire(replace(sample, extras={"start": known})))
    np.testing.assert_array_equal(there.extras["start"], known)


def test_a_table_changes_what_it_names_and_keeps_the_rest_of_the_recipe():
    made = READ.validate_python({"method": "dr_grpo", "loss": {"low": 0.1}})
    assert made.loss == PPOClip(low=0.1, high=0.2)
    assert made.advantage == GroupRelative(normalize_std=False)
    other = READ.validate_python({"loss": {"kind": "gspo_clip"}, "correction": "none"})
    assert (other.loss, other.correction) == (GSPOClip(), None)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"method": "gsp"}, "did you mean 'gspo'"),
        ({"loss": {"kind": "ppo"}}, "'ppo' is none of policy_gradient, ppo_clip"),
        ({"group_size": 1}, "group_size: group_relative compares"),
        ({"method": "rloo", "group_size": 1}, "group_size: leave_one_out compares"),
        ({"method": "reinforce", "zero_spread": "skip"}, "zero_spread"),
        ({"aggregation": "sequence_sum"}, "aggregation_tokens"),
        ({"kl": {"coefficient": 0.1, "estimator": "k3"}}, "k3 as a loss"),
        ({"kl": {"coefficient": 0.1, "estimator": "exact", "place": "reward"}}, "exact is for"),
        ({"kl": {"coefficient": 0.1, "top_k": 4}}, "top_k is for"),
        ({"correction": {"low": 1.5}}, "above 1"),
        ({"rejection": {"high": 0.1, "low": 0.05}}, "above 0"),
        ({"advantage": {"kind": "gae"}, "zero_spread": "keep"}, "gae asks a critic"),
        ({"critic": {"kind": "head"}}, "nothing else does"),
        ({"method": "ppo", "advantage": {"lambda_": 1.5}}, "less than or equal to 1"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_remedy(given: dict[str, object], said: str):
    with pytest.raises(ValidationError, match=said):
        READ.validate_python(given)


def test_only_methods_that_compare_members_need_several():
    assert Reinforce().compares_group is False
    assert Reinforce(advantage=BatchNormalized()).compares_group is False
    assert RLOO(loss=PolicyGradient()).compares_group is True
