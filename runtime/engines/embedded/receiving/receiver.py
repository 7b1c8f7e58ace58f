"""The receiving side of a publication: what every transport does for an engine."""

from collections.abc import Collection, Generator
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.trainer.publication.manifest import Manifest, TensorEntry

Bytes = NDArray[np.uint8]

PUBLISH_AGAIN = "publish the version again; the engine still serves the old weights"


class Incoming(NamedTuple):
    """A tensor that has arrived.  Who takes it verifies the checksum of what it keeps."""

    entry: TensorEntry
    content: Bytes
    is_lasting: bool = False
    """Nobody writes there any more.  Else the bytes are gone when the next tensor is asked for."""


class Receiver(Protocol):
    """Fetches publications of one transport.  Blocking: call it in a thread, one publication at a time."""

    def receive(self, manifest: Manifest, wanted: Collection[str]) -> Generator[Incoming]:
        """Each wanted tensor, in any order, and perhaps others; Refusal when one cannot be had.

        One that comes again replaces the first.
        """
        ...


def wrong(tensor: str, what: str, remedy: str = PUBLISH_AGAIN) -> Refusal:
    """Of a tensor that cannot be served."""
    return Refusal(422, "tensor", f"tensor {tensor!r}: {what}", remedy)
