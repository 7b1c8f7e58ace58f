"""Do the embedded engine and the trainer give a sampled token the same log-probability?

Both run in this process, on models with random weights; the engine samples, the trainer scores the same
tokens.  Quantized engines are compared with a trainer that follows the same rules and with one that
computes with whole weights; a mixture of experts with and without replay, after the weights moved.
"""

import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any, cast, get_args

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers import models as tokenizer_models
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from benchmarks.figure import Tell
from sostenuto.records import Floats
from sostenuto.runtime.engines.embedded.core import Core
from sostenuto.runtime.engines.embedded.model import load
from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.runtime.engines.wire import GenerateReply, GenerateRequest, Sampling
from sostenuto.runtime.rendering.experts import ExpertLog
from sostenuto.trainer.learner import Learner
from sostenuto.trainer.model import load_policy
from sostenuto.trainer.quantization import Format
from sostenuto.trainer.samples import Sample
from sostenuto.trainer.settings import LearnerSettings
from sostenuto.types import Version

_V0 = Version(0, 0)
_FORMATS: tuple[Format, ...] = get_args(Format)
_VOCABULARY = 2048
_CONTEXT_TOKENS = 48
_MOVED = 0.02
"""Standard deviation of what is added to the routers' weights, about a fifth of theirs."""


def measure_exactness(tell: Tell, *, quick: bool) -> None:
    """Largest |difference of log-probabilities|, engine against trainer at equal weights."""
    programs, tokens = (4, 16) if quick else (16, 64)
    with tempfile.TemporaryDirectory(prefix="sostenuto-exactness-") as place:
        dense = _write(Path(place) / "dense", Qwen3Config)
        mixture = _write(Path(place) / "mixture", Qwen3MoeConfig)
        for name, folder in (("dense", dense), ("mixture", mixture)):
            _whole(tell, name, folder, programs, tokens)
            _quantized(tell, name, folder, programs, tokens)
        _replayed(tell, mixture, programs, tokens)
        _cost(tell, dense, quick=quick)


def _whole(tell: Tell, name: str, folder: Path, programs: int, tokens: int) -> None:
    for dtype, target in (("float32", "<= 1e-4"), ("bfloat16", None)):
        samples = _sampled(folder, programs, tokens, dtype=dtype)
        found = _compared(_learner(folder, dtype=dtype), samples)
        tell(f"engine_dlogp_max_{name}_{dtype}", found, "nats", target)


def _quantized(tell: Tell, name: str, folder: Path, programs: int, tokens: int) -> None:
    for kind in _FORMATS:
        samples = _sampled(folder, programs, tokens, kind=kind)
        shared = _compared(_learner(folder, kind=kind), samples)
        apart = _compared(_learner(folder), samples)
        tell(f"engine_dlogp_max_{name}_{kind}_shared_rules", shared, "nats", "<= 1e-3")
        tell(f"engine_dlogp_max_{name}_{kind}_whole_trainer", apart, "nats", "> 1e-3")


def _replayed(tell: Tell, folder: Path, programs: int, tokens: int) -> None:
    """At equal weights; then how far replay and an own choice lie apart, with routers that moved."""
    samples = _sampled(folder, programs, tokens)
    tell("engine_dlogp_max_replay", _compared(_learner(folder, replay=True), samples), "nats", "<= 1e-4")
    halved = _sampled(folder, programs, tokens, dtype="bfloat16")
    found = _compared(_learner(folder, dtype="bfloat16", replay=True), halved)
    tell("engine_dlogp_max_replay_bfloat16", found, "nats")
    moved = _learner(folder, replay=True), _learner(folder)
    for learner in moved:
        _move_routers(learner)
    ours, own = (_scores(learner, samples) for learner in moved)
    tell("replay_dlogp_max_after_a_step_against_own_choice", _largest(ours, own), "nats", "> 1e-3")


def _cost(tell: Tell, folder: Path, *, quick: bool) -> None:
    """What making matrices whole costs, in one process: a decoded token alone and in a batch."""
    steps = 8 if quick else 48
    whole = {batch: _step_s(folder, None, batch, steps) for batch in (1, 16)}
    for kind in _FORMATS:
        for batch, whole_s in whole.items():
            ratio = _step_s(folder, kind, batch, steps) / whole_s
            tell(f"engine_{kind}_step_against_float32_batch_{batch}", ratio, "x")
        tell(f"engine_{kind}_weight_bytes_share", _bytes(folder, kind) / _bytes(folder, None), "x", "< 1")


def _bytes(folder: Path, kind: Format | None) -> int:
    return load(folder, dtype="float32", device="cpu", quantization=kind).weight_bytes


