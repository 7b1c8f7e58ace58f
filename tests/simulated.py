"""Small engines, plans and policies for tests of the simulation."""

from collections.abc import Callable, Sequence

from sostenuto.runtime.simulation.clock import EventClock
from sostenuto.runtime.simulation.engine import Request, Served, SimulatedEngine
from sostenuto.runtime.simulation.plan import Plan, PlannedTurn, Workload
from sostenuto.runtime.simulation.profile import EngineProfile
from sostenuto.runtime.simulation.profiles import load_profile
from sostenuto.scheduler.events import NO_CLAIM, SandboxClaim
from sostenuto.scheduler.kv import Segment
from sostenuto.types import EngineId, GroupId, ProgramId


def engine_profile(**changes: object) -> EngineProfile:
    """One token takes 10 ms, prefill 1,000 tokens/s in chunks of 100, one after the other, blocks of 10."""
    figures = {
        "name": "test",
        "kv_tokens": 1_000,
        "block_tokens": 10,
        "concurrency": 4,
        "prefill_tokens_s": 1_000,
        "chunk_tokens": 100,
        "overlap": 0.0,
        "itl_s": ((1, 0.01), (2, 0.01)),
    }
    return EngineProfile.model_validate(figures | changes)


def small_profile(**changes: object) -> EngineProfile:
    return load_profile("small").model_copy(update=changes)


class Bench:
    """One engine on a clock of its own, and what it served."""

    def __init__(self, **changes: object) -> None:
        self.clock = EventClock()
        self.engine = SimulatedEngine(EngineId("e0"), engine_profile(**changes), self.clock)
        self.served: dict[str, Served] = {}
        self.ended_s: dict[str, float] = {}

    def ask(
        self, name: str, context: int, output: int, *, shared: Sequence[Segment] = (), program: str = ""
    ) -> None:
        request = Request(name, ProgramId(program or name), tuple(shared), context, output)
        self.engine.generate(request, self._done)

    def ask_at(self, when_s: float, name: str, context: int, output: int, *, program: str = "") -> None:
        self.clock.call_at(when_s, lambda: self.ask(name, context, output, program=program))

    def at(self, when_s: float, do: Callable[[], None]) -> None:
        self.clock.call_at(when_s, do)

    def run(self) -> dict[str, Served]:
        self.clock.run()
        return self.served

    def _done(self, served: Served) -> None:
        assert served.request_id not in self.served
        self.served[served.request_id] = served
        self.ended_s[served.request_id] = self.clock.now_s()


def plan(
    name: str,
    *,
    turns: Sequence[PlannedTurn] | None = None,
    prompt: int = 100,
    shared: Sequence[Segment] = (),
    arrival_s: float = 0.0,
    prepare_s: float = 0.0,
    group: str = "",
    sandbox: SandboxClaim = NO_CLAIM,
    spike_bytes: int = 0,
) -> Plan:
    """Two turns with a tool call of a second between them, unless `turns` says otherwise."""
    usual = (PlannedTurn(20, "bash", 1.0, 50), PlannedTurn(20))
    return Plan(
        ProgramId(name),
        GroupId(group or name),
        1,
        tuple(shared),
        prompt,
        tuple(turns or usual),
        arrival_s=arrival_s,
        prepare_s=prepare_s,
        sandbox=sandbox,
        spike_bytes=spike_bytes,
    )


def closed(plans: Sequence[Plan], concurrency: int) -> Workload:
    return Workload("test", tuple(plans), concurrency=concurrency)
