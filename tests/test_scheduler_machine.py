"""The scheduler against random histories.

A model beside it knows, from events and actions alone, who holds what on which engine.  A twin hears the same
events at the same times and has to say the same.
"""

from collections import deque
from dataclasses import replace
from math import inf

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler_model import (
    ENDS,
    ENGINES,
    GROUPS,
    LEASE_S,
    PATIENCE_S,
    REQUIRED,
    STEP_S,
    TERMS,
    TOOLS,
    TURN,
    Agent,
    Engine,
    shared_of,
)
from sostenuto.scheduler.actions import (
    Action,
    CommitUpdate,
    Decode,
    Evict,
    Expire,
    Interrupt,
    MoveSandbox,
    Offload,
    Opened,
    Prepare,
    PublicationFailed,
    Quarantine,
    Refuse,
    StageUpdate,
    Unserved,
)
from sostenuto.scheduler.events import (
    Answered,
    EngineJoined,
    EngineLoaded,
    EngineLost,
    Event,
    Finished,
    Heard,
    Interrupted,
    Prepared,
    PublicationBegun,
    SandboxClaim,
    SandboxMoved,
    Submitted,
    Tick,
    ToolReturned,
    ToolServerJoined,
    TurnCost,
    TurnEnded,
    UpdateCommitted,
    UpdateFailed,
    UpdateStaged,
)
from sostenuto.scheduler.kv import Footprint
from sostenuto.scheduler.lifecycle import Phase
from sostenuto.scheduler.program import Reason
from sostenuto.scheduler.requirements import ANY, Requirement
from sostenuto.scheduler.scheduler import Scheduler
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.scheduler.update_terms import UpdateTerms
from sostenuto.types import EngineId, GroupId, ProgramId, SandboxRung, Version


