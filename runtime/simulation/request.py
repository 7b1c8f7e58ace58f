"""One request to a simulated engine, and what became of it."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from sostenuto.runtime.simulation.host_tier import CacheNode
from sostenuto.scheduler.kv import Segment
from sostenuto.types import ProgramId, Version


@dataclass(frozen=True, slots=True)
class Request:
    request_id: str
    program_id: ProgramId
    shared: tuple[Segment, ...]
    context_tokens: int
    """Shared prefixes included."""
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Served:
    """Tokens of the request's context came from the device cache, from the lower tier or from prefill."""

    request_id: str
    program_id: ProgramId
    cached_tokens: int
    restored_tokens: int
    prefilled_tokens: int
    """A context that had to be prefilled again counts again."""
    generated_tokens: int
    queue_s: float
    """Until its first prefill step."""
    prefill_s: float
    decode_s: float
    pause_s: float
    aborted: bool = False
    failed: str = ""
    versions: tuple[tuple[Version, int], ...] = ()
    """Of what was generated: from which token on which version."""


class Stage(Enum):
    QUEUED = auto()
    RESTORING = auto()
    PREFILLING = auto()
    RECOMPUTING = auto()
    """Its context has to be prefilled again, and another's turn is first."""
    DECODING = auto()
    OVER = auto()


class Run:
    """A request on its way through an engine.  Written by the engine alone."""

    __slots__ = (
        "cached", "chain", "chunk_s", "decode_s", "done", "ends_step", "from_step", "generated", "hit",
        "new", "pause_s", "paused_s", "prefill_s", "prefilled", "private", "queue_s", "request", "restored",
        "since_s", "sizes", "stage", "stamps", "submitted_s",
    )  # fmt: skip

    def __init__(self, request: Request, done: Callable[[Served], None], now_s: float) -> None:
        self.request = request
        self.done = done
        self.submitted_s = now_s
        self.stage = Stage.QUEUED
        self.chain: list[CacheNode] = []
        """Its room in the pool; empty while it waits for it."""
        self.since_s = now_s
        self.paused_s = 0.0
        self.from_step: float = 0.0
        self.ends_step: float = 0.0
        self.chunk_s = 0.0
        self.hit = self.new = 0
        self.cached = self.restored = self.prefilled = self.generated = 0
        self.queue_s = self.prefill_s = self.decode_s = self.pause_s = 0.0
        self.sizes = [segment.tokens for segment in request.shared]
        """Of the parts of its context; the last is private to the program."""
        self.private = request.context_tokens - sum(self.sizes)
        self.sizes.append(self.private)
        self.stamps: list[tuple[Version, int]] = []

    def stamp(self, version: Version, tokens: int) -> None:
        """From token number `tokens` on it generates under this version."""
        if not self.stamps or self.stamps[-1][0] != version:
            while self.stamps and self.stamps[-1][1] >= tokens:
                self.stamps.pop()
            self.stamps.append((version, tokens))

    def begins(self, stage: Stage, now_s: float, paused_s: float) -> None:
        """`paused_s`: how long the engine has stood still in all."""
        self.stage, self.since_s, self.paused_s = stage, now_s, paused_s

    def spends(self, now_s: float, paused_s: float) -> None:
        """Put the time since the stage began where it belongs."""
        stood_s = paused_s - self.paused_s
        self.pause_s += stood_s
        spent_s = now_s - self.since_s - stood_s
        if self.stage is Stage.DECODING:
            self.decode_s += spent_s
        else:
            self.prefill_s += spent_s

    def served(self, *, aborted: bool = False, failed: str = "") -> Served:
        return Served(
            self.request.request_id,
            self.request.program_id,
            self.cached,
            self.restored,
            self.prefilled,
            self.generated,
            self.queue_s,
            self.prefill_s,
            self.decode_s,
            self.pause_s,
            aborted,
            failed,
            tuple(self.stamps),
        )
