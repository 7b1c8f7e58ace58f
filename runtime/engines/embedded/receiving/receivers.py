"""The receivers of one engine, one for each transport."""

from sostenuto.runtime.engines.embedded.receiving.mapped import MappedReceiver
from sostenuto.runtime.engines.embedded.receiving.receiver import Receiver
from sostenuto.trainer.publication.manifest import Manifest


class Receivers:
    """Chosen by what a manifest says."""

    def __init__(self) -> None:
        self._mapped = MappedReceiver()

    def of(self, manifest: Manifest) -> Receiver:
        match manifest.transport:
            case "shared_memory" | "disk":
                return self._mapped
