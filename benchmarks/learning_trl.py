"""Our losses and gradients against TRL's on one batch, where the settings mean the same."""

import json
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import safetensors.torch
import torch
import transformers
from tokenizers import Tokenizer, models

from benchmarks.figure import Tell
from benchmarks.trl_environment import trl_python
from sostenuto.trainer.algorithms import CISPO, GRPO, GSPO, SAPO, Algorithm, DrGRPO
from sostenuto.trainer.learner import Learner
from sostenuto.trainer.model import load_policy
from sostenuto.trainer.optimizer import Optimizer
from sostenuto.trainer.parts import CISPOWeight, GroupRelative, GSPOClip, PPOClip, SAPOGate
from sostenuto.trainer.samples import Sample
from sostenuto.trainer.settings import LearnerSettings
from sostenuto.trainer.tensors import seed_everything
from sostenuto.types import Version

_SIZE = 64
_EXACT = 1e-5


@dataclass(frozen=True, slots=True)
class Same:
    """One method in the words of both."""

    ours: Algorithm
    theirs: dict[str, Any]


_PPO = {"epsilon": 0.2, "epsilon_high": 0.28}
METHODS = {
    "GRPO": Same(GRPO(correction=None, aggregation="sequence_mean"), {"loss_type": "grpo", **_PPO}),
    "GRPO, token mean": Same(GRPO(correction=None), {"loss_type": "dapo", **_PPO}),
    "GRPO, two-sided": Same(
        GRPO(correction=None, loss=PPOClip(dual=1.5)), {"loss_type": "dapo", "delta": 1.5, **_PPO}
    ),
    "Dr.GRPO": Same(
        DrGRPO(correction=None, advantage=GroupRelative(normalize_std=False), aggregation_tokens=16),
        {"loss_type": "dr_grpo", "epsilon": 0.2, "max_completion_length": 16},
    ),
    "GSPO": Same(
        GSPO(correction=None, loss=GSPOClip(low=0.05, high=0.05)),
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05},
    ),
    "CISPO": Same(
        CISPO(correction=None, loss=CISPOWeight(high=0.2)), {"loss_type": "cispo", "epsilon_high": 1.2}
    ),
    "SAPO": Same(
        SAPO(correction=None, loss=SAPOGate(positive=1.0, negative=1.05)),
        {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
    ),
}


class _Kept(Optimizer):
    """Keeps a gradient and does not move."""

    gradient: dict[str, torch.Tensor]

    def step(self) -> tuple[float, bool]:
        self.gradient = {name: p.grad.clone() for name, p in self._masters.items() if p.grad is not None}
        self.discard()
        return 0.0, False


def measure_trl(tell: Tell, *, quick: bool) -> None:
    del quick  # it takes seconds
    with tempfile.TemporaryDirectory() as scratch:
        folder = _model(Path(scratch) / "model")
        samples = _samples(folder)
        theirs = _theirs(Path(scratch), folder, samples)
        for name, method in METHODS.items():
            loss, gradient = _ours(folder, samples, method.ours)
            expected = float(theirs[f"{name}/loss"])
            tell(
                f"{name}: loss beside TRL's, relative",
                abs(loss - expected) / abs(expected),
                "1",
                f"<= {_EXACT}",
            )
            tell(
                f"{name}: gradient beside TRL's, relative",
                _apart(gradient, theirs, name),
                "1",
                f"<= {_EXACT}",
            )


def _apart(gradient: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], name: str) -> float:
    """Norm of the difference over the norm."""
    apart = sum(float((own - theirs[f"{name}/{weight}"]).square().sum()) for weight, own in gradient.items())
    return (apart / sum(float(own.square().sum()) for own in gradient.values())) ** 0.5


def _ours(folder: Path, samples: list[Sample], algorithm: Algorithm) -> tuple[float, dict[str, torch.Tensor]]:
    settings = LearnerSettings()
    learner = Learner(load_policy(folder, "float32"), settings, seed=0, version=Version(0, 1))
    learner.optimizer = kept = _Kept(learner.policy.module, settings)
    return learner.learn(samples, algorithm).loss, kept.gradient


def _theirs(scratch: Path, folder: Path, samples: list[Sample]) -> dict[str, torch.Tensor]:
    results = scratch / "results.safetensors"
    asked = {
        "model": str(folder),
        "pad_token": "t0",
        "scratch": str(scratch / "trl"),
        "results": str(results),
        "settings": {name: method.theirs for name, method in METHODS.items()},
        "samples": [_row(sample) for sample in samples],
    }
    script = Path(__file__).parent / "trl_losses.py"
    subprocess.run([str(trl_python()), str(script)], input=json.dumps(asked), text=True, check=True)
    return cast("Any", safetensors.torch).load_file(str(results))


def _row(sample: Sample) -> dict[str, Any]:
    start = int(np.argmax(sample.mask))
    return {
        "prompt": sample.token_ids[:start].tolist(),
        "completion": sample.token_ids[start:].tolist(),
        "logprobs": sample.logprobs[start:].tolist(),
        "advantage": float(sample.advantages[-1]),
    }


def _samples(folder: Path) -> list[Sample]:
    """Completions of all lengths, their engine about right, so that bounds are met by some."""
    noise = np.random.default_rng(0)
    learner = Learner(load_policy(folder, "float32"), LearnerSettings(), seed=0, version=Version(0, 1))
    samples: list[Sample] = []
    for index in range(8):
        prompt, completion = int(noise.integers(2, 9)), int(noise.integers(3, 17))
        length = prompt + completion
        mask = np.arange(length) >= prompt
        empty = Sample(
            noise.integers(1, _SIZE, length).astype(np.int32), mask, np.full(length, -1, np.float32),
            np.where(mask, noise.normal(), 0.0).astype(np.float32), Version(0, 0), f"p{index}",
        )  # fmt: skip
        (known,) = learner.logprobs([empty], 1.0)
        near = (known + noise.normal(0, 0.3, length)).astype(np.float32)
        samples.append(Sample(empty.token_ids, mask, near, empty.advantages, Version(0, 0), empty.origin))
    return samples


def _model(folder: Path) -> Path:
    """A small random Llama and a tokenizer of as many words."""
    seed_everything(0)
    config = cast("Any", transformers).LlamaConfig(
        vocab_size=_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    cast("Any", transformers).LlamaForCausalLM(config).save_pretrained(str(folder))
    words = {f"t{number}": number for number in range(_SIZE)}
    Tokenizer(models.WordLevel(words, unk_token="t0")).save(str(folder / "tokenizer.json"))
    return folder
