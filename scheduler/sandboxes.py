"""What sandboxes take of the tool server, and which of them step down when one more is wanted.

rung          memory  CPU  disk
RUNNING       yes     yes  yes
PAUSED        yes     -    yes
RECLAIMED     -       -    yes
SNAPSHOTTED   -       -    yes   no process either; coming back takes longest
"""

from collections.abc import Iterable
from dataclasses import dataclass

from sostenuto.scheduler.events import SandboxClaim, ToolServerJoined
from sostenuto.scheduler.program import Program
from sostenuto.types import ProgramId, SandboxRung

_UNLIMITED = float("inf")
_SMOOTHING = 0.2
_COST_S = {
    SandboxRung.RUNNING: 1.0,
    SandboxRung.PAUSED: 0.01,
    SandboxRung.RECLAIMED: 1.0,
    SandboxRung.SNAPSHOTTED: 5.0,
}
"""Of reaching a rung, before it was measured; RUNNING: of coming back."""


_DEPTH = {rung: depth for depth, rung in enumerate(SandboxRung)}


@dataclass(slots=True)
class _Held:
    claim: SandboxClaim
    rung: SandboxRung = SandboxRung.RUNNING

    @property
    def memory_bytes(self) -> int:
        in_memory = self.rung in (SandboxRung.RUNNING, SandboxRung.PAUSED)
        return self.claim.memory_bytes if in_memory else 0

    @property
    def cpus(self) -> float:
        return self.claim.cpus if self.rung is SandboxRung.RUNNING else 0.0


class SandboxLedger:
    """Claims of all living sandboxes.  Without a ToolServerJoined nothing is limited."""

    def __init__(self) -> None:
        self._limits = ToolServerJoined()
        self._held: dict[ProgramId, _Held] = {}
        self._memory = 0
        self._disk = 0
        self._cpus = 0.0
        self._cost_s = dict(_COST_S)
        self.reclaims = True
        """Whether the tool server can move memory out: so far as is known."""

    def __contains__(self, program_id: ProgramId) -> bool:
        return program_id in self._held

    def join(self, limits: ToolServerJoined) -> None:
        self._limits = limits

    @property
    def is_limited(self) -> bool:
        limits = self._limits
        return limits.memory_bytes is not None or limits.disk_bytes is not None or limits.cpus is not None

    def rung(self, program_id: ProgramId) -> SandboxRung | None:
        held = self._held.get(program_id)
        return held.rung if held else None

    def could_ever_fit(self, claim: SandboxClaim) -> bool:
        return _within(self._limits, claim.memory_bytes, claim.disk_bytes, claim.cpus)

    def fits(self, claim: SandboxClaim) -> bool:
        """Whether one more that runs would fit."""
        return _within(
            self._limits,
            self._memory + claim.memory_bytes,
            self._disk + claim.disk_bytes,
            self._cpus + claim.cpus,
        )

    def can_run(self, program_id: ProgramId) -> bool:
        """Whether the program's sandbox runs, or would fit if it did."""
        held = self._held.get(program_id)
        if held is None or held.rung is SandboxRung.RUNNING:
            return True
        return _within(
            self._limits,
            self._memory - held.memory_bytes + held.claim.memory_bytes,
            self._disk,
            self._cpus + held.claim.cpus,
        )

    def hold(self, program_id: ProgramId, claim: SandboxClaim) -> None:
        self.release(program_id)
        self._held[program_id] = _Held(claim)
        self._count(self._held[program_id], 1)
        self._disk += claim.disk_bytes

    def move(self, program_id: ProgramId, rung: SandboxRung) -> None:
        held = self._held[program_id]
        self._count(held, -1)
        held.rung = rung
        self._count(held, 1)

    def release(self, program_id: ProgramId) -> None:
        """Safe to call twice."""
        held = self._held.pop(program_id, None)
        if held is not None:
            self._count(held, -1)
            self._disk -= held.claim.disk_bytes

    def moved(self, program_id: ProgramId, rung: SandboxRung, elapsed_s: float) -> None:
        """It stands on `rung`, perhaps above the one that was asked for, and that took so long."""
        self._cost_s[rung] += _SMOOTHING * (elapsed_s - self._cost_s[rung])
        asked = self.rung(program_id)
        if asked is None or _DEPTH[rung] >= _DEPTH[asked]:
            return
        if asked is SandboxRung.RECLAIMED:
            self.reclaims = False
        self.move(program_id, rung)

    def return_s(self, rung: SandboxRung) -> float:
        """There and back: what a step down to `rung` costs in all."""
        return self._cost_s[rung] + self._cost_s[SandboxRung.RUNNING]

    def step_down(self, claim: SandboxClaim, idle: Iterable[Program]) -> list[Program]:
        """Which of `idle`, in this order, give up their memory so that `claim` fits; [] if none can."""
        picked: list[Program] = []
        memory, cpus = self._memory, self._cpus
        for program in idle:
            held = self._held.get(program.id)
            if held is None or held.rung is not SandboxRung.RUNNING:
                continue
            picked.append(program)
            memory -= held.memory_bytes
            cpus -= held.cpus
            wanted = (memory + claim.memory_bytes, self._disk + claim.disk_bytes, cpus + claim.cpus)
            if _within(self._limits, *wanted):
                return picked
        return []

    def _count(self, held: _Held, sign: int) -> None:
        self._memory += sign * held.memory_bytes
        self._cpus += sign * held.cpus


def _within(limits: ToolServerJoined, memory_bytes: int, disk_bytes: int, cpus: float) -> bool:
    return (
        memory_bytes <= (_UNLIMITED if limits.memory_bytes is None else limits.memory_bytes)
        and disk_bytes <= (_UNLIMITED if limits.disk_bytes is None else limits.disk_bytes)
        and cpus <= (_UNLIMITED if limits.cpus is None else limits.cpus) + 1e-9
    )
