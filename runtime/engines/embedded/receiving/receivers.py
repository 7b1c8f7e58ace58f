"""The receivers of one engine, one for each transport."""

from sostenuto.runtime.engines.embedded.receiving.broadcast import BroadcastReceiver
from sostenuto.runtime.engines.embedded.receiving.mapped import MappedReceiver
from sostenuto.runtime.engines.embedded.receiving.patched import PatchedReceiver
from sostenuto.runtime.engines.embedded.receiving.point_to_point import PointToPointReceiver
from sostenuto.runtime.engines.embedded.receiving.receiver import Receiver
from sostenuto.runtime.engines.embedded.receiving.room import Base, Room
from sostenuto.trainer.publication.manifest import Manifest


class Receivers:
    """Chosen by what a manifest says."""

    def __init__(self, base: Base, device: str) -> None:
        """`base`: what the engine serves."""
        room = Room(base)
        self._mapped = MappedReceiver()
        self._broadcast = BroadcastReceiver(device, room)
        self._pieces = PointToPointReceiver(room)
        self._patched = PatchedReceiver(base)

    def of(self, manifest: Manifest) -> Receiver:
        match manifest.transport:
            case "shared_memory" | "disk":
                return self._mapped
            case "broadcast":
                return self._broadcast
            case "point_to_point":
                return self._pieces
            case "disk_delta":
                return self._patched
