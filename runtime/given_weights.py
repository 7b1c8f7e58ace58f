"""Weights from a trainer that is not ours, as publications: a model folder, or tensors by name.

- Tensors are written into one file that engines map, as our trainer's are, in the engines' dtype.
- What cannot be the model's weights is refused before any engine hears of it, so none has to be
  quarantined for it.
- torch is loaded only by who gives tensors of it, which is after they loaded it themselves.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sostenuto.errors import ConfigError, nearest
from sostenuto.runtime.weight_folder import publication_of, shapes_of
from sostenuto.trainer.publication.manifest import Manifest
from sostenuto.types import Version

if TYPE_CHECKING:
    from torch import Tensor

    from sostenuto.trainer.publication.shared_memory import SharedMemorySender

GivenTensors = str | Path | Mapping[str, Any]
"""A folder with *.safetensors, or torch tensors by the names of the model's state dict."""

_WHOLE = "give state_dict() of the whole model; a LoRA is merged before"


class GivenWeights:
    """Of one job.  Blocking: call its methods in a thread, one at a time."""

    def __init__(self, model: Path, place: Path, dtype: str) -> None:
        """`model`: the folder that engines were started with.  `dtype`: theirs, as torch spells it."""
        self._model = model
        self._place = place
        self._dtype = dtype
        self._sender: SharedMemorySender | None = None
        self._file: Path | None = None
        """Copied from a folder; the deployed one, for engines that join later."""

    def write(self, weights: GivenTensors, version: Version) -> Manifest:
        """Copy the weights; what becomes of the originals afterwards does not matter.

        ConfigError names the tensor or the file that is wrong.
        """
        if isinstance(weights, str | Path):
            return self._of_folder(Path(weights), version)
        if not isinstance(cast("object", weights), Mapping) or not weights:
            raise ConfigError(f"publish: got {type(weights).__name__}; give a folder, or tensors by name")
        return self._of_tensors(weights, version)

    def close(self) -> None:
        """Remove what was written.  Idempotent."""
        if self._sender is not None:
            self._sender.close()
        self._replace_file(None)

    def _of_folder(self, folder: Path, version: Version) -> Manifest:
        manifest = publication_of(folder, self._place, version)
        try:
            self._check({entry.name: entry.shape for entry in manifest.tensors})
        except ConfigError:
            Path(manifest.path).unlink()
            raise
        self._replace_file(Path(manifest.path))
        return manifest

    def _of_tensors(self, given: Mapping[str, Any], version: Version) -> Manifest:
        for name, tensor in given.items():
            if not type(tensor).__module__.startswith("torch"):
                raise ConfigError(f"publish: {name!r} is {type(tensor).__name__}; give torch tensors")
        from sostenuto.trainer.publication.shared_memory import SharedMemorySender
        from sostenuto.trainer.publication.snapshot import unique_tensors

        tensors = unique_tensors(dict(given))
        self._check({name: tuple(tensor.shape) for name, tensor in tensors})
        served = [(name, self._served(name, tensor)) for name, tensor in tensors]
        if self._sender is None:
            self._sender = SharedMemorySender()
        return self._sender.publish(version, served)

    def _served(self, name: str, tensor: "Tensor") -> "Tensor":
        import torch

        if not tensor.is_floating_point():
            return tensor
        if not bool(torch.isfinite(tensor).all()):
            raise ConfigError(
                f"publish: {name!r} has values that are not finite; drop the last step and publish the "
                "weights before it"
            )
        return tensor.detach().to(cast("torch.dtype", getattr(torch, self._dtype)))

    def _check(self, given: Mapping[str, tuple[int, ...]]) -> None:
        """That the names and shapes are the model's, where its folder has the names of its state dict."""
        model = shapes_of(self._model)
        if any(".experts." in name for name in model):
            # Experts that lie apart in files are one tensor in a state dict; the engines check those.
            return
        for name, shape in given.items():
            if name not in model:
                raise ConfigError(f"publish: the model has no tensor {name!r}; {nearest(name, list(model))}")
            if shape != model[name]:
                raise ConfigError(
                    f"publish: {name!r} has shape {list(shape)}, the model's has {list(model[name])}"
                )
        if missing := [name for name in model if name not in given]:
            raise ConfigError(f"publish: {missing[0]!r} is missing, {len(missing)} in all; {_WHOLE}")

    def _replace_file(self, file: Path | None) -> None:
        old, self._file = self._file, file
        if old is not None and old != file:
            old.unlink(missing_ok=True)
