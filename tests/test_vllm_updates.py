"""How an update of a vLLM can fail, and that nothing doubtful is given out, on the fake one."""

from dataclasses import dataclass, field
from pathlib import Path

import anyio
import pytest
from benchmarks.vllm_weights import manifest_of

from sostenuto.errors import EngineError
from sostenuto.runtime.engines.vllm.transports import Distributed
from sostenuto.runtime.engines.wire import CommitRequest, GenerateReply, WireSpan
from sostenuto.trainer.publication.manifest import Manifest
from vllm_targets import request
from vllm_worlds import LONG, Worlds, refusing, saying, silent, until_sampled, update, worlds_in


@pytest.fixture
def worlds(tmp_path: Path) -> Worlds:
    return worlds_in(tmp_path)


@pytest.mark.parametrize(
    ("route", "message"),
    [
        ("/collective_rpc", "answered 500: broke"),
        ("/reset_prefix_cache", "answered 500: broke"),
        ("/update_weight_version", "answered 500: broke"),
        ("/weight_info", "answered 500: broke"),
    ],
)
async def test_an_update_that_breaks_is_believed_no_more(worlds: Worlds, route: str, message: str):
    async with worlds() as world, world.engine() as engine:
        await engine.capabilities()
        failures: list[EngineError] = []

        async def run() -> None:
            with pytest.raises(EngineError, match="nothing it samples is believed") as caught:
                await engine.generate(request("a", max_new_tokens=LONG))
            failures.append(caught.value)

        async with anyio.create_task_group() as group:
            group.start_soon(run)
            await until_sampled(world.fake, 3)
            world.fake.broken[route] = refusing(500, "broke")
            with pytest.raises(EngineError, match=message):
                await update(engine, world.other, "0.1")
        assert failures, "what ran on doubtful weights is given out to nobody"
        assert not world.fake.paused
        with pytest.raises(EngineError, match=r"its update to 0.1 failed: .* publish a whole version"):
            await engine.generate(request("b"))
        world.fake.broken.clear()
        await update(engine, world.other, "0.2")
        assert (await engine.generate(request("b"))).versions[0].version == "0.2"


@pytest.mark.parametrize(
    ("trap", "message"),
    [
        ("ignores_weights_path", "/weight_checker: its weights did not change, and what was sent did"),
        ("keeps_label", "/weight_info: it serves 0.1 after the update to 0.2"),
    ],
)
async def test_an_update_that_only_looks_done_is_found_out(worlds: Worlds, trap: str, message: str):
    async with worlds() as world, world.engine() as engine:
        await update(engine, world.model, "0.1")
        setattr(world.fake, trap, True)
        with pytest.raises(EngineError, match=message):
            await update(engine, world.other, "0.2")
        with pytest.raises(EngineError, match="nothing it samples is believed"):
            await engine.generate(request("a"))


async def test_kv_of_old_weights_that_is_not_dropped_is_an_error(worlds: Worlds):
    async with worlds() as world, world.engine() as engine:
        await engine.capabilities()
        world.fake.broken["/reset_prefix_cache"] = saying('{"success": false}')
        with pytest.raises(EngineError, match="it did not drop the KV of the old weights"):
            await update(engine, world.other, "0.1")


async def test_a_cancelled_update_is_resumed_and_doubted(worlds: Worlds):
    async with worlds() as world, world.engine() as engine:
        await engine.prepare_update(manifest_of(world.other, "0.1"))
        world.fake.broken["/collective_rpc"] = silent
        with anyio.move_on_after(0.3):
            await engine.commit_update(CommitRequest(version="0.1"))
        assert not world.fake.paused
        with pytest.raises(EngineError, match=r"its update to 0.1 did not come to an end"):
            await engine.generate(request("a"))


async def test_a_stream_across_an_update_tells_each_token_with_its_own_version(worlds: Worlds):
    told: list[WireSpan] = []
    replies: list[GenerateReply] = []
    async with worlds() as world, world.engine() as engine:
        await engine.prepare_update(manifest_of(world.other, "0.1"))

        async def ask() -> None:
            asked = request("a", max_new_tokens=200)
            replies.append(await engine.generate(asked, spans=told.append))

        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            while not told:  # noqa: ASYNC110 - the fake steps by itself
                await anyio.sleep(0.002)
            await engine.commit_update(CommitRequest(version="0.1", running="continue", held="keep"))
    (reply,) = replies
    assert [span.version for span in reply.versions] == ["0.0", "0.1"]
    assert len(told) > 2
    by_token = [(token, span.version) for span in told for token in span.token_ids]
    assert by_token == [(token, span.version) for span in reply.spans() for token in span.token_ids]
    assert [value for span in told for value in span.logprobs] == reply.logprobs


async def test_tokens_that_were_told_under_another_version_than_the_answers_are_an_error(worlds: Worlds):
    """Somebody else updates the server."""
    told: list[WireSpan] = []
    async with worlds() as world, world.engine() as engine:
        await engine.capabilities()

        async def ask() -> None:
            with pytest.raises(EngineError, match=r"200 tokens came under version 0\.0, and its answer has"):
                await engine.generate(request("a", max_new_tokens=200), spans=told.append)

        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            while not told:  # noqa: ASYNC110 - the fake steps by itself
                await anyio.sleep(0.002)
            world.fake.version = "0.7"


async def test_the_order_of_an_update(worlds: Worlds):
    async with worlds() as world, world.engine() as engine:
        await engine.prepare_update(manifest_of(world.other, "0.1"))
        world.fake.calls.clear()
        await engine.commit_update(CommitRequest(version="0.1"))
        order = ["/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version"]
        assert world.fake.calls == [*order, "/weight_info", "/weight_checker", "/resume"]
        assert [path.name for path in world.updates.iterdir()] == ["weights-0.1"]


@dataclass
class FakeSender:
    fails: bool = False
    sent: list[str] = field(default_factory=list[str])

    async def join(self) -> None:
        self.sent.append("joined")

    async def send(self, manifest: Manifest) -> None:
        self.sent.append(manifest.version)
        if self.fails:
            raise EngineError("the sender's group broke")


async def test_weights_can_come_from_a_sender_in_a_group(worlds: Worlds):
    sender = FakeSender()
    async with worlds() as world:
        distributed = Distributed({"master_address": "10.0.0.1", "master_port": 29500}, sender)
        async with world.engine(transport=distributed) as engine:
            await engine.capabilities()
            world.fake.calls.clear()
            world.fake.bodies.clear()
            await update(engine, world.other, "0.1")
            load = [
                "/init_weight_transfer_engine", "/start_weight_update", "/update_weights",
                "/finish_weight_update",
            ]  # fmt: skip
            assert world.fake.calls[1:5] == load
            init, _, sent = world.fake.bodies[:3]
            assert init["init_info"]["master_port"] == 29500
            assert sent["update_info"]["names"] == ["embed.weight", "lm_head.weight"]
            assert sent["update_info"]["dtype_names"] == ["float32", "float32"]
            assert sender.sent == ["joined", "0.1"]
            sender.fails = True
            with pytest.raises(EngineError, match="the sender's group broke"):
                await update(engine, world.other, "0.2")
            assert sender.sent == ["joined", "0.1", "0.2"]
            with pytest.raises(EngineError, match="nothing it samples is believed"):
                await engine.generate(request("a"))
            assert not world.fake.paused
