"""A LoRA adapter from a folder in PEFT's format: adapter_config.json and adapter_model.safetensors.

Which layers it changes is said by its tensors; the configuration gives the scale.  What would change the
result and is not computed here (DoRA, biases, whole modules, parameters of experts) is refused by name.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from torch import Tensor, nn

from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.runtime.engines.wire import AdapterReply, AdapterRequest, GenerateRequest
from sostenuto.trainer.tensors import load_tensors
from sostenuto.types import Version

_CONFIG = "adapter_config.json"
_TENSORS = "adapter_model.safetensors"
_NAME = re.compile(r"base_model\.model\.(?P<path>.+)\.lora_(?P<half>[AB])\.weight")
T = TypeVar("T")
_SAVE_AGAIN = "save the adapter again with peft's save_pretrained, as plain LoRA of linear layers"


class _Config(BaseModel):
    """The fields of PEFT's LoraConfig that change what is computed."""

    model_config = ConfigDict(extra="ignore")

    peft_type: Literal["LORA"]
    r: int = Field(gt=0)
    lora_alpha: float
    target_modules: list[str] | str | None = None
    use_rslora: bool = False
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    bias: Literal["none"] = "none"
    use_dora: Literal[False] = False
    lora_bias: Literal[False] = False
    fan_in_fan_out: Literal[False] = False
    modules_to_save: list[str] | None = Field(default=None, max_length=0)
    target_parameters: list[str] | None = Field(default=None, max_length=0)
    trainable_token_indices: None = None

    def rank(self, path: str) -> int:
        return _by_pattern(self.rank_pattern, path, self.r)

    def scale(self, path: str) -> float:
        """alpha / rank, or alpha / sqrt(rank) of rank-stabilized LoRA."""
        rank = self.rank(path)
        return _by_pattern(self.alpha_pattern, path, self.lora_alpha) / (
            math.sqrt(rank) if self.use_rslora else rank
        )


@dataclass(slots=True, eq=False)
class Adapter:
    """Low-rank changes of linear layers, by path: A (R, inputs) and scale * B (outputs, R)."""

    name: str
    version: Version | None
    layers: Mapping[str, tuple[Tensor, Tensor]]
    namespace: str = field(default="")
    """Of the KV that it computes: differs for each load."""

    def apart(self, request: GenerateRequest) -> GenerateRequest:
        """The request with a salt that no other adapter's, and no plain request, can have."""
        return request.model_copy(update={"salt": f"{self.namespace}\0{request.salt}"})

    def reply(self) -> AdapterReply:
        halves = [half for layer in self.layers.values() for half in layer]
        return AdapterReply(
            name=self.name,
            layers=len(self.layers),
            rank=max(down.shape[0] for down, _ in self.layers.values()),
            nbytes=sum(half.nbytes for half in halves),
        )


def read_adapter(request: AdapterRequest, linears: Mapping[str, nn.Linear], like: Tensor) -> Adapter:
    """Read and check a folder against the model's linear layers; Refusal names what does not fit.

    `like` has the dtype and device that the model computes with.
    """
    folder = Path(request.path)
    config = _config(folder)
    halves = _halves(folder)
    _check_targets(folder, config, halves)
    layers: dict[str, tuple[Tensor, Tensor]] = {}
    for path, pair in halves.items():
        down, up = _layer(folder, path, pair, config, linears.get(path))
        layers[path] = down.to(like), up.to(like)
    return Adapter(request.name, _version(request.version), layers)


def _config(folder: Path) -> _Config:
    path = folder / _CONFIG
    try:
        return _Config.model_validate_json(path.read_bytes())
    except OSError as exc:
        raise _refused(folder, f"{_CONFIG} cannot be read: {exc.strerror}") from exc
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "its JSON"
        raise _refused(folder, f"{_CONFIG}: {where}: {first['msg']} (is {first['input']!r:.60})") from exc


def _halves(folder: Path) -> dict[str, dict[str, Tensor]]:
    """A and B of each layer, by its path in the model."""
    path = folder / _TENSORS
    if not path.is_file():
        raise _refused(folder, f"no {_TENSORS}")
    try:
        tensors = load_tensors(path)
    except (SafetensorError, OSError) as exc:
        raise _refused(folder, f"{_TENSORS} is not understood: {exc}") from exc
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise _refused(folder, f"tensor {name!r} is no half of a LoRA layer")
        halves.setdefault(match["path"], {})[match["half"]] = tensor
    if not halves:
        raise _refused(folder, f"{_TENSORS} has no tensors")
    return halves


def _check_targets(folder: Path, config: _Config, paths: Mapping[str, object]) -> None:
    targets = config.target_modules if isinstance(config.target_modules, list) else []
    for target in targets:
        if not any(path == target or path.endswith(f".{target}") for path in paths):
            raise _refused(folder, f"target_modules: {_TENSORS} has no layer {target!r}")


def _layer(
    folder: Path, path: str, pair: Mapping[str, Tensor], config: _Config, linear: nn.Linear | None
) -> tuple[Tensor, Tensor]:
    if linear is None:
        raise _refused(folder, f"{path!r} is no linear layer of the model")
    rank = config.rank(path)
    needed = {"A": (rank, linear.in_features), "B": (linear.out_features, rank)}
    for half, shape in needed.items():
        found = tuple(pair[half].shape) if half in pair else None
        if found != shape:
            raise _refused(folder, f"{path}.lora_{half} has shape {found}, {shape} is needed")
    return pair["A"], pair["B"].float() * config.scale(path)


def _by_pattern(patterns: Mapping[str, T], path: str, default: T) -> T:
    """PEFT's rule: the first pattern that the end of the path matches, from the start of a name on."""
    for pattern, value in patterns.items():
        if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", path):
            return value
    return default


def _version(text: str | None) -> Version | None:
    try:
        return None if text is None else Version.parse(text)
    except ValueError as exc:
        raise Refusal(400, "version", f"version: {text!r} is not EPOCH.NUMBER", "send it as '0.7'") from exc


def _refused(folder: Path, what: str) -> Refusal:
    return Refusal(422, "adapter", f"adapter folder {folder}: {what}", _SAVE_AGAIN)
