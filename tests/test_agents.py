"""Agents from elsewhere, run in hosts with the gateway as their model."""

import json
import os
import signal
from pathlib import Path
from types import MappingProxyType

import anyio
import pytest

import sostenuto as so
from agents import hosting, status_with, until_there
from fakes_agents import Riddle, blocks, chat, ends_badly, in_a_thread, two_turns, user, with_sandbox
from fakes_openai import with_openai
from hosts import until
from scripted import Stage, calls, says, specs_of, write_tokenizer_folder
from sostenuto.errors import Blame
from sostenuto.records import Trajectory, validate
from sostenuto.runtime.config import GatewaySettings
from sostenuto.runtime.engines.wire import Sampling
from sostenuto.runtime.gateway.opening import OpenGateway
from sostenuto.runtime.gateway.terms import Terms
from sostenuto.runtime.gateway.turn import Ask
from sostenuto.types import Limits, Purpose, StopReason

SAYS_42 = MappingProxyType({"question": "What is six times seven?", "answer": "42"})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer_folder(tmp_path_factory.mktemp("model"))


def riddle(how: str = "", notes: Path | None = None) -> Riddle:
    return Riddle(**SAYS_42, how=how, notes=str(notes or ""))


def failure(trajectory: Trajectory) -> tuple[Blame | None, str]:
    assert trajectory.outcome is not None
    assert trajectory.reward is None
    return trajectory.outcome.blame, str(trajectory.outcome)


async def until_at_rest(stage: Stage, gateway: OpenGateway) -> None:
    """KV is given back a moment after its program is over."""
    await until(lambda: not stage.engine.held)
    await stage.assert_nothing_is_held()
    assert len(gateway.sessions) == 0
    assert len(gateway.keys) == 0
    assert stage.dispatcher.scheduler.snapshot().phases == {}


def test_in_training_the_seed_of_an_agent_does_not_make_all_members_of_a_group_the_same():
    ask = Ask(sampling=Sampling(seed=42), seeded=True)
    assert not Terms(Purpose.TRAIN).is_seed_of(ask)
    assert Terms(Purpose.EVALUATE).is_seed_of(ask)


async def test_agents_are_scored_and_recorded_token_by_token(tmp_path: Path, model: Path):
    tasks = {f"p{index}": riddle(notes=tmp_path) for index in range(3)}
    async with hosting(tmp_path / "run", model, lambda _: [says("41"), says("42")]) as (stage, gateway):
        done = await stage.play(specs_of(two_turns, tasks))
        for name, trajectory in done.items():
            validate(trajectory)
            assert trajectory.reward == 1.0
            assert trajectory.outcome is None
            assert (trajectory.program_id, trajectory.group_id) == (name, name)
            assert trajectory.task_id
            assert trajectory.metrics["turns"] == 2
            assert trajectory.metrics["length"] == 2
            assert trajectory.stop_reason is StopReason.ANSWERED
            (sequence,) = trajectory.sequences
            assert [i for span in sequence for i in span.token_ids] == stage.engine.contexts[name]
            assert trajectory.usage.environment_s > 0
        access = json.loads((tmp_path / "key").read_text())
        assert await status_with(**access) == 401
        assert await status_with(access["base_url"], "") == 401
        assert stage.ledger.statistics().sealed == 3
        await until_at_rest(stage, gateway)


async def test_agents_of_every_form_run(tmp_path: Path, model: Path):
    """A plain function in a thread, one with a sandbox, one that travels by value; and an evaluation."""

    @so.agent
    async def local(task: Riddle, *, base_url: str, api_key: str) -> float:
        return float((await chat(base_url, api_key, [user(task.question)]))["content"] == task.answer)

    script = {"thread": "42", "sandbox": "expr 6 '*' 7", "value": "42", "evaluated": "41"}
    async with hosting(tmp_path / "run", model, lambda name: [says(script[name])]) as (stage, gateway):
        done = await stage.play(
            [
                *specs_of(in_a_thread, {"thread": riddle()}),
                *specs_of(with_sandbox, {"sandbox": riddle()}),
                *specs_of(local, {"value": riddle()}),
                *specs_of(in_a_thread, {"evaluated": riddle()}, purpose=Purpose.EVALUATE),
            ]
        )
        rewards = {name: trajectory.reward for name, trajectory in done.items()}
        assert rewards == {"thread": 1.0, "sandbox": 1.0, "value": 1.0, "evaluated": 0.0}
        assert stage.ledger.statistics().outcomes == {"evaluated": 1}
        await until_at_rest(stage, gateway)


async def test_agents_on_an_sdk_run_unchanged_under_kv_pressure_and_no_token_differs(
    tmp_path: Path, model: Path
):
    looks = calls(("look", '{"place": "attic"}'))
    script, small = [looks, looks, looks, says("42")], {"kv_tokens": 300}
    limits = Limits(turn_tokens=60, wall_s=120)
    async with hosting(tmp_path / "run", model, lambda _: script, engine=small) as (stage, gateway):
        specs = specs_of(with_openai, {f"p{index}": riddle() for index in range(8)}, limits=limits)
        done = await stage.play(specs)
        for name, trajectory in done.items():
            assert trajectory.reward == 1.0
            assert trajectory.metrics["turns"] == 4
            (sequence,) = trajectory.sequences
            assert [i for span in sequence for i in span.token_ids] == stage.engine.contexts[name]
        assert sum(map(len, stage.engine.contexts.values())) > 2 * small["kv_tokens"]
        await until_at_rest(stage, gateway)


