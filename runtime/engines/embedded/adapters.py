"""LoRA adapters over one base model, several at once, each for the requests that ask for it.

A low-rank adapter adds scale * B A to the matrix of a linear layer (Hu et al. 2021).  The base stays as it
is: what the layer returns is added to, for the rows of each adapter together, so one batch serves all.

Suffixes: T = packed tokens, R = rank.
"""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from sostenuto.runtime.engines.embedded.lora import Adapter, read_adapter
from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.runtime.engines.wire import AdapterReply, AdapterRequest
from sostenuto.trainer.tensors import named_parts


class Adapters:
    """Those of one model, by name.  `read` may run on any thread, the rest on the engine's."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        self._like = torch.empty(0, dtype=dtype, device=device)
        self._linears = {path: part for path, part in named_parts(module) if isinstance(part, nn.Linear)}
        self._hooked: set[str] = set()
        self._by_name: dict[str, Adapter] = {}
        self._loaded = 0
        self._rows: list[tuple[Adapter, Tensor]] = []
        """Who is computed in the forward pass under way, with the places of their tokens."""

    def read(self, request: AdapterRequest) -> Adapter:
        """The adapter of a folder in PEFT's format, checked against the model, or Refusal."""
        return read_adapter(request, self._linears, self._like)

    def put(self, adapter: Adapter) -> AdapterReply:
        """Serve `adapter` to new requests of its name; those that run keep the one they have."""
        known = self._by_name.get(adapter.name)
        if known and known.version and (adapter.version is None or adapter.version <= known.version):
            message = (
                f"version: {adapter.name} {adapter.version} is not newer than the loaded {known.version}"
            )
            raise Refusal(409, "version", message, "versions never go back; load a newer one")
        self._loaded += 1
        adapter.namespace = f"{adapter.name}#{self._loaded}"
        self._by_name[adapter.name] = adapter
        for path in adapter.layers.keys() - self._hooked:
            self._linears[path].register_forward_hook(partial(self._add, path))
            self._hooked.add(path)
        return adapter.reply()

    def drop(self, name: str) -> None:
        """Forget an adapter; idempotent.  Requests that run on it go on."""
        self._by_name.pop(name, None)

    def get(self, name: str | None) -> Adapter | None:
        """The one to serve a request of `name` with; Refusal for a name that is not loaded."""
        if name is None:
            return None
        if name not in self._by_name:
            loaded = ", ".join(sorted(self._by_name)) or "none"
            message = f"adapter: {name!r} is not loaded (loaded: {loaded})"
            raise Refusal(404, "adapter", message, "load it first")
        return self._by_name[name]

    @contextmanager
    def serving(self, fed: Iterable[tuple[Adapter | None, int]]) -> Generator[None]:
        """A forward pass inside computes the next `count` tokens with each adapter, in the order given."""
        places: dict[Adapter, list[Tensor]] = {}
        first = 0
        for adapter, count in fed:
            if adapter is not None:
                places.setdefault(adapter, []).append(torch.arange(first, first + count))
            first += count
        self._rows = [(adapter, torch.cat(parts).to(self._like.device)) for adapter, parts in places.items()]
        try:
            yield
        finally:
            self._rows = []

    def _add(self, path: str, _linear: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        for adapter, rows in self._rows:
            if path in adapter.layers:
                down, up = adapter.layers[path]
                # (1, T, inputs) to (rows, R) to (rows, outputs)
                output[0].index_add_(0, rows, inputs[0][0, rows] @ down.T @ up.T)
