"""An engine's side of a transfer, as a process of its own that measures what it is asked for.

python -m benchmarks.publication_side: reads requests as lines of JSON, answers each with a line.
"""

import json
import sys
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import numpy as np
import torch
import torch.distributed
from numpy.typing import NDArray

from sostenuto.runtime.engines.embedded.receiving.receiver import Receiver
from sostenuto.runtime.engines.embedded.receiving.receivers import Receivers
from sostenuto.trainer.publication.groups import reach_store
from sostenuto.trainer.publication.manifest import Manifest
from sostenuto.types import Version

_distributed = cast("Any", torch.distributed)
_PAGE = 4096


class Served:
    """What the side has, as an engine has what it serves."""

    def __init__(self) -> None:
        self.version = Version(0, 0)
        self.digest: int | None = None
        self.tensors: dict[str, NDArray[np.uint8]] = {}

    def served(self, name: str) -> NDArray[np.uint8] | None:
        return self.tensors.get(name)


class Side:
    def __init__(self) -> None:
        self._base = Served()
        self._receivers = Receivers(self._base, "cpu")
        self._places: dict[str, NDArray[np.uint8]] = {}

    def receive(self, manifest: dict[str, Any]) -> dict[str, float]:
        """Every tensor beside what is served, then the checksums; the seconds of both."""
        told = Manifest.model_validate(manifest)
        receiver: Receiver = self._receivers.of(told)
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        arrived = self._arrived(told, receiver)
        there_s, cpu_s = time.perf_counter(), time.process_time() - began_cpu_s
        for entry in told.tensors:
            assert zlib.crc32(arrived[entry.name].data) == entry.checksum, entry.name
        verified_s = time.perf_counter()
        # What was served is written into next time, as an engine does; what was lent is let go.
        lent = told.resident or told.transport == "point_to_point"
        self._places = {} if lent else self._base.tensors
        self._base.tensors, self._base.digest = arrived, told.digest
        self._base.version = Version.parse(told.version)
        return {"transfer_s": there_s - began_s, "cpu_s": cpu_s, "verify_s": verified_s - there_s}

    def _arrived(self, told: Manifest, receiver: Receiver) -> dict[str, NDArray[np.uint8]]:
        arrived: dict[str, NDArray[np.uint8]] = {}
        for entry, content, is_lasting in receiver.receive(told, {entry.name for entry in told.tensors}):
            if is_lasting:
                # Every page is touched: what is mapped is then there.
                content[::_PAGE].max(initial=0)
                arrived[entry.name] = content
                continue
            place = self._places.get(entry.name)
            if place is None or place.nbytes != content.nbytes:
                place = np.zeros(content.nbytes, dtype=np.uint8)
            np.copyto(place, content)
            arrived[entry.name] = place
        return arrived

    def raw(self, port: int, nbytes: int, repeats: int) -> dict[str, float]:
        """gloo's own broadcast of as many bytes, the fastest of a few."""
        group = _distributed.ProcessGroupGloo(reach_store("127.0.0.1", port, 60), 1, 2, timedelta(seconds=60))
        content = torch.zeros(nbytes, dtype=torch.uint8)
        took: list[float] = []
        for _ in range(repeats):
            group.barrier().wait()
            began_s = time.perf_counter()
            group.broadcast([content], _distributed.BroadcastOptions()).wait()
            took.append(time.perf_counter() - began_s)
        return {"s": min(took[1:])}


def main() -> None:
    torch.set_num_threads(1)
    side = Side()
    asked: dict[str, Callable[..., dict[str, float]]] = {"receive": side.receive, "raw": side.raw}
    sys.stdout.write(json.dumps({"ready": 1}) + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        request = json.loads(line)
        answer = asked[request.pop("ask")](**request)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