async def test_what_goes_wrong_has_an_outcome_that_says_whose_fault_it_is(tmp_path: Path, model: Path):
    hows = ("raises", "silent", "not a number", "never stops", "fine")
    limits = Limits(turns=3, turn_tokens=50, wall_s=60)
    async with hosting(tmp_path / "run", model, lambda _: [says("hm")]) as (stage, gateway):
        done = await stage.play(specs_of(ends_badly, {how: riddle(how) for how in hows}, limits=limits))
        blame, text = failure(done["raises"])
        assert blame is Blame.ENVIRONMENT
        assert "program raises: run of ends_badly: ValueError: no such riddle (" in text
        assert "fakes_agents.py:" in text
        assert done["raises"].sequences != ()
        blame, text = failure(done["silent"])
        assert blame is Blame.ENVIRONMENT
        assert "ended without a call of its model" in text
        blame, text = failure(done["not a number"])
        assert blame is Blame.ENVIRONMENT
        assert "a reward must be finite" in text
        blame, text = failure(done["never stops"])
        assert blame is Blame.POLICY
        assert "turn_limit" in text
        assert done["never stops"].metrics["turns"] == 3
        assert done["fine"].reward == 0.5
        stage.engine.broken = "it is on fire"
        hows = ("swallows", "raises again")
        done = await stage.play(specs_of(ends_badly, {how: riddle(how) for how in hows}))
        for how in hows:
            # Not even where the agent itself returns zero for it.
            blame, text = failure(done[how])
            assert blame is Blame.INFRASTRUCTURE
            assert "it is on fire" in text
        await until_at_rest(stage, gateway)


async def test_beyond_its_deadline_an_agent_is_cancelled_and_a_blocking_one_ends_with_its_key(
    tmp_path: Path, model: Path
):
    limits = Limits(turn_tokens=50, turns=10_000, wall_s=1)
    again = {"may_rewrite": True}
    async with hosting(tmp_path / "run", model, lambda _: [says("hm")], engine=again) as (stage, gateway):
        specs = [
            *specs_of(ends_badly, {"sleeps": riddle("sleeps", tmp_path)}, limits=limits),
            *specs_of(blocks, {"blocks": riddle(notes=tmp_path)}, limits=limits),
        ]
        done = await stage.play(specs)
        for trajectory in done.values():
            blame, text = failure(trajectory)
            assert blame is Blame.ENVIRONMENT
            assert "took longer than 1 s; raise limits.wall_s" in text
        for name in ("cancelled", "ended"):
            await until_there(tmp_path / name)
        # Both were in one worker, which goes on.
        os.kill(int((tmp_path / "sleeping").read_text()), 0)
        await until_at_rest(stage, gateway)


async def test_a_worker_that_is_killed_fails_its_agents_and_the_next_one_runs(tmp_path: Path, model: Path):
    """And while the gateway has room for one program alone, a second one fails, not its job."""
    settings = GatewaySettings(programs=1)
    async with hosting(tmp_path / "run", model, lambda _: [says("42")], gateway=settings) as (stage, gateway):
        done: dict[str, Trajectory] = {}

        async def play() -> None:
            done.update(await stage.play(specs_of(ends_badly, {"p": riddle("sleeps", tmp_path)})))

        async with anyio.create_task_group() as group:
            group.start_soon(play)
            await until_there(tmp_path / "sleeping")
            blame, text = failure((await stage.play(specs_of(ends_badly, {"q": riddle()})))["q"])
            assert blame is Blame.INFRASTRUCTURE
            assert "raise gateway.programs" in text
            os.kill(int((tmp_path / "sleeping").read_text()), signal.SIGKILL)
        blame, text = failure(done["p"])
        assert blame is Blame.INFRASTRUCTURE
        assert "the worker ended" in text
        assert done["p"].sequences != ()
        after = await stage.play(specs_of(ends_badly, {"r": riddle()}))
        assert after["r"].reward == 0.5
        await until_at_rest(stage, gateway)


async def test_cancelled_at_any_step_it_leaves_nothing(tmp_path: Path, model: Path):
    async with hosting(tmp_path / "run", model, lambda _: [says("42")], engine={"decode_s": 0.02}) as (
        stage,
        gateway,
    ):
        await stage.play(specs_of(ends_badly, {"warm": riddle()}))
        for number in range(16):
            specs = specs_of(ends_badly, {f"p{number}": riddle("sleeps", tmp_path)})
            async with anyio.create_task_group() as group:
                group.start_soon(stage.play, specs)
                await anyio.sleep(0.004 * number)
                group.cancel_scope.cancel()
            await until_at_rest(stage, gateway)
        (tmp_path / "sleeping").unlink(missing_ok=True)
        async with anyio.create_task_group() as group:
            group.start_soon(stage.play, specs_of(ends_badly, {"last": riddle("sleeps", tmp_path)}))
            await until_there(tmp_path / "sleeping")
            group.cancel_scope.cancel()
        await until_at_rest(stage, gateway)
        outcomes = stage.ledger.statistics().outcomes
        assert outcomes["cancelled(user)"] == 17
