"""PPO's critic, from a batch's values to its own optimizer, on real forward passes of tiny models."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from sostenuto.errors import ConfigError, RecordError
from sostenuto.records import Producer, Span, Trajectory
from sostenuto.trainer.algorithms import GRPO, PPO, SFT
from sostenuto.trainer.checkpoint import restore_checkpoint, save_checkpoint
from sostenuto.trainer.learner import Learner
from sostenuto.trainer.optimizer import Optimizer
from sostenuto.trainer.parts import Critic, CriticHead, CriticModel
from sostenuto.trainer.publication.snapshot import unique_tensors
from sostenuto.trainer.reports import StepReport
from sostenuto.trainer.samples import Sample, demonstration
from sostenuto.trainer.settings import Schedule
from sostenuto.types import Version
from trainer_world import (
    V0,
    Recorder,
    credit_by,
    learner,
    random_samples,
    sampled,
    trajectory,
    write_gpt2,
    write_model,
)

CRITICS: list[Critic] = [CriticHead(), CriticHead(coefficient=0.5), CriticModel()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gpt2(tmp_path_factory.mktemp("gpt2"))


class CriticRecorder(Recorder):
    def step(self) -> tuple[float, bool]:
        super().step()
        return 0.0, True


def exactly(gpt2: Path, critic: Critic | None, microbatch_tokens: int = 4096) -> Learner:
    """In float64, without moving, and with a critic that says something."""
    subject = learner(gpt2, critic=critic, microbatch_tokens=microbatch_tokens)
    subject.policy.module.double()
    subject.optimizer = CriticRecorder(subject.policy.module, subject.settings)
    if subject.critic is not None:
        subject.critic.module.double()
        with torch.no_grad():
            subject.critic.head.weight.copy_(torch.linspace(-0.3, 0.4, 16))
        subject.critic.optimizer = CriticRecorder(subject.critic.module, subject.settings)
    return subject


def credited_samples(count: int = 6) -> list[Sample]:
    """With values and returns that somebody said."""
    noise = np.random.default_rng(8)

    def known(sample: Sample) -> NDArray[np.float32]:
        return np.where(sample.mask, noise.normal(0, 0.5, len(sample)), np.nan).astype(np.float32)

    return [
        replace(sample, version=Version(0, -1), extras={"value": known(sample), "return": known(sample)})
        for sample in random_samples(count)
    ]


def recorded(optimizer: Optimizer) -> dict[str, torch.Tensor]:
    assert isinstance(optimizer, Recorder)
    return optimizer.gradient


@pytest.mark.parametrize("critic", CRITICS, ids=["head", "shared", "model"])
@pytest.mark.parametrize("budget", [4096, 16])
def test_the_gradients_of_policy_and_critic_are_those_of_finite_differences(
    gpt2: Path, critic: Critic, budget: int
):
    samples, algorithm = credited_samples(), PPO(critic=critic, correction=None)
    subject = exactly(gpt2, critic, microbatch_tokens=budget)
    assert subject.critic is not None
    subject.learn(samples, algorithm)
    policy, values = recorded(subject.optimizer), recorded(subject.critic.optimizer)
    coefficient = critic.coefficient if isinstance(critic, CriticHead) else 0.0
    layer = "h.1.mlp.c_fc.weight"
    assert set(values) >= {"head.weight", "head.bias"}
    places: list[tuple[nn.Module, str, tuple[int, ...], dict[str, torch.Tensor], float]] = [
        (subject.policy.module, f"transformer.{layer}", (5, 20), policy, coefficient),
        (subject.critic.module, "head.weight", (3,), values, 1.0),
        (subject.critic.module, "head.bias", (0,), values, 1.0),
    ]
    if isinstance(critic, CriticModel):
        places.append((subject.critic.module, f"trunk.{layer}", (5, 20), values, 1.0))
    for module, name, place, gradient, weight in places:
        parameter = dict(module.named_parameters())[name]
        changes: list[float] = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                parameter[place] += step
            report = subject.learn(samples, algorithm)
            changes.append(report.loss + weight * (report.value_loss or 0.0))
            with torch.no_grad():
                parameter[place] -= step
        slope = (changes[0] - changes[1]) / 2e-6
        assert float(gradient[name][place]) == pytest.approx(slope, rel=1e-4, abs=1e-8), name


@pytest.mark.parametrize("critic", [CriticHead(), CriticModel()], ids=["head", "model"])
def test_a_critic_apart_changes_nothing_in_the_gradient_of_the_policy(gpt2: Path, critic: Critic):
    samples = credited_samples()
    alone = exactly(gpt2, None)
    alone.learn(samples, GRPO(loss=PPO().loss))
    beside = exactly(gpt2, critic)
    beside.learn(samples, PPO(critic=critic))
    expected, found = recorded(alone.optimizer), recorded(beside.optimizer)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-14)


# ---- steps ----


def weights_of(subject: Learner) -> dict[str, torch.Tensor]:
    state = {f"policy.{name}": value.clone() for name, value in subject.policy.module.state_dict().items()}
    assert subject.critic is not None
    return state | {f"critic.{name}": value.clone() for name, value in subject.critic.tensors().items()}


def moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    """Whose weights."""
    kinds = {"policy": "policy.", "critic": "critic.weights."}
    return {
        who
        for who, prefix in kinds.items()
        if any(
            not torch.equal(after[name], value) for name, value in before.items() if name.startswith(prefix)
        )
    }


@pytest.mark.parametrize(
    "critic", [CriticHead(warmup_steps=2), CriticModel(warmup_steps=2)], ids=["head", "model"]
)
def test_while_it_warms_up_the_critic_learns_alone(folder: Path, critic: Critic):
    algorithm = PPO(critic=critic, minibatches=2)
    subject = learner(folder, critic=critic)
    for number in range(3):
        before = weights_of(subject)
        report = subject.learn(credited_samples(), algorithm)
        assert report.refused == ""
        assert moved(before, weights_of(subject)) == ({"critic"} if number < 2 else {"critic", "policy"})
        assert (report.grad_norm > 0) is (number == 2)
        assert report.entropy > 0
        assert (subject.version is None) is (number == 2)
    assert subject.optimizer.steps == 2
    assert subject.critic is not None
    assert subject.critic.optimizer.steps == 6


def test_supervised_steps_leave_the_critic_as_it_is(folder: Path):
    subject = learner(folder, critic=CriticModel())
    subject.learn(credited_samples(), PPO(critic=CriticModel()))
    before = weights_of(subject)
    subject.fit([demonstration([1, 2, 3], [False, True, True])], SFT())
    assert moved(before, weights_of(subject)) == {"policy"}
    assert subject.critic is not None
    assert subject.critic.optimizer.steps == 1


@pytest.mark.parametrize("broken", ["policy", "critic"])
def test_a_gradient_that_is_not_finite_moves_neither(folder: Path, broken: str):
    subject = learner(folder, critic=CriticModel())
    assert subject.critic is not None
    samples = credited_samples()
    subject.learn(samples, PPO(critic=CriticModel()))
    before = weights_of(subject)
    module = subject.policy.module if broken == "policy" else subject.critic.module
    last = list(module.parameters())[-1]
    handle = cast("Any", last).register_hook(lambda gradient: gradient * math.nan)  # pyright: ignore[reportUnknownLambdaType]
    report = subject.learn(samples, PPO(critic=CriticModel()))
    assert "not finite" in report.refused or "nan" in report.refused
    assert moved(before, weights_of(subject)) == set()
    assert (subject.step, subject.critic.batches, subject.critic.optimizer.steps) == (1, 1, 1)
    handle.remove()
    assert subject.learn(samples, PPO(critic=CriticModel())).refused == ""


def test_what_a_critic_needs_is_asked_for(folder: Path):
    subject = learner(folder, critic=CriticHead())
    with pytest.raises(RecordError, match="program-0: a trained token has no 'value'; ask the trainer"):
        subject.learn(random_samples(2), PPO())
    with pytest.raises(ConfigError, match="the trainer was opened with None"):
        learner(folder).learn(credited_samples(), PPO())
    with pytest.raises(ConfigError, match="critic: the method has CriticModel"):
        subject.learn(credited_samples(), PPO(critic=CriticModel()))
    with pytest.raises(ConfigError, match="there is no critic"):
        learner(folder).values(random_samples(1))


# ---- what is kept, and what is refused ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("critic", CRITICS, ids=["head", "shared", "model"])
def test_a_resumed_critic_is_the_same_to_the_last_bit(
    tmp_path: Path, folder: Path, critic: Critic, dtype: str
):
    critic = critic.model_copy(update={"warmup_steps": 1})
    algorithm, samples = PPO(critic=critic, minibatches=2), credited_samples()
    straight = learner(folder, critic=critic, dtype=dtype)
    for _ in range(2):
        straight.learn(samples, algorithm)
    path = save_checkpoint(straight, tmp_path, Version(0, 2), source=folder)
    resumed = learner(folder, critic=critic, dtype=dtype)
    restore_checkpoint(resumed, path)
    assert straight.critic is not None
    assert resumed.critic is not None
    assert resumed.critic.batches == 2
    straight.name(Version(0, 2))
    for subject in (straight, resumed):
        for _ in range(2):
            subject.learn(samples, algorithm)
    expected, found = weights_of(straight), weights_of(resumed)
    assert found.keys() == expected.keys()
    assert any(name.startswith("critic.optimizer.exp_avg.") for name in found)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    assert [v.tobytes() for v in resumed.values(samples)] == [v.tobytes() for v in straight.values(samples)]


def test_a_checkpoint_without_this_critic_is_refused(tmp_path: Path, folder: Path):
    none = save_checkpoint(learner(folder), tmp_path / "none", Version(0, 1), source=folder)
    with pytest.raises(ConfigError, match=r"version-0\.1: it has no critic"):
        restore_checkpoint(learner(folder, critic=CriticHead()), none)
    head = learner(folder, critic=CriticHead())
    path = save_checkpoint(head, tmp_path / "head", Version(0, 1), source=folder)
    with pytest.raises(ConfigError, match="a critic of another shape"):
        restore_checkpoint(learner(folder, critic=CriticModel()), path)
    restore_checkpoint(learner(folder), path)


@pytest.mark.parametrize("critic", [CriticHead(), CriticModel()], ids=["head", "model"])
def test_a_publication_never_carries_the_critic(folder: Path, critic: Critic):
    plain, beside = learner(folder), learner(folder, critic=critic)
    expected = unique_tensors(plain.policy.module.state_dict())
    found = unique_tensors(beside.policy.module.state_dict())
    assert [(name, tensor.shape) for name, tensor in found] == [(n, t.shape) for n, t in expected]


def test_a_critic_begins_as_its_own_folder_says_and_may_have_another_shape(folder: Path, tmp_path: Path):
    other = write_model(tmp_path, layers=1, seed=7)
    subject = learner(folder, critic=CriticModel(), critic_folder=other)
    assert subject.critic is not None
    assert subject.critic.module.get_submodule("trunk.layers.0") is not None
    assert len(list(subject.critic.module.get_submodule("trunk.layers").children())) == 1
    assert all(
        (found[s.mask] == 0).all()
        for s, found in zip(credited_samples(), subject.values(credited_samples()), strict=True)
    )


def test_a_critic_with_another_tokenizer_or_too_few_rows_is_refused_naming_both(folder: Path, tmp_path: Path):
    other = write_model(tmp_path / "other", texts=12)
    said = rf"critic: the tokenizers of {other} \(12 tokens\) and of the policy {folder} \(20 tokens\)"
    with pytest.raises(ConfigError, match=said):
        learner(folder, critic=CriticModel(), critic_folder=other)
    small = write_model(tmp_path / "small", rows=16)
    with pytest.raises(ConfigError, match=rf"critic {small}: it has rows for 16 tokens, the policy {folder}"):
        learner(folder, critic=CriticModel(), critic_folder=small)
    broken = write_model(tmp_path / "broken")
    config = broken / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "hidden_size": 32}))
    with pytest.raises(ConfigError, match=rf"critic: model {broken}: weights do not fit"):
        learner(folder, critic=CriticModel(), critic_folder=broken)


# ---- learning ----


@pytest.mark.parametrize(
    "critic",
    [
        CriticHead(clip=None, schedule=Schedule(learning_rate=5e-2)),
        CriticModel(schedule=Schedule(learning_rate=5e-3)),
    ],
    ids=["head", "model"],
)
def test_single_trajectories_and_a_critic_teach_which_token_pays(folder: Path, critic: Critic):
    """One of two prompts pays 1 more whatever is said, and the critic comes to know it."""
    algorithm = PPO(critic=critic)
    subject = learner(folder, critic=critic, schedule={"learning_rate": 5e-3})
    noise = np.random.default_rng(1)
    options = {
        prompt: [demonstration([prompt, token], [False, True]) for token in range(20)] for prompt in (1, 2)
    }
    first = [float(found[1]) for found in subject.logprobs(options[1], 1.0)]
    paying = int(np.argsort(first)[-4])
    assert math.exp(first[paying]) < 0.2
    reports: list[StepReport] = []
    for number in range(1, 61):
        tables = {p: [float(f[1]) for f in subject.logprobs(tokens, 1.0)] for p, tokens in options.items()}
        groups: list[tuple[Trajectory, ...]] = []
        for index in range(64):
            prompt = 1 + index % 2
            table = np.exp(tables[prompt])
            token = int(noise.choice(20, p=table / table.sum()))
            span = sampled([token], version=subject.version or V0, logprob=tables[prompt][token])
            reward = float(prompt == 2) + float(token == paying)
            start = Span.fed(Producer.USER, [prompt])
            groups.append((trajectory(f"{index}", reward, group=f"{index}", sequences=((start, span),)),))
        reports.append(subject.learn(credit_by(subject, groups, algorithm), algorithm))
        assert reports[-1].refused == ""
        subject.name(Version(0, number))
    for prompt in (1, 2):
        assert math.exp(float(subject.logprobs(options[prompt], 1.0)[paying][1])) > 0.85, prompt
    explained = [report.explained_variance or 0.0 for report in reports]
    assert abs(explained[0]) < 0.05
    assert explained[-1] > 0.9
