"""What all sandboxes take of the tool server, now and at the most."""

from sostenuto.scheduler.events import SandboxClaim
from sostenuto.types import SandboxRung


class Usage:
    __slots__ = (
        "disk_bytes", "memory_bytes", "peak_disk_bytes", "peak_memory_bytes", "peak_sandboxes", "sandboxes",
    )  # fmt: skip

    def __init__(self) -> None:
        self.sandboxes = self.peak_sandboxes = 0
        """Those that are more than a snapshot."""
        self.memory_bytes = self.peak_memory_bytes = 0
        self.disk_bytes = self.peak_disk_bytes = 0

    def __repr__(self) -> str:
        return f"<Usage {self.sandboxes} sandboxes, memory={self.memory_bytes} disk={self.disk_bytes}>"

    def begins(self, claim: SandboxClaim) -> None:
        self.disk_bytes += claim.disk_bytes
        self.peak_disk_bytes = max(self.peak_disk_bytes, self.disk_bytes)
        self.moves(claim, SandboxRung.SNAPSHOTTED, SandboxRung.RUNNING)

    def ends(self, claim: SandboxClaim, rung: SandboxRung) -> None:
        self.disk_bytes -= claim.disk_bytes
        self.moves(claim, rung, SandboxRung.SNAPSHOTTED)

    def moves(self, claim: SandboxClaim, before: SandboxRung, rung: SandboxRung) -> None:
        self.sandboxes += (rung is not SandboxRung.SNAPSHOTTED) - (before is not SandboxRung.SNAPSHOTTED)
        self.peak_sandboxes = max(self.peak_sandboxes, self.sandboxes)
        self.grows(claim.memory_bytes * (_in_memory(rung) - _in_memory(before)))

    def grows(self, memory_bytes: int) -> None:
        self.memory_bytes += memory_bytes
        self.peak_memory_bytes = max(self.peak_memory_bytes, self.memory_bytes)


def _in_memory(rung: SandboxRung) -> bool:
    return rung is SandboxRung.RUNNING or rung is SandboxRung.PAUSED