class Shell(RuleBasedStateMachine):
    """Obeys every action, in any order of everything else, on a clock that never goes back."""

    def __init__(self) -> None:
        super().__init__()
        limits = SchedulerSettings(live_programs=8, patience_s=PATIENCE_S)
        self.scheduler, self.twin = Scheduler(limits), Scheduler(limits)
        self.now_s = 0.0
        self.count = 0
        self.agents: dict[ProgramId, Agent] = {}
        self.engines: dict[EngineId, Engine] = {}
        self.version = Version(0, 0)
        self.staging: set[EngineId] = set()
        self.committing: set[EngineId] = set()
        self.served: dict[EngineId, Version] = {}
        """What is verified on engines that are not quarantined."""
        self.events: deque[Event] = deque()
        self.sandboxes: int | None = None
        """How many the tool server has memory for."""

    # ---- the shell ----

    def feed(self, event: Event, after_s: float = 0.0) -> None:
        self.now_s += after_s
        self.events.append(event)
        while self.events:
            event = self.events.popleft()
            actions = self.scheduler.apply(event, self.now_s)
            assert actions == self.twin.apply(event, self.now_s)
            for action in actions:
                self.obey(action)

    def obey(self, action: Action) -> None:  # noqa: C901, PLR0912, PLR0915 - one case for each action
        match action:
            case Prepare(program_id):
                self.agents[program_id].rung = SandboxRung.RUNNING
                self.enter(program_id, Phase.PREPARING)
            case Decode():
                self.decode(action)
            case Evict(program_id, engine_id):
                self.evict(program_id, engine_id)
            case Offload(program_id, engine_id):
                assert self.engines[engine_id].host_tokens
                self.evict(program_id, engine_id)
                self.agents[program_id].host = engine_id
            case Refuse(program_id):
                wanted = self.agents[program_id].wanted
                assert not any(engine.could_hold(wanted) for engine in self.engines.values())
                self.over(program_id)
            case Expire(program_id):
                assert self.agents[program_id].phase is not Phase.QUEUED
                self.over(program_id)
            case MoveSandbox(program_id, rung):
                self.agents[program_id].rung = rung
                self.events.append(SandboxMoved(program_id, rung, 0.1))
            case StageUpdate(engine_id):
                self.staging.add(engine_id)
            case CommitUpdate(engine_id, version):
                assert version == self.version
                self.committing.add(engine_id)
            case Interrupt(engine_id):
                for program_id, agent in list(self.agents.items()):
                    if agent.engine == engine_id and agent.phase is Phase.REASONING:
                        self.interrupt(program_id)
            case Quarantine(engine_id):
                self.served.pop(engine_id, None)
            case Unserved(program_id, wanted, deployed):
                assert not wanted.allows(deployed)
                assert not any(wanted.allows(version) for version in self.lasting())
                self.over(program_id)
            case Opened(version):
                assert version == self.version
                assert version in self.served.values()
            case PublicationFailed():
                assert not self.staging
            case _:
                raise AssertionError(action)

    def decode(self, action: Decode) -> None:
        agent = self.agents[action.program_id]
        assert agent.runnable
        served = self.served[action.engine_id]
        assert action.engine_id not in self.committing
        assert action.requires.allows(served)
        pinned = action.requires == Requirement.exactly(served)
        assert served == self.scheduler.gate.deployed or (pinned and served < self.version)
        assert action.turn == agent.turn + 1
        agent.turn = action.turn
        assert agent.rung is SandboxRung.RUNNING
        agent.engine, agent.holds, agent.host = action.engine_id, agent.wanted, None
        self.enter(action.program_id, Phase.REASONING)

    def lasting(self) -> list[Version]:
        """What engines serve that are not about to change."""
        return [version for id_, version in self.served.items() if id_ not in self.committing]

    def interrupt(self, program_id: ProgramId) -> None:
        agent = self.agents[program_id]
        agent.engine = None
        self.enter(program_id, Phase.WAITING)
        self.events.append(Interrupted(program_id, agent.turn, 1))

    def evict(self, program_id: ProgramId, engine_id: EngineId) -> None:
        agent = self.agents[program_id]
        if agent.host == engine_id:
            agent.host = None
            return
        assert agent.engine == engine_id
        assert agent.phase in {Phase.ACTING, Phase.READY}
        self.loses_kv(program_id)

    def loses_kv(self, program_id: ProgramId) -> None:
        agent = self.agents[program_id]
        agent.engine = None
        if agent.phase is Phase.ACTING:
            self.enter(program_id, Phase.PARKED)
        else:
            since_s = agent.since_s if agent.phase is Phase.READY else self.now_s
            self.enter(program_id, Phase.WAITING, since_s)

    def over(self, program_id: ProgramId) -> None:
        del self.agents[program_id]
        self.events.append(Finished(program_id))

    def enter(self, program_id: ProgramId, phase: Phase, since_s: float | None = None) -> None:
        agent = self.agents[program_id]
        agent.phase, agent.since_s = phase, self.now_s if since_s is None else since_s

    def one_of(self, data: st.DataObject, *phases: Phase) -> ProgramId | None:
        able = sorted(id_ for id_, agent in self.agents.items() if agent.phase in phases)
        return data.draw(st.sampled_from(able)) if able else None

    def holders(self, engine_id: EngineId) -> list[Agent]:
        return [agent for agent in self.agents.values() if agent.engine == engine_id]

    def joined(self, engine_id: EngineId) -> EngineJoined:
        self.served[engine_id] = self.scheduler.gate.deployed or self.version
        return self.engines[engine_id].joined(engine_id, self.scheduler.gate.deployed or self.version)

    # ---- what happens to programs ----

    @initialize(engines=st.lists(ENGINES, min_size=1, max_size=3), sandboxes=st.none() | st.integers(1, 4))
    def opens(self, engines: list[Engine], sandboxes: int | None) -> None:
        self.sandboxes = sandboxes
        self.feed(ToolServerJoined(memory_bytes=sandboxes))
        for number, engine in enumerate(engines):
            self.engines[EngineId(f"e{number}")] = engine
            self.feed(self.joined(EngineId(f"e{number}")))

    @rule(
        group=st.sampled_from([None, *GROUPS]),
        until=st.none() | st.integers(0, 3),
        after_s=STEP_S,
        requires=st.sampled_from([ANY, ANY, ANY, *REQUIRED]),
    )
    def submit(
        self, group: GroupId | None, until: int | None, after_s: float, requires: Requirement = ANY
    ) -> None:
        self.count += 1
        program_id = ProgramId(f"p{self.count:03}")
        self.agents[program_id] = Agent(footprint=Footprint(0, shared_of(group)), requires=requires)
        trainable = None if until is None else Version(0, until)
        urgent = group is None and self.count % 3 == 0
        claim = SandboxClaim(memory_bytes=1)
        submitted = Submitted(program_id, LEASE_S, group, 3, trainable, claim, is_urgent=urgent)
        self.feed(replace(submitted, requires=requires), after_s)

    @rule(data=st.data(), tokens=st.integers(1, 110), after_s=STEP_S)
    def prepared(self, data: st.DataObject, tokens: int, after_s: float) -> None:
        if (program_id := self.one_of(data, Phase.PREPARING)) is not None:
            self.now_s += after_s
            self.prepare(program_id, tokens)

    def prepare(self, program_id: ProgramId, tokens: int) -> None:
        agent = self.agents[program_id]
        agent.footprint = Footprint(tokens, agent.footprint.shared)
        agent.wanted = Footprint(tokens + TURN, agent.footprint.shared)
        self.enter(program_id, Phase.WAITING)
        self.feed(Prepared(program_id, agent.footprint, TURN))

    @rule(sizes=st.lists(st.integers(1, 110), min_size=2, max_size=6), group=st.sampled_from([None, *GROUPS]))
    def several_come_at_once(self, sizes: list[int], group: GroupId | None) -> None:
        for tokens in sizes:
            self.submit(group, None, 0.0)
            preparing = [id_ for id_, agent in self.agents.items() if agent.phase is Phase.PREPARING]
            if preparing:
                self.prepare(preparing[0], tokens)

    @rule(data=st.data(), tokens=st.integers(1, TURN), tool=st.sampled_from(TOOLS), after_s=STEP_S)
    def turn_ends(self, data: st.DataObject, tokens: int, tool: str, after_s: float) -> None:
        if (program_id := self.one_of(data, Phase.REASONING)) is not None:
            self.now_s += after_s
            self.end_turn(program_id, tokens, tool)

    def end_turn(self, program_id: ProgramId, tokens: int, tool: str) -> None:
        agent = self.agents[program_id]
        agent.footprint = Footprint(agent.footprint.private_tokens + tokens, agent.footprint.shared)
        agent.holds = agent.footprint
        cost = TurnCost(100, 0.5, tokens, self.now_s - agent.since_s)
        self.enter(program_id, Phase.ACTING)
        self.feed(TurnEnded(program_id, agent.turn, agent.footprint, (tool,), cost))

    @rule(data=st.data(), tokens=st.integers(0, 30), after_s=STEP_S)
    def tool_returns(self, data: st.DataObject, tokens: int, after_s: float) -> None:
        if (program_id := self.one_of(data, Phase.ACTING, Phase.PARKED)) is not None:
            agent = self.agents[program_id]
            self.now_s += after_s
            private, shared = agent.footprint.private_tokens + tokens, agent.footprint.shared
            agent.footprint, agent.wanted = Footprint(private, shared), Footprint(private + TURN, shared)
            self.enter(program_id, Phase.READY if agent.phase is Phase.ACTING else Phase.WAITING)
            self.feed(ToolReturned(program_id, agent.turn, agent.footprint, TURN))

    @rule(data=st.data())
    def answers(self, data: st.DataObject) -> None:
        if (program_id := self.one_of(data, *ENDS)) is not None:
            self.enter(program_id, Phase.SCORING)
            self.agents[program_id].engine = None
            self.feed(Answered(program_id))

    @rule(data=st.data())
    def is_cancelled_or_finished(self, data: st.DataObject) -> None:
        if (program_id := self.one_of(data, *Phase)) is not None:
            self.over(program_id)
            self.feed(self.events.pop())

    @rule(data=st.data())
    def is_heard_of(self, data: st.DataObject) -> None:
        if (program_id := self.one_of(data, *Phase)) is not None:
            self.feed(Heard(program_id))

    @rule(data=st.data(), footprint=st.just(Footprint(7)))
    def late_events_change_nothing(self, data: st.DataObject, footprint: Footprint) -> None:
        before = self.scheduler.snapshot()
        late: list[Event] = [Prepared(ProgramId("gone"), footprint, TURN), Finished(ProgramId("gone"))]
        program_id = self.one_of(data, *Phase)
        if program_id is not None:
            turn = self.agents[program_id].turn - 1
            late += [
                TurnEnded(program_id, turn, footprint),
                ToolReturned(program_id, turn, footprint, TURN),
                Submitted(program_id, 1.0),
            ]
        for event in late:
            self.feed(event)
        after = self.scheduler.snapshot()
        assert (after.phases, after.engines, after.waiting) == (before.phases, before.engines, before.waiting)
        assert after.late_events == before.late_events + len(late)

    # ---- what happens to engines ----

    @rule(data=st.data(), preemptions=st.integers(0, 3), hit_rate=st.none() | st.floats(0, 1))
    def engine_reports(self, data: st.DataObject, preemptions: int, hit_rate: float | None) -> None:
        if self.engines:
            engine_id = data.draw(st.sampled_from(sorted(self.engines)))
            self.feed(EngineLoaded(engine_id, 0, None, hit_rate, preemptions))

    @rule(data=st.data())
    def engine_dies(self, data: st.DataObject) -> None:
        if self.engines:
            engine_id = data.draw(st.sampled_from(sorted(self.engines)))
            del self.engines[engine_id]
            self.staging.discard(engine_id)
            self.committing.discard(engine_id)
            self.served.pop(engine_id, None)
            for program_id, agent in self.agents.items():
                agent.host = None if agent.host == engine_id else agent.host
                if agent.engine == engine_id:
                    self.loses_kv(program_id)
            self.feed(EngineLost(engine_id))

    @rule(number=st.integers(0, 2), engine=ENGINES)
    def engine_comes(self, number: int, engine: Engine) -> None:
        engine_id = EngineId(f"e{number}")
        if engine_id not in self.engines:
            self.engines[engine_id] = engine
            self.feed(self.joined(engine_id))

    @precondition(lambda self: self.scheduler.gate.publishing is None and self.engines)
    @rule(terms=TERMS)
    def publish(self, terms: UpdateTerms) -> None:
        # A late engine that swaps takes in the next version as soon as it has this one.
        if not self.committing:
            self.version = self.version.next()
            self.feed(PublicationBegun(self.version, terms))

    @precondition(lambda self: self.staging)
    @rule(fails=st.booleans())
    def is_staged(self, fails: bool) -> None:
        engine_id = min(self.staging)
        self.staging.discard(engine_id)
        if fails:
            self.feed(UpdateFailed(engine_id, self.version, "torn"))
        else:
            self.feed(UpdateStaged(engine_id, self.version))

    @precondition(lambda self: self.committing)
    @rule(drops=st.booleans())
    def is_committed(self, drops: bool) -> None:
        engine_id = min(self.committing)
        self.committing.discard(engine_id)
        assert self.served.get(engine_id, self.version) <= self.version
        self.served[engine_id] = self.version
        for program_id, agent in self.agents.items():
            if drops and agent.host == engine_id:
                agent.host = None
            if drops and agent.engine == engine_id and agent.phase is not Phase.REASONING:
                self.loses_kv(program_id)
        self.feed(UpdateCommitted(engine_id, self.version, drops))

    # ---- time ----

    @rule(seconds=st.floats(0, 3 * PATIENCE_S))
    def time_passes(self, seconds: float) -> None:
        self.feed(Tick(), seconds)

    @rule()
    def a_sweep_leaves_no_idle_engine_with_a_program_that_fits(self) -> None:
        self.feed(Tick(), 1.0)
        self.feed(Tick(), 1.0)
        for engine_id, engine in self.engines.items():
            if self.scheduler.gate.may_start(engine_id) and all(
                a.phase is not Phase.REASONING for a in self.holders(engine_id)
            ):
                waits = self.scheduler.snapshot().waits_for
                able = [id_ for id_, agent in self.agents.items() if self.could_go(agent, engine_id, engine)]
                assert all(waits[id_] is Reason.VERSION for id_ in able)
                assert all(self.agents[id_].requires is not ANY for id_ in able)

    def could_go(self, agent: Agent, engine_id: EngineId, engine: Engine) -> bool:
        if agent.rung is not SandboxRung.RUNNING:
            return False
        at_home = agent.phase is Phase.READY and agent.engine == engine_id
        return (at_home or agent.phase is Phase.WAITING) and engine.could_hold(agent.wanted)

    # ---- what always holds ----

    @invariant()
    def what_is_reserved_is_what_its_owners_hold(self) -> None:
        snapshot = self.scheduler.snapshot()
        for engine_id, engine in self.engines.items():
            tokens, decoding = snapshot.engines[engine_id]
            holders = self.holders(engine_id)
            whole = engine.counted(agent.holds for agent in holders)
            assert tokens == whole if engine.holds_whole else tokens <= whole
            assert tokens <= (inf if engine.kv_tokens is None else engine.kv_tokens)
            assert decoding == sum(agent.phase is Phase.REASONING for agent in holders)
            assert decoding <= engine.slots

    @invariant()
    def sandboxes_in_memory_are_no_more_than_fit(self) -> None:
        rungs = [agent.rung for agent in self.agents.values()]
        in_memory = rungs.count(SandboxRung.RUNNING) + rungs.count(SandboxRung.PAUSED)
        assert in_memory <= (inf if self.sandboxes is None else self.sandboxes)

    @invariant()
    def phases_are_as_the_shell_sees_them(self) -> None:
        snapshot = self.scheduler.snapshot()
        assert snapshot.phases == {id_: agent.phase for id_, agent in self.agents.items()}
        waits = self.scheduler.snapshot().waits_for
        runnable = [id_ for id_, agent in self.agents.items() if agent.runnable]
        in_line = {program.id for program in self.scheduler.patience.everybody()}
        assert in_line <= set(runnable)
        assert all(waits[id_] is Reason.VERSION for id_ in runnable if id_ not in in_line)

    @invariant()
    def whoever_waits_has_a_reason(self) -> None:
        waits = self.scheduler.snapshot().waits_for
        assert all(id_ in waits for id_, agent in self.agents.items() if agent.runnable)

    def teardown(self) -> None:
        """When all programs have ended, however, everything is back."""
        while self.agents:
            self.over(next(iter(self.agents)))
            self.feed(self.events.pop())
        snapshot = self.scheduler.snapshot()
        assert snapshot.phases == snapshot.waits_for == {}
        assert all(engine == (0, 0) for engine in snapshot.engines.values())
        assert (snapshot.waiting, len(self.scheduler.patience)) == (0, 0)


TestShell = Shell.TestCase
TestShell.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
