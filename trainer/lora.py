"""LoRA: small matrices beside frozen linear layers, by `peft`, in place of moving all weights.

- What is published is whole: each layer's weight with its product of small matrices added, in float32 and
  rounded once.  Engines need to know nothing.
- A checkpoint has the merged weights, for whoever loads it, and `adapter/` in PEFT's own format, which a
  resumed run goes on with; the frozen weights are those of the folder that the model came from.
- The second small matrix begins at zero, so the first version is the base model.
"""

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from sostenuto.errors import ConfigError
from sostenuto.trainer.ranks import as_shared, whole
from sostenuto.trainer.routing import looks_like_router
from sostenuto.trainer.settings import LoraSettings
from sostenuto.trainer.tensors import as_bytes, load_tensors, named_parts, save_tensors, seed_everything

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FOLDER = "adapter"
_NAME = "default"
_TENSORS = "adapter_model.safetensors"
_PREFIX = "base_model.model."


class Adapter:
    """The small matrices in one model, and nothing else of it, learn."""

    def __init__(self, module: "PreTrainedModel", settings: LoraSettings, seed: int) -> None:
        """Put them in.  ConfigError for a target that the model does not have, or without peft."""
        targets = _chosen(module, settings)
        try:
            from peft import LoraConfig, inject_adapter_in_model
        except ImportError as error:
            raise ConfigError(f"lora: {error}; pip install 'sostenuto[lora]'") from error
        self._config: Any = cast("Any", LoraConfig)(
            r=settings.rank, lora_alpha=settings.alpha, lora_dropout=0.0, target_modules=targets, bias="none",
            task_type="CAUSAL_LM",
        )  # fmt: skip
        seed_everything(seed)
        module.requires_grad_(False)
        inject_adapter_in_model(self._config, module, _NAME)
        module.eval()
        self._module = module
        self._layers = {path: cast("Any", part) for path, part in named_parts(module) if _is_adapted(part)}
        self.base = _digest(tensor for name, tensor in module.state_dict().items() if ".lora_" not in name)
        """Of the frozen weights."""

    def merged(self) -> dict[str, Tensor]:
        """The state dict of the model as if it had never had an adapter."""
        state: dict[str, Tensor] = {}
        for name, tensor in cast("dict[str, Tensor]", self._module.state_dict()).items():
            path, _, kind = name.rpartition(".base_layer.")
            if path and kind == "weight":
                state[f"{path}.weight"] = self._merged(whole(tensor), path)
            elif ".lora_" not in name:
                state[name.replace(".base_layer.", ".")] = whole(tensor)
        return state

    def _merged(self, weight: Tensor, path: str) -> Tensor:
        layer = self._layers[path]
        down, up = (whole(m[_NAME].weight.detach()) for m in (layer.lora_A, layer.lora_B))
        exact = torch.promote_types(weight.dtype, torch.float32)
        with torch.no_grad():
            added = up.to(exact) @ down.to(exact) * layer.scaling[_NAME]
            return (weight.to(exact) + added).to(weight.dtype)

    def tensors(self) -> dict[str, Tensor]:
        """The small matrices by their names in a file; all ranks ask, or none."""
        return {_outer(name): whole(tensor).contiguous() for name, tensor in self._own()}

    def save(self, folder: Path, tensors: dict[str, Tensor] | None = None) -> None:
        """Write what PEFT reads.  `tensors`: as `tensors` has given them."""
        folder.mkdir(parents=True, exist_ok=True)
        self._config.save_pretrained(str(folder))
        save_tensors(tensors or self.tensors(), folder / _TENSORS)

    def load(self, folder: Path) -> None:
        """Take over what `save` wrote.  ConfigError for matrices of other shapes or layers."""
        path = folder / _TENSORS
        if not path.is_file():
            raise ConfigError(
                f"checkpoint {folder.parent}: no {FOLDER}/{_TENSORS}; it was saved without lora"
            )
        saved, own = load_tensors(path), {_outer(name): tensor for name, tensor in self._own()}
        wrong = sorted(saved.keys() ^ own.keys()) or sorted(
            name for name, tensor in own.items() if tensor.shape != saved[name].shape
        )
        if wrong:
            raise ConfigError(f"checkpoint {folder.parent}: lora of other layers or rank, first {wrong[0]}")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(as_shared(saved[name], tensor))

    def _own(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad:
                yield name, parameter.detach()


def possible_targets(module: "PreTrainedModel") -> list[str]:
    """Names of the linear layers that may get an adapter: all but the output layer and routers."""
    head = cast("Any", module).get_output_embeddings()
    return sorted(
        {
            path.rpartition(".")[2]
            for path, part in named_parts(module)
            if isinstance(part, nn.Linear) and part is not head and not looks_like_router(part)
        }
    )


def _chosen(module: "PreTrainedModel", settings: LoraSettings) -> list[str]:
    possible = possible_targets(module)
    if not possible:
        raise ConfigError(f"lora: {type(module).__name__} has no linear layers to adapt; leave it out")
    if settings.targets is None:
        return possible
    unknown = [name for name in settings.targets if name not in possible]
    if unknown:
        raise ConfigError(
            f"lora.targets: {type(module).__name__} has no {', '.join(unknown)}; possible are "
            f"{', '.join(possible)}"
        )
    return list(settings.targets)


def _is_adapted(part: nn.Module) -> bool:
    return hasattr(part, "lora_A") and hasattr(part, "base_layer")


def _outer(name: str) -> str:
    """As PEFT calls it in a file."""
    return _PREFIX + name.replace(f".{_NAME}.", ".")


def _digest(tensors: Iterator[Tensor]) -> int:
    found = 0
    for tensor in tensors:
        found = zlib.crc32(as_bytes(tensor).data, found)
    return found
