"""New weights beside the old ones, and the swap.

- `expect` and `take` copy and verify into spare tensors while the model decodes; `commit` exchanges pointers
  between two steps, so the pause does not grow with the model, and the old tensors are the next spare.
- What lies in memory for good is verified and served from there, without a copy.
- Tied parameters are one tensor and stay one.
- Parameters are published whole; those that are kept in few bits are quantized when they were verified.
- Versions never go back.  After a commit that failed half way, `broken` says so until a full update.
"""

import math
import zlib
from collections.abc import Mapping

import numpy as np
import torch

from sostenuto.runtime.engines.embedded.receiving.receiver import Bytes, Incoming, wrong
from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.runtime.engines.embedded.tensors import as_bytes, as_tensor
from sostenuto.trainer.publication.manifest import Manifest, TensorEntry
from sostenuto.trainer.quantization import Quantized, quantize
from sostenuto.types import Version


class Weights:
    """The parameters of one module, under one version."""

    def __init__(
        self, module: torch.nn.Module, version: Version, quantized: Mapping[str, Quantized] | None = None
    ) -> None:
        self.version = version
        self.staged: Version | None = None
        self.broken: str | None = None
        first = next(module.parameters())
        self._dtype = first.dtype
        self.device = str(first.device)
        self._quantized = quantized or {}
        self._names, self._live = _distinct(module.state_dict(keep_vars=True))
        self._names |= {name: name for name in self._quantized}
        self._spare: dict[str, tuple[torch.Tensor, ...]] = {}
        self._lent_live: set[str] = set()
        """Tensors that lie where the sender has written them: others see the same memory."""
        self._lent_spare: set[str] = set()

    def expect(self, manifest: Manifest) -> dict[str, str]:
        """The names of `manifest` with those under which `take` wants them; Refusal for one that is wrong."""
        self._newer(manifest.version)
        self.staged = None
        entries = self._complete(manifest)
        for name, entry in entries.items():
            _check_form(entry, *self._form(name))
        return {entry.name: name for name, entry in entries.items()}

    def take(self, name: str, incoming: Incoming) -> None:
        """Put what has arrived beside what is served; Refusal when it is not as it was published."""
        entry, content, is_lasting = incoming
        shape, dtype = self._form(name)
        kept = self._tensors(name)
        is_plain = self._is_plain(name)
        if is_plain and is_lasting:
            _verify(entry, content)
            self._spare[name] = (as_tensor(content).view(dtype).view(shape),)
            self._lent_spare.add(name)
            return
        if name not in self._spare or name in self._lent_spare:
            self._spare[name] = tuple(torch.empty_like(live.data) for live in kept)
            self._lent_spare.discard(name)
        if is_plain:
            own = as_bytes(self._spare[name][0])
            np.copyto(own, content)
            _verify(entry, own)
            return
        # A private copy, so that what is verified cannot change any more.
        own = content if is_lasting else np.array(content)
        _verify(entry, own)
        tensor = as_tensor(own).view(dtype).view(shape).to(kept[0].device)
        for spare, new in zip(self._spare[name], self._converted(name, tensor), strict=True):
            spare.copy_(new)

    def served(self, name: str) -> Bytes | None:
        """The bytes of a tensor that is served; None where they are not what was published."""
        kept = self._names.get(name)
        live = None if kept is None else self._live.get(kept)
        return as_bytes(live) if live is not None and self._is_plain(kept or "") else None

    def staged_whole(self, manifest: Manifest) -> None:
        """Every tensor that was expected has been taken."""
        self.staged = parsed(manifest.version)

    def commit(self, text: str) -> Version:
        """Serve what was staged as version `text`; between two steps, on the engine's thread."""
        version = self._newer(text)
        if self.staged != version:
            raise not_prepared(text, self.staged)
        self.broken = f"the update to {version} failed half way"
        for name in (*self._live, *self._quantized):
            for live, spare in zip(self._tensors(name), self._spare[name], strict=True):
                self._exchange(live, spare)
        self._lent_live, self._lent_spare = self._lent_spare, self._lent_live
        self.version, self.staged, self.broken = version, None, None
        return version

    def abandon(self, text: str) -> None:
        """Forget what was staged as version `text`; idempotent."""
        if self.staged == parsed(text):
            self.staged = None

    def _exchange(self, live: torch.Tensor, spare: torch.Tensor) -> None:
        live.data, spare.data = spare.data, live.data

    def _is_plain(self, name: str) -> bool:
        """Kept as the bytes that are published."""
        kept = self._tensors(name)[0]
        return name not in self._quantized and kept.device.type == "cpu" and kept.is_contiguous()

    def _tensors(self, name: str) -> tuple[torch.Tensor, ...]:
        """What is kept of a parameter."""
        quantized = self._quantized.get(name)
        return quantized.tensors if quantized is not None else (self._live[name],)

    def _form(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Of a parameter as it is published."""
        quantized = self._quantized.get(name)
        if quantized is not None:
            return quantized.shape, self._dtype
        return tuple(self._live[name].shape), self._live[name].dtype

    def _newer(self, text: str) -> Version:
        version = parsed(text)
        if version <= self.version:
            message = f"version: {version} is not newer than {self.version}, which is served"
            raise Refusal(409, "version", message, "versions never go back; publish a newer one")
        return version

    def _complete(self, manifest: Manifest) -> dict[str, TensorEntry]:
        """Entries by the name under which this engine keeps the tensor."""
        entries: dict[str, TensorEntry] = {}
        for entry in manifest.tensors:
            name = self._names.get(entry.name)
            if name is None:
                raise wrong(entry.name, "the model has no such tensor")
            if name in entries:
                raise wrong(entry.name, f"is given twice (tied to {entries[name].name})")
            entries[name] = entry
        if missing := [name for name in (*self._live, *self._quantized) if name not in entries]:
            raise wrong(missing[0], f"is missing ({len(missing)} missing in all)")
        return entries

    def _converted(self, name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What is kept of a parameter that was published as `tensor`."""
        quantized = self._quantized.get(name)
        return (tensor,) if quantized is None else quantize(tensor, quantized.format).tensors


def _distinct(state: Mapping[str, torch.Tensor]) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Each name's first alias, and the tensors by first alias."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(tensor), name) for name, tensor in state.items()}
    return names, {name: state[name] for name in first.values()}


def _check_form(entry: TensorEntry, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    if entry.shape != shape:
        raise wrong(entry.name, f"has shape {list(entry.shape)}, the model has {list(shape)}")
    if entry.dtype != name:
        raise wrong(entry.name, f"has dtype {entry.dtype}, the engine serves {name}")
    if entry.nbytes != (nbytes := math.prod(shape) * dtype.itemsize):
        raise wrong(entry.name, f"has {entry.nbytes} bytes, its shape has {nbytes}")


def _verify(entry: TensorEntry, content: Bytes) -> None:
    if zlib.crc32(content.data) != entry.checksum:
        raise wrong(entry.name, "its bytes do not have the checksum of the manifest")


def parsed(text: str) -> Version:
    try:
        return Version.parse(text)
    except ValueError as exc:
        raise Refusal(400, "version", f"version: {text!r} is not EPOCH.NUMBER", "send it as '0.7'") from exc


def not_prepared(text: str, staged: Version | None) -> Refusal:
    message = f"version: {text} is not prepared (prepared: {staged or 'none'})"
    return Refusal(409, "not_prepared", message, "prepare it first")