def _step_s(folder: Path, kind: Format | None, batch: int, steps: int) -> float:
    """Median over steps that only decode."""
    core = _core(folder, kind=kind)
    for index in range(batch):
        core.submit(_request(f"{index}", _prompt(index), steps + 4, seed=index), lambda _: None)
    core.step()
    core.step()
    times: list[float] = []
    for _ in range(steps):
        began_s = perf_counter()
        core.step()
        times.append(perf_counter() - began_s)
    return float(np.median(times))


def _sampled(
    folder: Path, programs: int, tokens: int, *, kind: Format | None = None, dtype: str = "float32"
) -> list[Sample]:
    """What an engine samples in one batch, with the experts of a mixture."""
    core = _core(folder, kind=kind, dtype=dtype)
    replies: dict[int, GenerateReply | Refusal] = {}
    mixture = "Moe" in core.capabilities().architecture
    for index in range(programs):
        request = _request(f"{index}", _prompt(index), tokens, seed=index, experts=mixture)
        core.submit(request, lambda reply, index=index: replies.__setitem__(index, reply))
    while core.busy:
        core.step()
    return [_sample(_prompt(index), reply) for index, reply in sorted(replies.items())]


def _core(folder: Path, *, kind: Format | None = None, dtype: str = "float32") -> Core:
    model = load(folder, dtype=dtype, device="cpu", quantization=kind)
    return Core(model, version=_V0, kv_tokens=8192, concurrency=32, threads=torch.get_num_threads())


def _request(
    name: str, token_ids: list[int], tokens: int, *, seed: int, experts: bool = False
) -> GenerateRequest:
    return GenerateRequest(
        request_id=name, program_id=name, token_ids=token_ids, max_new_tokens=tokens,
        sampling=Sampling(seed=seed), hold=False, routed_experts=experts,
    )  # fmt: skip


def _sample(context: list[int], reply: GenerateReply | Refusal) -> Sample:
    if isinstance(reply, Refusal):
        raise reply
    ids = np.array(context + reply.token_ids, dtype=np.int32)
    log = ExpertLog()
    if reply.routed_experts is not None:
        log.add(reply.routed_experts, context=len(ids))
    mask = np.arange(len(ids)) >= len(context)
    logprobs = np.full(len(ids), np.nan, dtype=np.float32)
    logprobs[mask] = reply.logprobs
    experts = next(iter(log.sequences(1)), None)
    return Sample(ids, mask, logprobs, np.zeros(len(ids), dtype=np.float32), version=_V0, experts=experts)


def _learner(
    folder: Path, *, kind: Format | None = None, dtype: str = "float32", replay: bool = False
) -> Learner:
    settings = LearnerSettings.model_validate(
        {"dtype": dtype, "quantization": kind, "routing_replay": replay}
    )
    return Learner(load_policy(folder, dtype, kind), settings, seed=0, version=_V0)


@torch.no_grad()
def _move_routers(learner: Learner) -> None:
    noise = torch.Generator().manual_seed(1)
    for name, parameter in learner.policy.module.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.add_(_MOVED * torch.randn(parameter.shape, generator=noise))


def _scores(learner: Learner, samples: list[Sample]) -> list[Floats]:
    found = learner.logprobs(samples, 1.0)
    return [scores[sample.mask] for scores, sample in zip(found, samples, strict=True)]


def _compared(learner: Learner, samples: list[Sample]) -> float:
    return _largest(_scores(learner, samples), [sample.logprobs[sample.mask] for sample in samples])


def _largest(one: list[Floats], other: list[Floats]) -> float:
    return float(np.abs(np.concatenate(one) - np.concatenate(other)).max())


def _prompt(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, _VOCABULARY, _CONTEXT_TOKENS).tolist()


def _write(folder: Path, config: type[Qwen3Config] | type[Qwen3MoeConfig]) -> Path:
    """A model of a few million parameters with random weights, and a tokenizer."""
    sizes: dict[str, Any] = {
        "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 32, "vocab_size": _VOCABULARY, "initializer_range": 0.08,
        "max_position_embeddings": 1024,
    }  # fmt: skip
    if config is Qwen3MoeConfig:
        sizes |= {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 192,
                  "norm_topk_prob": True}  # fmt: skip
    cast("Any", torch).manual_seed(0)
    module = cast("Any", AutoModelForCausalLM).from_config(config(**sizes))
    module.save_pretrained(folder)
    words = {f"w{index}": index for index in range(_VOCABULARY)}
    Tokenizer(tokenizer_models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder
