"""Tiny models, samples and trajectories for the trainer's tests."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import anyio
import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models
from transformers import PreTrainedConfig, PreTrainedModel

from sostenuto.records import Floats, Producer, Span, Trajectory, VersionSpan
from sostenuto.runtime.jobs.crediting import Groups, credited_by
from sostenuto.trainer.algorithms import Algorithm
from sostenuto.trainer.critic import open_critic
from sostenuto.trainer.learner import Learner
from sostenuto.trainer.model import open_policy
from sostenuto.trainer.optimizer import Optimizer
from sostenuto.trainer.parts import Critic
from sostenuto.trainer.samples import Sample
from sostenuto.trainer.settings import LearnerSettings
from sostenuto.trainer.tensors import seed_everything
from sostenuto.types import GroupId, Outcome, ProgramId, Purpose, StopReason, Version

V0 = Version(0, 0)
_transformers = cast("Any", transformers)
# Threads of torch that wait for each other starve on a machine that runs other tests.
torch.set_num_threads(1)


def write_model(folder: Path, *, rows: int = 24, texts: int = 20, layers: int = 2, seed: int = 0) -> Path:
    """A random Llama with `rows` output rows and a tokenizer that knows `texts` of them."""
    seed_everything(seed)
    model = _llama(rows=rows, layers=layers, tied=True)
    return _save(model, folder, texts)


def write_gpt2(folder: Path) -> Path:
    """A random GPT-2: learned positions, biases, dropout; float64 all through if asked."""
    seed_everything(0)
    config = _transformers.GPT2Config(
        vocab_size=20, n_embd=16, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return _save(_transformers.GPT2LMHeadModel(config), folder, 20)


def write_any(folder: Path, config: PreTrainedConfig, *, texts: int, seed: int = 0) -> Path:
    """A random model of the given architecture."""
    seed_everything(seed)
    return _save(_transformers.AutoModelForCausalLM.from_config(config), folder, texts)


def write_bigram(folder: Path, table: dict[int, dict[int, float]], *, size: int) -> Path:
    """A Llama whose next-token distribution is `table[last token]`; what is not named shares the rest."""
    model = _llama(rows=size, layers=1, tied=False)
    head, embedding = cast("Any", model).lm_head, cast("Any", model).model.embed_tokens
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.zero_()
        embedding.weight[torch.arange(size), torch.arange(size)] = 1.0
        for last in range(size):
            given = table.get(last, {})
            rest = (1.0 - sum(given.values())) / (size - len(given))
            for token in range(size):
                # RMS normalization turns a one-hot of width 16 into one of length 4.
                head.weight[token, last] = math.log(given.get(token, rest)) / 4.0
    return _save(model, folder, size)


class Recorder(Optimizer):
    """Keeps the gradient of a step and does not move."""

    gradient: dict[str, torch.Tensor]

    def step(self) -> tuple[float, bool]:
        self.gradient = {name: p.grad.clone() for name, p in self._masters.items() if p.grad is not None}
        self.discard()
        return 0.0, False


def learner(
    folder: Path, *, seed: int = 0, critic: Critic | None = None, critic_folder: Path | None = None,
    **settings: object,
) -> Learner:  # fmt: skip
    chosen = LearnerSettings.model_validate(settings)
    policy = open_policy(folder, chosen, seed=seed)
    values = None if critic is None else open_critic(critic, policy, chosen, critic_folder)
    return Learner(policy, chosen, seed=seed, version=V0, critic=values)


@dataclass
class InProcess:
    """A learner, asked as the trainer's process is."""

    learner: Learner

    async def values(self, samples: list[Sample]) -> list[Floats]:
        return self.learner.values(samples)

    async def logprobs(
        self,
        samples: list[Sample],
        temperature: float = 1.0,
        *,
        of: Literal["policy", "reference"] = "policy",
    ) -> list[Floats]:
        return self.learner.logprobs(samples, temperature, of=of)


def credit_by(subject: Learner, groups: Groups, algorithm: Algorithm) -> list[Sample]:
    """As a job credits a batch."""
    return anyio.run(credited_by, algorithm, groups, InProcess(subject))


def random_samples(count: int, *, seed: int = 0, texts: int = 20, longest: int = 14) -> list[Sample]:
    """Sampled sequences with holes in their masks, made-up log-probabilities and advantages."""
    noise = np.random.default_rng(seed)
    samples: list[Sample] = []
    for index in range(count):
        length = int(noise.integers(4, longest))
        mask = noise.random(length) < 0.5
        mask[0], mask[-1] = False, True
        logprobs = np.where(mask, -noise.exponential(2.0, length), np.nan).astype(np.float32)
        samples.append(
            Sample(
                token_ids=noise.integers(0, texts, length).astype(np.int32),
                mask=mask,
                logprobs=logprobs,
                advantages=np.where(mask, noise.normal(), 0.0).astype(np.float32),
                version=V0,
                origin=f"program-{index}",
            )
        )
    return samples


def sampled(token_ids: list[int], *, version: Version = V0, logprob: float = -1.0) -> Span:
    """A span of the policy, all of it trained."""
    n = len(token_ids)
    ids = np.array(token_ids, dtype=np.int32)
    logprobs = np.full(n, logprob, dtype=np.float32)
    return Span(Producer.POLICY, ids, logprobs, np.ones(n, dtype=np.bool_), (VersionSpan(version, 0, n),))


def trajectory(
    program: str,
    reward: float | None,
    *,
    group: str = "g",
    version: Version = V0,
    outcome: Outcome | None = None,
    sequences: tuple[tuple[Span, ...], ...] | None = None,
) -> Trajectory:
    default = ((Span.fed(Producer.USER, [1, 2]), sampled([3, 4], version=version)),)
    return Trajectory(
        ProgramId(program), GroupId(group), "task", Purpose.TRAIN,
        default if sequences is None else sequences, reward, StopReason.ANSWERED, outcome=outcome,
    )  # fmt: skip


def _llama(*, rows: int, layers: int, tied: bool) -> PreTrainedModel:
    config = _transformers.LlamaConfig(
        vocab_size=rows, hidden_size=16, intermediate_size=24, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
        tie_word_embeddings=tied, rms_norm_eps=1e-12, initializer_range=0.4,
    )  # fmt: skip
    return _transformers.LlamaForCausalLM(config)


def _save(model: PreTrainedModel, folder: Path, texts: int) -> Path:
    cast("Any", model).save_pretrained(str(folder))
    vocabulary = {f"w{index}": index for index in range(texts)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="w0")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return folder
