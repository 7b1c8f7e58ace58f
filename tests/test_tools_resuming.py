"""Programs whose tool server is killed: what goes on from its snapshot, and what says why it cannot."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from resuming import (
    COUNTING,
    EPISODE,
    FAILING,
    NOTES,
    SAVING,
    TASK,
    P,
    add,
    assert_nothing_left,
    kill,
    laid_down,
    rows,
    said,
    serving,
    sound_rests,
    us,
)
from sandboxes import entries, sandbox_root
from sostenuto.errors import EnvironmentFailure, ToolServerError
from sostenuto.tools.refused import Interrupted
from sostenuto.tools.wire import EnvironmentRef
from sostenuto.types import CallId, ProgramId, SandboxRung, ToolCall

COUNT = ToolCall("next", "{}")
WAIT = ToolCall("wait", '{"seconds": 0}')


@asynccontextmanager
async def folder() -> AsyncGenerator[Path]:
    """Of a server; nothing may be left in it."""
    with sandbox_root() as root:
        yield root / "one"
        await assert_nothing_left(root / "one")


async def laid_down_and_killed(
    root: Path, environment: EnvironmentRef = NOTES, *calls: tuple[str, ToolCall]
) -> None:
    """A server on the folder ran these calls, snapshotted the sandbox, and was killed."""
    with serving(root) as (process, url):
        async with us(url, 1) as client:
            await client.prepare(P, environment, TASK)
            for call_id, call in calls:
                await said(client, call_id, call)
            await laid_down(client)
        kill(process)


async def test_a_program_goes_on_after_its_server_was_killed_and_killed_again():
    async with folder() as root:
        await laid_down_and_killed(root, NOTES, ("c1", add("second")))
        for epoch in (2, 3):
            with serving(root) as (process, url):
                async with us(url, epoch) as client:
                    prepared = await client.resume(P, NOTES, TASK, seen=["c1"])
                    assert {tool.name for tool in prepared.tools} == {"add", "wait"}
                    assert (await client.state()).programs[0].rung is SandboxRung.SNAPSHOTTED
                kill(process)
        with serving(root) as (process, url):
            async with us(url, 4) as client:
                await client.resume(P, NOTES, TASK, seen=["c1"])
                assert await said(client, "c1", add("second")) == "begun first second kept"
                assert await said(client, "c2", add("third")) == "begun first second third kept"
                assert (await client.reward(P, CallId("r"), EPISODE)).value == 4.0
                assert (await client.state()).counters["resumed"] == 1
                await client.release(P)


async def test_a_sandbox_that_came_back_and_was_not_used_is_still_what_its_snapshot_is():
    async with folder() as root:
        with serving(root) as (process, url):
            async with us(url, 1) as client:
                await client.prepare(P, NOTES, TASK)
                await laid_down(client)
                for _ in range(2):
                    assert (await client.move(P, SandboxRung.RUNNING)).rung is SandboxRung.RUNNING
                    await laid_down(client)
                await client.move(P, SandboxRung.RUNNING)
                assert rows(root)["snapshots"] == 1
            kill(process)
        with serving(root) as (process, url):
            async with us(url, 2) as client:
                await client.resume(P, NOTES, TASK)
                assert await said(client, "c1", add("second")) == "begun first second kept"
                await client.release(P)


@pytest.mark.parametrize(
    ("call", "why"),
    [(add("second"), "it was calling add"), (WAIT, "it was calling wait")],
)
async def test_what_a_call_may_have_changed_since_the_snapshot_does_not_go_on(call: ToolCall, why: str):
    async with folder() as root:
        with serving(root) as (process, url):
            async with us(url, 1) as client:
                await client.prepare(P, NOTES, TASK)
                await laid_down(client)
                await said(client, "c1", call)
            kill(process)
        with serving(root) as (_, url):
            async with us(url, 2) as client:
                with pytest.raises(ToolServerError, match=f"p cannot go on: {why} since its last snapshot"):
                    await client.resume(P, NOTES, TASK, seen=["c1"])
                assert rows(root)["snapshots"] == 0
                await client.release(P)


async def test_a_command_from_outside_changes_the_sandbox_too():
    async with folder() as root:
        with serving(root) as (process, url):
            async with us(url, 1) as client:
                await client.prepare(P, NOTES, TASK)
                await laid_down(client)
                await client.write(P, "log", b"")
            kill(process)
        with serving(root) as (_, url):
            async with us(url, 2) as client:
                with pytest.raises(ToolServerError, match="its sandbox was used since its last snapshot"):
                    await client.resume(P, NOTES, TASK)
                await client.release(P)


async def test_one_that_was_never_snapshotted_says_so_and_its_results_are_there():
    async with folder() as root:
        with serving(root) as (process, url):
            async with us(url, 1) as client:
                await client.prepare(P, NOTES, TASK)
                await said(client, "c1", add("second"))
                await anyio.sleep(0.5)  # what ended is written within one commit, which nobody waits for
            kill(process)
        with serving(root) as (_, url):
            async with us(url, 1) as client:
                with pytest.raises(ToolServerError, match="p cannot go on: no snapshot of it was taken"):
                    await client.resume(P, NOTES, TASK, seen=["c1"])
                assert await said(client, "c1", add("second")) == "begun first second kept"
                with pytest.raises(Interrupted, match="ended with the tool server that ran it"):
                    await said(client, "c2", add("third"))
                await client.release(P)


async def test_a_record_that_has_more_than_the_snapshot_does_not_go_on_from_it():
    async with folder() as root:
        await laid_down_and_killed(root, NOTES, ("c1", add("second")))
        with serving(root) as (_, url):
            async with us(url, 2) as client:
                with pytest.raises(ToolServerError, match="has the result of call 'c2', and its snapshot is"):
                    await client.resume(P, NOTES, TASK, seen=["c1", "c2"])
                # A reply that was lost on its way is no reason: it is asked for again.
                await client.resume(P, NOTES, TASK)
                assert await said(client, "c1", add("second")) == "begun first second kept"
                await client.release(P)


async def test_what_an_environment_keeps_outside_of_its_sandbox_comes_back_if_it_saves_that():
    async with folder() as root:
        await laid_down_and_killed(root, SAVING, ("c1", COUNT))
        with serving(root) as (_, url):
            async with us(url, 2) as client:
                await client.resume(P, SAVING, TASK, seen=["c1"])
                # `resume` has written a file, so that its snapshot is not what it was.
                assert await client.read(P, "resumed") == b"first"
                assert await said(client, "c2", COUNT) == "12"
                await client.release(P)


async def test_an_environment_that_keeps_something_and_does_not_save_it_is_not_resumed():
    async with folder() as root:
        with serving(root) as (process, url):
            async with us(url, 1) as client:
                await client.prepare(P, COUNTING, TASK)
                assert "keeps count outside of its sandbox" in (await laid_down(client)).ends_with_server
                assert await said(client, "c1", COUNT) == "11"
                await laid_down(client)
            kill(process)
        with serving(root) as (_, url):
            async with us(url, 2) as client:
                with pytest.raises(ToolServerError, match="keeps count outside of its sandbox; write `save`"):
                    await client.resume(P, COUNTING, TASK, seen=["c1"])
                await client.release(P)


async def test_a_resume_that_fails_leaves_nothing():
    async with folder() as root:
        await laid_down_and_killed(root, FAILING)
        with serving(root) as (_, url):
            async with us(url, 2) as client:
                with pytest.raises(EnvironmentFailure, match="resume of Failing: RuntimeError: no way back"):
                    await client.resume(P, FAILING, TASK)
                await assert_nothing_left(root)
                with pytest.raises(ToolServerError, match="nothing of it is left here"):
                    await client.resume(P, FAILING, TASK)


async def test_a_program_has_one_owner_and_older_epochs_and_others_never_get_it():
    async with folder() as root:
        await laid_down_and_killed(root)
        with serving(root) as (_, url):
            async with us(url, 1) as old, us(url, 2) as new, us(url, 9, "others") as others:
                with pytest.raises(ToolServerError, match="program p belongs to us/1"):
                    await others.resume(P, NOTES, TASK)
                await new.resume(P, NOTES, TASK)
                await new.resume(P, NOTES, TASK)
                assert (await new.state()).counters["resumed"] == 1
                with pytest.raises(ToolServerError, match="came back with epoch 2"):
                    await old.resume(P, NOTES, TASK)
                with pytest.raises(ToolServerError, match="program p of us/2 is ready here"):
                    await others.resume(P, NOTES, TASK)
                await new.release(P)


async def test_snapshots_whose_owner_does_not_come_back_are_removed_when_its_lease_is_over():
    async with folder() as root:
        await laid_down_and_killed(root)
        (root / "server.toml").write_text("lease_s = 0.5\n")
        with serving(root, "--config", "server.toml"):
            await assert_nothing_left(root)


async def test_a_snapshot_that_is_not_what_it_was_is_not_gone_on_from():
    async with folder() as root:
        await laid_down_and_killed(root)
        sandboxes = root / "tool-server" / "sandboxes"
        (snapshot,) = [name for name in entries(sandboxes) if name.startswith("snapshot.")]
        (sandboxes / snapshot / "content" / "log").write_text("forged")
        with serving(root) as (_, url):
            async with us(url, 2) as client:
                with pytest.raises(ToolServerError, match="its snapshot is gone, or is not what it was"):
                    await client.resume(P, NOTES, TASK)
                assert entries(sandboxes) == []
                await client.release(P)


async def test_a_program_that_is_prepared_anew_leaves_its_snapshot():
    async with folder() as root:
        await laid_down_and_killed(root)
        with serving(root) as (_, url):
            async with us(url, 2) as client:
                await client.prepare(P, NOTES, TASK)
                assert await said(client, "c1", add("second")) == "begun first second kept"
                await client.release(P)


async def test_many_go_on_together():
    names = [ProgramId(f"p{number}") for number in range(8)]
    async with folder() as root:
        with serving(root) as (process, url):
            async with us(url, 1) as client:
                for name in names:
                    await client.prepare(name, NOTES, {"word": name})
                    await laid_down(client, name)
            kill(process)
        with serving(root) as (_, url):
            async with us(url, 2) as client:

                async def go_on(name: ProgramId) -> None:
                    await client.resume(name, NOTES, {"word": name})
                    assert await said(client, "c1", add("x"), name) == f"begun {name} x kept"
                    await client.release(name)

                async with anyio.create_task_group() as group:
                    for name in names:
                        group.start_soon(go_on, name)


async def kept(root: Path, rests: int = 1) -> None:
    """Until the journal has what programs can go on from."""
    with anyio.fail_after(30):
        while sound_rests(root) < rests:  # noqa: ASYNC110
            await anyio.sleep(0.02)


async def test_a_sandbox_that_is_idle_is_snapshotted_as_it_runs_where_that_is_asked_for():
    async with folder() as root:
        root.mkdir()
        (root / "server.toml").write_text("snapshot_idle_s = 0.1\n")
        with serving(root, "--config", "server.toml") as (process, url):
            async with us(url, 1) as client:
                await client.prepare(P, NOTES, TASK)
                await kept(root)
                for call_id, line in (("c1", "second"), ("c2", "third")):
                    await said(client, call_id, add(line))
                    await kept(root)
                assert (await client.state()).programs[0].rung is SandboxRung.RUNNING
                assert rows(root)["snapshots"] == 1
                # One that steps down later has its snapshot already, and one that comes back keeps it.
                await laid_down(client)
                await client.move(P, SandboxRung.RUNNING)
                assert rows(root)["snapshots"] == 1
            kill(process)
        with serving(root, "--config", "server.toml") as (_, url):
            async with us(url, 2) as client:
                await client.resume(P, NOTES, TASK, seen=["c1", "c2"])
                assert await said(client, "c3", add("fourth")) == "begun first second third fourth kept"
                await kept(root)
                await client.release(P)


async def test_a_program_that_has_work_in_its_sandbox_or_cannot_resume_is_not_snapshotted_again_and_again():
    async with folder() as root:
        root.mkdir()
        (root / "server.toml").write_text("snapshot_idle_s = 0.1\n")
        with serving(root, "--config", "server.toml") as (_, url):
            async with us(url, 1) as client:
                await client.prepare(P, COUNTING, TASK)
                with anyio.fail_after(30):
                    while not rows(root)["rests"]:  # noqa: ASYNC110
                        await anyio.sleep(0.02)
                await said(client, "c1", add("second"))
                busy = ProgramId("busy")
                await client.prepare(busy, NOTES, TASK)
                await client.shell(busy, "sleep 1000 &")
                await anyio.sleep(1.0)
                assert (sound_rests(root), rows(root)["snapshots"]) == (0, 0)
                for program in (P, busy):
                    await client.release(program)
