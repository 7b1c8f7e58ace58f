"""What random histories are checked against: engines and agents as events and actions tell of them."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from hypothesis import strategies as st

from sostenuto.scheduler.events import EngineJoined
from sostenuto.scheduler.kv import Footprint, Segment
from sostenuto.scheduler.lifecycle import Phase
from sostenuto.scheduler.requirements import ANY, Requirement
from sostenuto.scheduler.update_terms import UpdateTerms
from sostenuto.types import EngineId, GroupId, SandboxRung, Version

TURN = 10
LEASE_S = 2_000.0
PATIENCE_S = 100.0
SYSTEM = Segment("system", 30)
GROUPS = [GroupId("red"), GroupId("blue")]
TOOLS = ("bash", "read", "")
STEP_S = st.floats(0, 0.4)
REQUIRED = [
    Requirement(pinned=True),
    Requirement.at_least(Version(0, 1)),
    Requirement.exactly(Version(0, 0)),
    Requirement.exactly(Version(0, 1)),
]
TERMS = st.builds(
    UpdateTerms,
    running=st.sampled_from(["finish", "continue", "retract", "abort"]),
    acting=st.sampled_from(["keep", "recompute", "pin"]),
    finish_within_s=st.sampled_from([0.0, 1.0, 50.0]),
    quorum=st.sampled_from([1, 0.5]),
    deadline_s=st.sampled_from([0.0, 0.5]),
    late=st.sampled_from(["drain", "quarantine"]),
)


@dataclass(slots=True)
class Engine:
    kv_tokens: int | None
    slots: int
    block: int
    host_tokens: int
    gives_up_parts: bool = False

    def joined(self, engine_id: EngineId, version: Version) -> EngineJoined:
        return EngineJoined(
            engine_id,
            version,
            self.kv_tokens,
            self.slots,
            self.block,
            prefill_tokens_s=100.0,
            gives_up_parts=self.gives_up_parts,
            host_tokens=self.host_tokens,
            host_tokens_s=1000.0 if self.host_tokens else 0.0,
        )

    @property
    def holds_whole(self) -> bool:
        """Whether a program between turns holds all of its KV or none: what leaves an end is not told."""
        return not self.gives_up_parts or self.host_tokens > 0

    def rounded(self, tokens: int) -> int:
        return -(-tokens // self.block) * self.block

    def counted(self, held: Iterable[Footprint]) -> int:
        """Tokens of all together, what is shared once."""
        footprints = list(held)
        shared = {segment for footprint in footprints for segment in footprint.shared}
        private = sum(self.rounded(footprint.private_tokens) for footprint in footprints)
        return private + sum(self.rounded(segment.tokens) for segment in shared)

    def could_hold(self, footprint: Footprint) -> bool:
        return self.kv_tokens is None or self.counted([footprint]) <= self.kv_tokens


@dataclass(slots=True)
class Agent:
    phase: Phase = Phase.QUEUED
    turn: int = 0
    footprint: Footprint = field(default_factory=lambda: Footprint(0))
    wanted: Footprint = field(default_factory=lambda: Footprint(0))
    engine: EngineId | None = None
    """Where it holds KV."""
    holds: Footprint = field(default_factory=lambda: Footprint(0))
    host: EngineId | None = None
    """In whose lower tier it has KV."""
    rung: SandboxRung | None = None
    """Of its sandbox; None: it has none."""
    since_s: float = 0.0
    """When its phase began."""
    requires: Requirement = ANY

    @property
    def runnable(self) -> bool:
        return self.phase.is_runnable


ENGINES = st.builds(
    Engine,
    kv_tokens=st.sampled_from([100, 160, 240, None]),
    slots=st.integers(1, 4),
    block=st.just(1),
    host_tokens=st.sampled_from([0, 500]),
    gives_up_parts=st.booleans(),
)

ENDS = (Phase.PREPARING, Phase.WAITING, Phase.REASONING, Phase.ACTING, Phase.READY, Phase.PARKED)


def shared_of(group: GroupId | None) -> tuple[Segment, ...]:
    return () if group is None else (SYSTEM, Segment(group, 20))
