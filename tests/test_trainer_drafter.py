"""A draft model that learns beside the policy, and is published and saved with it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from sostenuto.errors import ConfigError, EngineError
from sostenuto.runtime.engine_view import EngineView
from sostenuto.runtime.engines_command import show_engines
from sostenuto.trainer.algorithms import GRPO
from sostenuto.trainer.checkpoint import restore_checkpoint, save_checkpoint
from sostenuto.trainer.client import TrainerClient
from sostenuto.trainer.drafter import Drafter, open_drafter
from sostenuto.trainer.model import load_policy
from sostenuto.trainer.samples import Sample
from sostenuto.trainer.settings import LearnerSettings
from sostenuto.types import Version
from trainer_world import V0, learner, random_samples, write_bigram, write_model

SIZE = 6
TABLE = {0: {1: 0.7}, 1: {2: 0.8}, 2: {0: 0.6, 3: 0.3}}
TEACHING = LearnerSettings(draft_learning_rate=1e-2)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bigram(tmp_path_factory.mktemp("policy"), TABLE, size=SIZE)


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return write_model(tmp_path / "draft", rows=SIZE, texts=SIZE, layers=1, seed=4)


def drafter_of(draft: Path, policy: Path) -> Drafter:
    opened = open_drafter(str(draft), load_policy(policy, "float32"), TEACHING)
    assert opened is not None
    return opened


def of_the_policy(count: int, *, seed: int, length: int = 24) -> list[Sample]:
    """Sequences that the policy draws: each token from the row of the one before."""
    rng = np.random.default_rng(seed)
    samples: list[Sample] = []
    for _ in range(count):
        tokens = [0]
        while len(tokens) < length:
            given = TABLE.get(tokens[-1], {})
            rest = (1 - sum(given.values())) / (SIZE - len(given))
            tokens.append(int(rng.choice(SIZE, p=[given.get(token, rest) for token in range(SIZE)])))
        nan, mask = np.full(length, np.nan, dtype=np.float32), np.arange(length) > 0
        samples.append(Sample(np.array(tokens, dtype=np.int32), mask, nan, nan, V0, ""))
    return samples


def test_it_comes_to_say_what_the_policy_samples(policy: Path, draft: Path):
    subject = drafter_of(draft, policy)
    losses = [subject.learn(of_the_policy(8, seed=seed)) for seed in range(120)]
    fresh = of_the_policy(64, seed=10**6)
    target = learner(policy)
    entropy = -float(np.nanmean(np.concatenate(target.logprobs(fresh, 1.0))))
    last = subject.learn(fresh)
    assert losses[0] is not None
    assert last is not None
    assert losses[0] > entropy + 0.3
    assert last < entropy + 0.05


def test_one_batch_is_one_step_however_it_is_cut(policy: Path, draft: Path):
    samples, settings = of_the_policy(5, seed=0), TEACHING.model_copy(update={"microbatch_tokens": 30})
    whole, cut = drafter_of(draft, policy), open_drafter(str(draft), load_policy(policy, "float32"), settings)
    assert cut is not None
    assert whole.learn(samples) == pytest.approx(cut.learn(samples), rel=1e-5)
    for (name, one), (_, other) in zip(whole.named(), cut.named(), strict=True):
        torch.testing.assert_close(one, other, msg=name)


def test_what_is_longer_than_its_context_teaches_it_nothing(policy: Path, draft: Path):
    subject = drafter_of(draft, policy)
    before = [tensor.clone() for _, tensor in subject.named()]
    assert subject.learn(of_the_policy(2, seed=0, length=80)) is None
    assert all(torch.equal(one, other) for one, (_, other) in zip(before, subject.named(), strict=True))


def test_what_does_not_fit_is_refused_with_its_remedy(policy: Path, tmp_path: Path):
    target = load_policy(policy, "float32")
    assert open_drafter(None, target, LearnerSettings()) is None
    with pytest.raises(ConfigError, match=r"the engines have no draft model; give engine\.draft_model"):
        open_drafter(None, target, TEACHING)
    other = write_model(tmp_path / "other")
    with pytest.raises(ConfigError, match="has 20 tokens, that of the model 6"):
        open_drafter(str(other), target, TEACHING)


def test_a_checkpoint_has_it_as_a_folder_that_engines_take(policy: Path, draft: Path, tmp_path: Path):
    subject, owner = drafter_of(draft, policy), learner(policy)
    subject.learn(of_the_policy(4, seed=0))
    path = save_checkpoint(owner, tmp_path / "kept", Version(0, 1), source=policy, drafter=subject)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        f.name for f in (path / "draft").iterdir()
    }
    again = drafter_of(draft, policy)
    restore_checkpoint(learner(policy), path, drafter=again)
    for (name, one), (_, other) in zip(subject.named(), again.named(), strict=True):
        assert torch.equal(one, other), name
    plain = save_checkpoint(owner, tmp_path / "plain", Version(0, 2), source=policy)
    assert not (plain / "draft").exists()
    restore_checkpoint(learner(policy), plain, drafter=again)


async def test_the_trainer_publishes_both_and_learns_the_same_with_it_as_without(tmp_path: Path):
    model, small = write_model(tmp_path / "model"), write_model(tmp_path / "small", layers=1, seed=9)
    samples = random_samples(6)
    async with TrainerClient() as trainer:
        await trainer.open(model, LearnerSettings(), seed=1, version=V0)
        plain = await trainer.learn(samples, GRPO())
        await trainer.open(model, TEACHING, seed=1, version=V0, draft=small)
        taught = await trainer.learn(samples, GRPO())
        assert (taught.loss, taught.grad_norm) == (plain.loss, plain.grad_norm)
        assert plain.draft_loss is None
        assert taught.draft_loss is not None
        manifest = await trainer.publish(Version(0, 1))
        assert manifest.selector == "all"
        own = manifest.of_model.tensors
        drafts = [entry for entry in manifest.tensors if entry.name.startswith("draft.")]
        assert (len(own), len(drafts)) == (len(manifest.tensors) - len(drafts), len(own) - 9)
        with pytest.raises(EngineError, match="of a drafter alone"):
            _ = manifest.model_copy(update={"selector": "draft"}).of_model


def test_the_command_shows_what_guesses_are_worth_now_and_were_before():
    views = [
        EngineView(id="a", kind="embedded", state="serving", guesses_right=0.714, guesses_right_before=0.5),
        EngineView(id="b", kind="embedded", state="serving", guesses_right=0.25),
        EngineView(id="c", kind="vllm", state="serving"),
    ]
    console = Console(width=200, record=True)
    show_engines(console, views)
    lines = console.export_text().splitlines()
    assert "71%, was 50%" in lines[1]
    assert "25%" in lines[2]
    assert "%" not in lines[3]
