"""A model folder, loaded for generation: transformers behind one typed object.

A folder that cannot be served is refused here, before anything runs, with what to do about it.  The
packed forward pass is compared with the model's own attention on a few tokens, so an architecture
that the engine would compute wrongly is refused too.
"""

from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from transformers import PreTrainedConfig, PreTrainedModel

from sostenuto.runtime.engines.embedded import attention
from sostenuto.runtime.engines.embedded.attention import Chunk, Decode, Step
from sostenuto.runtime.engines.embedded.lanes import KvShape
from sostenuto.runtime.engines.embedded.quantized import quantize_model, weight_bytes
from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.runtime.engines.embedded.routes import Routes
from sostenuto.runtime.engines.embedded.tensors import (
    context_tokens,
    move,
    output_rows,
    quieten,
    read_config,
    read_weights,
    use_attention,
)
from sostenuto.runtime.engines.wire import Feature
from sostenuto.trainer.quantization import Format, Quantized
from sostenuto.trainer.routing import Routers, find_routers

_NO_LIMIT = 1 << 30
_PROBE_TOKENS = 12
# Of the largest logit; what two kernels may differ by in one forward pass of a few tokens.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1}
# In half precision a token that the model was hardly trained on can come out anyhow (measured: logits 7
# apart at one of twelve); an attention that is wrong is so at most tokens.
_TYPICAL = {torch.float32: 1.0, torch.bfloat16: 0.5}


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """What the engine needs of a model.  `forward` may run on one thread at a time."""

    name: str
    module: PreTrainedModel
    tokenizer: Tokenizer
    tokenizer_size: int
    """Ids from here on have no text and are never sampled."""
    vocabulary_size: int
    context_tokens: int
    shape: KvShape
    routers: Routers | None = None
    """Of a mixture-of-experts model."""
    quantized: dict[str, Quantized] = field(default_factory=dict[str, Quantized])
    """The matrices that are kept in few bits, by parameter name."""

    @property
    def quantization(self) -> Format | None:
        return next((weight.format for weight in self.quantized.values()), None)

    @property
    def weight_bytes(self) -> int:
        """Of one version; as much again is there once an update was prepared."""
        return weight_bytes(self.module, self.quantized)

    @property
    def features(self) -> frozenset[Feature]:
        """What this model adds to those of the engine."""
        return frozenset({Feature.ROUTED_EXPERTS}) if self.routers else frozenset()

    @property
    def routes(self) -> Routes | None:
        """Where the experts of each token are kept."""
        return self.routers and Routes(self.shape.layers, self.routers.layers, self.routers.top_k)

    @property
    def architecture(self) -> str:
        return type(self.module).__name__

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, step: Step
    ) -> torch.Tensor:
        """Logits (wanted, tokenizer_size) of packed tokens (T,) at `wanted`; their KV goes to `step`."""
        if self.routers is None or self.routes is None:
            return self._forward(token_ids, positions, wanted, step)
        with self.routers.recording() as seen:
            logits = self._forward(token_ids, positions, wanted, step)
        self.routes.write(step, seen)
        return logits

    def _forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, step: Step
    ) -> torch.Tensor:
        output: Any = self.module(
            input_ids=token_ids[None], position_ids=positions[None], logits_to_keep=wanted,
            use_cache=False, slots=step,
        )  # fmt: skip
        return output.logits[0, :, : self.tokenizer_size]


def load(folder: Path, *, dtype: str, device: str, quantization: Format | None = None) -> Model:
    """Load a model folder, or raise Refusal."""
    attention.register()
    quieten()
    config = _config(folder)
    tokenizer = _tokenizer(folder)
    module = _weights(folder, config, getattr(torch, dtype))
    move(module, torch.device(device))
    module.eval().requires_grad_(False)
    quantized = quantize_model(module, quantization) if quantization else {}
    vocabulary_size = output_rows(module)
    tokenizer_size = min(max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1, vocabulary_size)
    routers, shape = find_routers(module), _probe(module, tokenizer_size)
    if routers is not None:
        added = Routes(shape.layers, routers.layers, routers.top_k).added_layers(shape)
        shape = replace(shape, added_layers=added)
    return Model(
        name=folder.name,
        module=module,
        tokenizer=tokenizer,
        tokenizer_size=tokenizer_size,
        vocabulary_size=vocabulary_size,
        context_tokens=context_tokens(config) or _NO_LIMIT,
        shape=shape,
        routers=routers,
        quantized=quantized,
    )


def _config(folder: Path) -> PreTrainedConfig:
    if not (folder / "config.json").is_file():
        raise _refused("no config.json", folder, "give a folder in Hugging Face format")
    try:
        return read_config(folder)
    except (ValueError, OSError, KeyError) as exc:
        raise _refused(f"config.json is not understood: {_first_line(exc)}", folder, _KNOWN) from exc


