"""Engines that become slow are seen, spared, probed and used again, on virtual time."""

from collections.abc import Iterator

import anyio
import pytest

from fakes import FakeEngine, FakeRenderer, FakeTools, spec
from sostenuto.runtime.dispatcher import Dispatcher, open_dispatcher
from sostenuto.runtime.engines.wire import GenerateReply, GenerateRequest, Spans
from sostenuto.scheduler.actions import Action, Probe, Recovered, Slowed
from sostenuto.scheduler.events import Event, TurnCost
from sostenuto.scheduler.scheduler import Scheduler
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.scheduler.slowness import Slowness
from sostenuto.types import EngineId, Limits

E0, E1, E2 = (EngineId(f"e{number}") for number in range(3))
ENGINES = (E0, E1, E2)


def cost(token_s: float, *, tokens: int = 20, prefill_token_s: float = 0.001) -> TurnCost:
    return TurnCost(100, 100 * prefill_token_s, tokens, tokens * token_s)


def feed(
    slowness: Slowness, token_s: dict[EngineId, float], seconds: int, *, from_s: int = 0, together: float = 4
) -> Iterator[tuple[float, EngineId, str]]:
    """One turn of each engine a second; what was found slow, and when."""
    for now_s in range(from_s, from_s + seconds):
        for engine_id, took_s in token_s.items():
            if reason := slowness.turned(engine_id, cost(took_s), together, float(now_s)):
                yield now_s, engine_id, reason


def joined(peers: str = "embedded") -> Slowness:
    slowness = Slowness()
    for engine_id in ENGINES:
        slowness.joined(engine_id, peers)
    return slowness


def test_an_engine_much_slower_than_its_peers_is_found_once_that_has_lasted():
    found = list(feed(joined(), {E0: 0.05, E1: 0.06, E2: 0.3}, 30))
    first_s, engine_id, reason = found[0]
    assert {engine for _, engine, _ in found} == {E2} == {engine_id}
    assert 10 <= first_s <= 16
    assert reason == ("slow: 300 ms for a sampled token, 5.5 times what its peers need under such load")


def test_twice_as_slow_is_not_slow_and_one_odd_turn_is_nothing():
    assert list(feed(joined(), {E0: 0.05, E1: 0.06, E2: 0.12}, 200)) == []
    slowness = joined()
    for now_s in range(100):
        took_s = 9.0 if now_s % 5 == 0 else 0.05
        assert slowness.turned(E2, cost(took_s), 4, float(now_s)) == ""
        for engine_id in (E0, E1):
            assert slowness.turned(engine_id, cost(0.05), 4, float(now_s)) == ""


def test_what_load_explains_is_not_slow():
    slowness = joined()
    for now_s in range(60):
        for engine_id, took_s, together in ((E0, 0.05, 2), (E1, 0.05, 2), (E2, 0.4, 16)):
            assert slowness.turned(engine_id, cost(took_s), together, float(now_s)) == ""


def test_prefilling_slowly_is_slow_too():
    slowness, found = joined(), list[str]()
    for now_s in range(60):
        for engine_id, each_s in ((E0, 0.001), (E1, 0.001), (E2, 0.01)):
            found.append(slowness.turned(engine_id, cost(0.05, prefill_token_s=each_s), 4, float(now_s)))
    assert {reason for reason in found if reason} == {
        "slow: 10 ms for a prefilled token, 10.0 times what its peers need under such load"
    }


def test_engines_of_another_kind_are_no_measure_and_neither_are_old_turns():
    slowness = joined()
    slowness.joined(E2, "another kind")
    assert list(feed(slowness, {E0: 0.05, E1: 0.05, E2: 1.0}, 60)) == []
    unknown = joined("")
    assert list(feed(unknown, {E0: 0.05, E1: 0.05, E2: 1.0}, 60)) == []
    old = joined()
    list(feed(old, {E0: 0.05, E1: 0.05}, 30))
    assert list(feed(old, {E2: 1.0}, 60, from_s=1000)) == []


def test_it_is_probed_and_recovers_after_some_good_probes_in_a_row_and_later_each_time():
    slowness = joined()
    list(feed(slowness, {E0: 0.05, E1: 0.05, E2: 0.5}, 30))
    pauses: list[float] = []
    now_s = 30.0
    for _ in range(3):
        slowness.take_out(E2, now_s)
        due_s = slowness.probe_at_s()
        assert due_s is not None
        pauses.append(due_s - now_s)
        for took_s, recovers in ((0.05, False), (0.5, False), (0.05, False), (0.05, False), (0.05, True)):
            assert slowness.take_due(due_s) == [E2]
            assert slowness.take_due(due_s) == []
            assert slowness.probed(E2, cost(took_s), due_s) is recovers
            now_s, due_s = due_s, slowness.probe_at_s() or due_s
        slowness.take_in(E2)
        assert slowness.probe_at_s() is None
    assert pauses == [5.0, 10.0, 20.0]
    assert not slowness.probed(E2, cost(0.05), now_s)


