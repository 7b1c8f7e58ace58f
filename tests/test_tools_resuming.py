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
from sostenuto.tools.client import ToolServerClient
from sostenuto.tools.refused import Interrupted
from sostenuto.tools.wire import EnvironmentRef
from sostenuto.types import CallId, ProgramId, SandboxRung, ToolCall

IDLE = "snapshot_idle_s = 0.1"
COUNT = ToolCall("next", "{}")
WAIT = ToolCall("wait", '{"seconds": 0}')


@asynccontextmanager
async def folder() -> AsyncGenerator[Path]:
    """Of a server; nothing may be left in it."""
    with sandbox_root() as root:
        yield root / "one"
        await assert_nothing_left(root / "one")


@asynccontextmanager
async def killed(root: Path, epoch: int = 1) -> AsyncGenerator[ToolServerClient]:
    """A server on the folder, which is killed at the end."""
    with serving(root) as (process, url):
        async with us(url, epoch) as client:
            yield client
        kill(process)


async def begun(
    client: ToolServerClient, name: str, environment: EnvironmentRef = NOTES, *calls: tuple[str, ToolCall]
) -> ProgramId:
    """A program that has made these calls, whose sandbox is then snapshotted."""
    program = ProgramId(name)
    await client.prepare(program, environment, TASK)
    for call_id, call in calls:
        await said(client, call_id, call, program)
    await laid_down(client, program)
    return program


async def test_a_program_goes_on_after_its_server_was_killed_and_killed_again():
    async with folder() as root:
        async with killed(root) as client:
            await begun(client, P, NOTES, ("c1", add("second")))
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


async def test_what_has_not_changed_since_its_snapshot_goes_on():
    async with folder() as root:
        async with killed(root) as client:
            many = [await begun(client, f"p{number}") for number in range(4)]
            back = await begun(client, "back")
            for _ in range(2):
                assert (await client.move(back, SandboxRung.RUNNING)).rung is SandboxRung.RUNNING
                await laid_down(client, back)
            await client.move(back, SandboxRung.RUNNING)
            assert rows(root)["snapshots"] == 5
            saving = await begun(client, "saving", SAVING, ("c1", COUNT))
            unheard = await begun(client, "unheard", NOTES, ("c1", add("second")))
        with serving(root) as (_, url):
            async with us(url, 2) as client:

                async def goes_on(program: ProgramId) -> None:
                    await client.resume(program, NOTES, TASK)
                    assert await said(client, "c1", add("second"), program) == "begun first second kept"
                    await client.release(program)

                with pytest.raises(ToolServerError, match="has the result of call 'c2', and its snapshot is"):
                    await client.resume(unheard, NOTES, TASK, seen=["c1", "c2"])
                async with anyio.create_task_group() as group:
                    # A reply that was lost on its way is no obstacle: it is asked for again.
                    for program in (*many, back, unheard):
                        group.start_soon(goes_on, program)
                await client.resume(saving, SAVING, TASK, seen=["c1"])
                # `resume` has written a file, so that its snapshot is not what it was.
                assert await client.read(saving, "resumed") == b"first"
                assert await said(client, "c2", COUNT, saving) == "12"
                await client.release(saving)