_KNOWN = "use a causal language model that the installed transformers knows"


def _tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise _refused("no tokenizer.json", folder, "save the fast tokenizer into the model folder")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as exc:  # tokenizers raises nothing more specific
        raise _refused(
            f"tokenizer.json is not understood: {exc}", folder, "save the tokenizer again"
        ) from exc
    if not tokenizer.get_vocab_size():
        raise _refused("tokenizer.json has no tokens", folder, "save the tokenizer again")
    return tokenizer


def _weights(folder: Path, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    if not any(folder.glob("*.safetensors")):
        raise _refused("no *.safetensors", folder, "save the weights as safetensors into the model folder")
    try:
        module, missing, other = read_weights(folder, config, dtype, attention.NAME)
    except ValueError as exc:
        raise _refused(f"{config.model_type} cannot be served: {_first_line(exc)}", folder, _KNOWN) from exc
    except (RuntimeError, OSError, SafetensorError) as exc:
        raise _refused(f"weights do not fit the configuration: {_first_line(exc)}", folder, _AGAIN) from exc
    if other:
        raise _refused(
            f"weights do not fit the configuration: {other[0]} ({len(other)} such)", folder, _AGAIN
        )
    if missing:
        raise _refused(f"weights lack {', '.join(missing[:3])} ({len(missing)} in all)", folder, _AGAIN)
    return module


_AGAIN = "save config.json and weights of the same model again"


@torch.no_grad()
def _probe(module: PreTrainedModel, tokenizer_size: int) -> KvShape:
    """The shape of one token's KV; Refusal when the packed pass differs from the model's own attention."""
    device = module.device
    token_ids = (torch.arange(_PROBE_TOKENS, device=device) * 7 + 1) % tokenizer_size
    try:
        own, shape = _own_pass(module, token_ids)
        packed = _packed_pass(module, token_ids, shape)
    except (TypeError, AttributeError, ValueError, NotImplementedError, RuntimeError) as exc:
        raise _unfit(module, _first_line(exc)) from exc
    by_token = (own - packed).abs().amax(-1).float()
    worst = float(by_token.quantile(_TYPICAL[own.dtype]))
    allowed = _TOLERANCE[own.dtype] * max(1.0, float(own.abs().max()))
    if not worst <= allowed:
        raise _unfit(module, f"logits differ from the model's own attention by {worst:.2g}")
    return shape


def _own_pass(module: PreTrainedModel, token_ids: torch.Tensor) -> tuple[torch.Tensor, KvShape]:
    use_attention(module, "eager")
    try:
        output: Any = module(input_ids=token_ids[None], use_cache=True)
    finally:
        use_attention(module, attention.NAME)
    layers = output.cache.layers
    shapes = {(tuple(layer.keys.shape[1:]), tuple(layer.values.shape[1:])) for layer in layers}
    if len(shapes) != 1:
        raise NotImplementedError("its layers keep KV of different shapes")
    (keys, values) = shapes.pop()
    kept = layers[0].keys
    return output.logits[0], KvShape(len(layers), keys[0], keys[2], values[2], kept.dtype, kept.device)


def _packed_pass(module: PreTrainedModel, token_ids: torch.Tensor, shape: KvShape) -> torch.Tensor:
    """As a chunk from nothing, a chunk that continues, and decoded tokens, two at once and one."""
    keys, values = shape.empty(_PROBE_TOKENS, rows=1)
    positions = torch.arange(_PROBE_TOKENS, device=token_ids.device)
    outputs: list[torch.Tensor] = []
    for start, end in pairwise((0, 4, 9, 11, _PROBE_TOKENS)):
        if end - start > 2:
            step = Step((), (Chunk(0, keys[:, 0], values[:, 0], start, end - start),))
        else:
            step = Step((Decode(0, keys, values, (end - start,), positions[start:end], end),), ())
        output: Any = module(
            input_ids=token_ids[None, start:end], position_ids=positions[None, start:end],
            use_cache=False, slots=step,
        )  # fmt: skip
        outputs.append(output.logits[0])
    return torch.cat(outputs)


def _unfit(module: PreTrainedModel, why: str) -> Refusal:
    name = type(module).__name__
    return Refusal(400, "unknown_architecture", f"{name} cannot be served by this engine: {why}", _KNOWN)


def _refused(what: str, folder: Path, remedy: str) -> Refusal:
    return Refusal(400, "model", f"model folder {folder}: {what}", remedy)


def _first_line(exc: Exception) -> str:
    text = " ".join(str(exc).split())
    return text if len(text) <= 300 else text[:300] + "..."
