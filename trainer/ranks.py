"""The processes that train one model together: each holds a share of it and works on a share of every batch.

- All ranks carry out the same commands on the same samples, in the same order, so that they meet wherever one
  waits for the others.
- Weights, gradients and moments are sharded by PyTorch's FSDP2; a layer is whole while it runs.
- What is saved and published is whole, so another number of ranks can go on with it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch.distributed
import torch.distributed.fsdp
import torch.distributed.tensor
from torch import Tensor, nn
from torch.distributed.tensor import _utils as _layouts

T = TypeVar("T")
_distributed = cast("Any", torch.distributed)
_fsdp = cast("Any", torch.distributed.fsdp)
_tensor = cast("Any", torch.distributed.tensor)
_placed = cast("Any", _layouts).compute_local_shape_and_global_offset
_HOST = "127.0.0.1"
_INSIDE = "sostenuto_inside"


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those that train together.  Every method is called by all of them, or by none."""

    index: int = 0
    count: int = 1

    def every(self, holds: bool) -> bool:
        """Whether it holds for all."""
        return all(self.gather(holds))

    def total(self, value: float) -> float:
        return sum(self.gather(value))

    def average(self, tensor: Tensor) -> None:
        """Put the mean of what all have in its place."""
        if self.count > 1:
            _distributed.all_reduce(tensor)
            tensor.div_(self.count)

    def gather(self, value: T) -> list[T]:
        """The value of each, first rank first."""
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        _distributed.all_gather_object(found, value)
        return found

    def shares(self, lengths: Sequence[int]) -> list[list[int]]:
        """Which sequences each rank takes: the longest first, to whom has the fewest tokens."""
        shares: list[list[int]] = [[] for _ in range(self.count)]
        tokens = [0] * self.count
        for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
            fewest = tokens.index(min(tokens))
            shares[fewest].append(index)
            tokens[fewest] += lengths[index]
        return shares


ALONE = Ranks()


class Meeting:
    """Where ranks find each other; the first one opens it."""

    def __init__(self, count: int, *, port: int = 0, index: int = 0) -> None:
        """`port`: of a meeting that is open already; none for the first rank."""
        self._ranks = Ranks(index, count)
        self._store = _distributed.TCPStore(
            _HOST, port, world_size=count, is_master=index == 0, wait_for_workers=False
        )
        self.port: int = self._store.port

    def join(self) -> Ranks:
        """Wait for all."""
        rank, count = self._ranks.index, self._ranks.count
        _distributed.init_process_group("gloo", store=self._store, rank=rank, world_size=count)
        return self._ranks


def shard(module: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Share the parameters of `module` among all ranks, each of `layers` on its own."""
    # Layers are classes that FSDP makes of the module's own; what the model is called must not change.
    half = any(parameter.dtype != torch.float32 for parameter in module.parameters())
    policy = _fsdp.MixedPrecisionPolicy(reduce_dtype=torch.float32 if half else None)
    mesh = _distributed.device_mesh.init_device_mesh("cpu", (_distributed.get_world_size(),))
    for layer in layers:
        _fsdp.fully_shard(layer, mesh=mesh, mp_policy=policy)
    _fsdp.fully_shard(module, mesh=mesh, mp_policy=policy)
    setattr(module, _INSIDE, _call)
    _fsdp.register_fsdp_forward_method(module, _INSIDE)


def inside(module: nn.Module, compute: Callable[[], Tensor]) -> Tensor:
    """compute(), during which what is outside of the layers is whole."""
    found = getattr(module, _INSIDE)(compute)
    if not torch.is_grad_enabled():
        reshard(module)
    return found


def reshard(module: nn.Module) -> None:
    """Give up what is whole, where no backward pass will."""
    cast("Any", module).reshard()


def _call(compute: Callable[[], Tensor]) -> Tensor:
    return compute()


def whole(tensor: Tensor) -> Tensor:
    """All of it; every rank asks, or none."""
    return cast("Any", tensor).full_tensor() if isinstance(tensor, _tensor.DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's share."""
    return cast("Any", tensor).to_local() if isinstance(tensor, _tensor.DTensor) else tensor


def box_of(tensor: Tensor) -> tuple[tuple[int, int], ...]:
    """Where this rank's share lies in the whole: the first index and the one behind, in each dimension."""
    if not isinstance(tensor, _tensor.DTensor):
        return tuple((0, size) for size in tensor.shape)
    shared = cast("Any", tensor)
    lengths, starts = _placed(shared.shape, shared.device_mesh, shared.placements)
    return tuple((start, start + length) for start, length in zip(starts, lengths, strict=True))


def is_shared(tensor: Tensor) -> bool:
    """Whether each rank has a share of it, and not all of them the whole."""
    return isinstance(tensor, _tensor.DTensor)


def as_shared(value: Tensor, like: Tensor) -> Tensor:
    """`value`, which all ranks have, shared as `like` is."""
    if not isinstance(like, _tensor.DTensor) or value.shape != like.shape:
        return value
    shared = cast("Any", like)
    return _tensor.distribute_tensor(value, shared.device_mesh, shared.placements)
