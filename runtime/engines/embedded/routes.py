"""The experts of each token whose KV is there, kept in the KV itself.

They lie behind the keys of the last layer, as further layers that attention never reads.  So whatever
moves, shares or keeps KV does the same with them, and a prefix that another request computed has its own.

Suffixes as in `attention`; X = layers added to the keys, L = layers with a router, E = experts of a token.
"""

import base64
from dataclasses import dataclass

import torch

from sostenuto.runtime.engines.embedded.attention import Decode, Step
from sostenuto.runtime.engines.embedded.lanes import KvShape
from sostenuto.runtime.engines.embedded.tensors import as_array
from sostenuto.runtime.engines.wire import RoutedExperts

_NUMBER = torch.int16


@dataclass(frozen=True, slots=True)
class Routes:
    """How the experts of one model lie in its KV."""

    first: int
    """Layer of the keys from which on they lie."""
    layers: int
    top_k: int

    @property
    def numbers(self) -> int:
        """Of one token."""
        return self.layers * self.top_k

    def added_layers(self, shape: KvShape) -> int:
        """How many layers the keys need beyond the model's."""
        room = shape.heads * shape.key_size * shape.dtype.itemsize // _NUMBER.itemsize
        return -(-self.numbers // room)

    def write(self, step: Step, seen: list[torch.Tensor]) -> None:
        """Keep what the L routers chose, (T, E) each, for the tokens of `step`."""
        experts = torch.stack(seen, dim=1).to(_NUMBER).flatten(1)
        for part in step.parts:
            store = part.keys[self.first :].view(_NUMBER)
            numbers = self._spread(experts[part.first : part.last], store)
            if isinstance(part, Decode):
                store[:, part.rows, :, part.positions] = numbers
            else:
                store[:, :, part.start : part.start + part.count] = numbers.permute(1, 2, 0, 3)

    def read(self, keys: torch.Tensor, start: int) -> RoutedExperts:
        """Of the tokens from `start` on that keys (layers + X, K, tokens, D) hold."""
        store = keys[self.first :, :, start:].view(_NUMBER)
        count = store.shape[2]
        numbers = store.permute(2, 0, 1, 3).reshape(count, -1)[:, : self.numbers]
        data = base64.b64encode(as_array(numbers.contiguous()).astype("<i2").tobytes())
        return RoutedExperts(start=start, shape=(count, self.layers, self.top_k), data=data.decode())

    def _spread(self, experts: torch.Tensor, store: torch.Tensor) -> torch.Tensor:
        """(T, L * E) as (T, X, K, numbers in a key), zeros behind."""
        added, heads, size = store.shape[0], store.shape[-3], store.shape[-1]
        padded = torch.nn.functional.pad(experts, (0, added * heads * size - self.numbers))
        return padded.view(-1, added, heads, size)