async def test_what_does_not_go_on_says_why_and_its_results_are_there():
    async with folder() as root:
        async with killed(root) as client:
            called = await begun(client, "called")
            await said(client, "c1", add("second"), called)
            waited = await begun(client, "waited")
            await said(client, "c1", WAIT, waited)
            written = await begun(client, "written")
            await client.write(written, "log", b"")
            fresh = ProgramId("fresh")
            await client.prepare(fresh, NOTES, TASK)
            counting = ProgramId("counting")
            await client.prepare(counting, COUNTING, TASK)
            assert (
                "keeps count outside of its sandbox" in (await laid_down(client, counting)).ends_with_server
            )
            await anyio.sleep(0.5)  # what ended is written within one commit, which nobody waits for
            assert rows(root)["snapshots"] == 2
        with serving(root) as (_, url):
            async with us(url, 2) as client:
                assert entries(root / "tool-server" / "sandboxes") == []
                for program, why in (
                    (called, "called cannot go on: it was calling add since its last snapshot"),
                    (waited, "it was calling wait since its last snapshot"),
                    (written, "its sandbox was used since its last snapshot"),
                    (fresh, "nothing of it is left here"),
                    (counting, "keeps count outside of its sandbox; write `save`"),
                ):
                    with pytest.raises(ToolServerError, match=why):
                        await client.resume(program, NOTES, TASK)
                assert await said(client, "c1", add("second"), called) == "begun first second kept"
                with pytest.raises(Interrupted, match="ended with the tool server that ran it"):
                    await said(client, "c2", add("third"), called)
                for program in (called, waited, written, counting):
                    await client.release(program)


async def test_a_program_has_one_owner_and_older_epochs_and_others_never_get_it():
    async with folder() as root:
        async with killed(root) as client:
            await begun(client, P)
            anew = await begun(client, "anew")
            failing = await begun(client, "failing", FAILING)
        with serving(root) as (_, url):
            async with us(url, 1) as old, us(url, 2) as new, us(url, 9, "others") as others:
                with pytest.raises(ToolServerError, match="program p belongs to us/1"):
                    await others.resume(P, NOTES, TASK)
                for _ in range(2):
                    await new.resume(P, NOTES, TASK)
                assert (await new.state()).counters["resumed"] == 1
                with pytest.raises(ToolServerError, match="came back with epoch 2"):
                    await old.resume(P, NOTES, TASK)
                with pytest.raises(ToolServerError, match="program p of us/2 is ready here"):
                    await others.resume(P, NOTES, TASK)
                # One that is prepared anew, or cannot resume after all, leaves its snapshot.
                await new.prepare(anew, NOTES, TASK)
                assert await said(new, "c1", add("second"), anew) == "begun first second kept"
                with pytest.raises(EnvironmentFailure, match="resume of Failing: RuntimeError: no way back"):
                    await new.resume(failing, FAILING, TASK)
                with pytest.raises(ToolServerError, match="nothing of it is left here"):
                    await new.resume(failing, FAILING, TASK)
                for program in (P, anew):
                    await new.release(program)
                await assert_nothing_left(root)


async def test_what_is_not_what_it_was_or_whose_owner_does_not_come_back_is_removed():
    async with folder() as root:
        async with killed(root) as client:
            await begun(client, P)
            await begun(client, "left")
        sandboxes = root / "tool-server" / "sandboxes"
        for name in entries(sandboxes):
            if "left" not in (sandboxes / name / "owner.json").read_text():
                for log in (sandboxes / name).glob("content/log"):
                    log.write_text("forged")
        async with killed(root) as client:
            with pytest.raises(ToolServerError, match="its snapshot is gone, or is not what it was"):
                await client.resume(P, NOTES, TASK)
            assert len(entries(sandboxes)) == 1
        with serving(root, settings="lease_s = 0.5"):
            await assert_nothing_left(root)


async def kept(root: Path, rests: int = 1) -> None:
    """Until the journal has what programs can go on from."""
    with anyio.fail_after(30):
        while sound_rests(root) < rests:  # noqa: ASYNC110
            await anyio.sleep(0.02)


async def test_a_sandbox_that_is_idle_is_snapshotted_as_it_runs_where_that_is_asked_for():
    async with folder() as root:
        with serving(root, settings=IDLE) as (process, url):
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
        with serving(root, settings=IDLE) as (_, url):
            async with us(url, 2) as client:
                await client.resume(P, NOTES, TASK, seen=["c1", "c2"])
                assert await said(client, "c3", add("fourth")) == "begun first second third fourth kept"
                await kept(root)
                await client.release(P)


async def test_a_program_that_has_work_in_its_sandbox_or_cannot_resume_is_not_snapshotted_again_and_again():
    async with folder() as root:
        with serving(root, settings=IDLE) as (_, url):
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