class Told(Scheduler):
    """Keeps what it says of engines."""

    def __init__(self) -> None:
        super().__init__(SchedulerSettings())
        self.told: list[tuple[float, Action]] = []

    def apply(self, event: Event, now_s: float) -> list[Action]:
        actions = super().apply(event, now_s)
        self.told += [(now_s, a) for a in actions if isinstance(a, Slowed | Recovered | Probe)]
        return actions


class Machine(FakeEngine):
    """Takes `decode_s` for a turn, and for a probe, whatever is asked."""

    async def generate(self, request: GenerateRequest, *, spans: Spans | None = None) -> GenerateReply:
        reply = await super().generate(request, spans=spans)
        if request.program_id.startswith("probe/"):
            self.held.pop(request.program_id)
        return reply


def machines(number: int, **changes: object) -> dict[EngineId, Machine]:
    made = {EngineId(f"e{i}"): Machine(("!look a",)) for i in range(number)}
    for machine in made.values():
        vars(machine).update(changes)
    return made


async def keep_busy(dispatcher: Dispatcher, programs: int) -> None:
    """Programs that never end by themselves."""
    limits = Limits(turns=10_000, turn_tokens=20, wall_s=100_000)
    async with anyio.create_task_group() as group:
        for number in range(programs):
            group.start_soon(dispatcher.run, spec(f"p{number}", limits=limits))


def asked(machine: Machine) -> int:
    return len([name for _, name in machine.log if not name.startswith("probe/")])


@pytest.mark.looptime
async def test_a_slow_engine_gets_no_turns_until_it_is_as_fast_as_the_others_again():
    engines, policy = machines(3, kv_tokens=30_000), Told()
    async with (
        open_dispatcher(
            SchedulerSettings(), engines, FakeTools(call_s=2.0), FakeRenderer(), policy=policy
        ) as dispatcher,
        anyio.create_task_group() as group,
    ):
        group.start_soon(keep_busy, dispatcher, 12)
        await anyio.sleep(60)
        assert policy.told == []
        engines[E2].decode_s = 8.0
        await anyio.sleep(240)
        slowed = [action for _, action in policy.told if isinstance(action, Slowed)]
        assert [action.engine_id for action in slowed] == [E2]
        assert "times what its peers need under such load" in slowed[0].reason
        assert policy.gate.why_not(E2) == slowed[0].reason
        before = asked(engines[E2])
        await anyio.sleep(60)
        assert asked(engines[E2]) == before
        assert not [a for _, a in policy.told if isinstance(a, Recovered)]
        engines[E2].decode_s = 1.0
        await anyio.sleep(60)
        assert [a for _, a in policy.told if isinstance(a, Recovered)] == [Recovered(E2)]
        assert policy.gate.why_not(E2) == ""
        engines[E0].dies()
        await anyio.sleep(20)
        assert asked(engines[E2]) > before
        group.cancel_scope.cancel()


@pytest.mark.looptime
@pytest.mark.parametrize("number", [1, 2])
async def test_the_engine_that_nobody_can_stand_in_for_is_used_however_slow_it_is(number: int):
    engines, policy = machines(number, kv_tokens=30_000), Told()
    slow = engines[EngineId(f"e{number - 1}")]
    slow.kv_tokens = 60_000
    async with (
        open_dispatcher(
            SchedulerSettings(), engines, FakeTools(call_s=2.0), FakeRenderer(), policy=policy
        ) as dispatcher,
        anyio.create_task_group() as group,
    ):
        group.start_soon(keep_busy, dispatcher, 8)
        await anyio.sleep(60)
        slow.decode_s = 8.0
        await anyio.sleep(300)
        assert policy.told == []
        group.cancel_scope.cancel()


@pytest.mark.looptime
async def test_a_slow_engine_is_used_again_at_once_when_the_others_are_lost():
    engines, policy = machines(2, kv_tokens=30_000), Told()
    async with (
        open_dispatcher(
            SchedulerSettings(), engines, FakeTools(call_s=2.0), FakeRenderer(), policy=policy
        ) as dispatcher,
        anyio.create_task_group() as group,
    ):
        group.start_soon(keep_busy, dispatcher, 8)
        engines[E1].decode_s = 8.0
        await anyio.sleep(300)
        assert policy.gate.why_not(E1)
        engines[E0].dies()
        await anyio.sleep(10)
        assert policy.gate.why_not(E1) == ""
        before = asked(engines[E1])
        await anyio.sleep(60)
        assert asked(engines[E1]) > before
        group.cancel_scope.cancel()
