"""What a vLLM can do wrong or lack, on the fake one."""

import base64
import io
import logging
import re
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from aiohttp import web
from benchmarks.vllm_weights import manifest_of

from fakes_vllm import COMPLETIONS, TOKENS
from sostenuto.errors import EngineError
from sostenuto.runtime.engines.http import Answer
from sostenuto.runtime.engines.vllm.engine import Served
from sostenuto.runtime.engines.vllm.replies import Gathered
from sostenuto.runtime.engines.wire import Feature, FinishReason, GenerateReply, PauseMode, ScoreRequest
from vllm_targets import request, until_idle
from vllm_worlds import World, Worlds, into, refusing, saying, until_sampled, update, worlds_in


@pytest.fixture
def worlds(tmp_path: Path) -> Worlds:
    return worlds_in(tmp_path)


async def bodies_of_one(world: World, **fields: Any) -> dict[str, Any]:  # noqa: ANN401
    """What is sent for a request with these fields."""
    async with world.engine() as engine:
        await engine.capabilities()
        world.fake.bodies.clear()
        await engine.generate(request("a", max_new_tokens=1, **fields))
    (body,) = world.fake.bodies
    return body


# ---- what it lacks is said, with the flag ----


@pytest.mark.parametrize(
    ("settings", "lacking", "flag"),
    [
        ({"processed": False}, "truncation", "--logprobs-mode processed_logprobs"),
        ({"dev_mode": False}, "update", "VLLM_SERVER_DEV_MODE=1"),
        ({"takes_grammars": False}, "grammar", "no structured outputs backend"),
        ({"takes_priorities": False}, "priorities", "--scheduling-policy priority"),
        ({"tells_cached": False}, "counts of cached tokens", "--enable-prompt-tokens-details"),
        ({"scale_out": False}, "versions by token", "--enable-scale-out"),
        ({"on_cpu": True}, "seeds", "--no-enable-chunked-prefill"),
    ],
)
async def test_what_is_missing_is_said_with_the_flag_to_set(
    worlds: Worlds, caplog: pytest.LogCaptureFixture, settings: dict[str, object], lacking: str, flag: str
):
    caplog.set_level(logging.INFO)
    async with worlds(**settings) as world, world.engine() as engine:
        await engine.capabilities()
    assert re.search(rf"{lacking} \([^)]*{re.escape(flag)}", caplog.text)


async def test_raw_log_probabilities_serve_only_what_they_are_true_for(worlds: Worlds):
    async with worlds(processed=False) as world, world.engine() as engine:
        features = (await engine.capabilities()).features
        assert not {Feature.TRUNCATION, Feature.PENALTIES, Feature.GRAMMAR} & features
        with pytest.raises(EngineError, match=r"temperature: 0.5, .* --logprobs-mode processed_logprobs"):
            await engine.generate(request("a", sampling={"temperature": 0.5}))
        with pytest.raises(EngineError, match="cannot do truncation; start it with --logprobs-mode"):
            await engine.generate(request("a", sampling={"top_p": 0.9}))
        assert len((await engine.generate(request("a"))).token_ids) == 8


async def test_without_scale_out_tokens_go_over_completions(worlds: Worlds):
    async with worlds(scale_out=False) as world, world.engine() as engine:
        assert Feature.SCORE not in (await engine.capabilities()).features
        reply = await engine.generate(request("a", top_logprobs=2))
        assert [(span.version, span.end) for span in reply.versions] == [("0.0", 8)]
        assert reply.top_logprobs is not None
        assert all(len(top) == 2 for top in reply.top_logprobs)
        assert COMPLETIONS in world.fake.calls
        replies: list[GenerateReply] = []
        async with anyio.create_task_group() as group:
            group.start_soon(into, replies, engine, "b")
            await until_sampled(world.fake, 2)
            await engine.abort("b")
        assert replies[0].finish_reason is FinishReason.ABORT


async def test_without_dev_mode_it_serves_what_it_was_started_with(worlds: Worlds):
    async with worlds(dev_mode=False) as world, world.engine(served=Served(version="2.7")) as engine:
        assert (await engine.capabilities()).version == "2.7"
        assert len((await engine.generate(request("a"))).token_ids) == 8
        with pytest.raises(EngineError, match="cannot do update; start it with VLLM_SERVER_DEV_MODE=1"):
            await engine.prepare_update(manifest_of(world.other, "2.8"))
        with pytest.raises(EngineError, match="cannot do pause; start it with VLLM_SERVER_DEV_MODE=1"):
            await engine.pause(PauseMode.KEEP)


async def test_a_tied_head_on_a_cpu_is_not_updated(worlds: Worlds):
    async with worlds(on_cpu=True) as world:
        config = world.model / "config.json"
        config.write_text(config.read_text().replace("false", "true"))
        async with world.engine() as engine:
            with pytest.raises(EngineError, match="serve one whose tie_word_embeddings is false"):
                await engine.prepare_update(manifest_of(world.other, "0.1"))


async def test_priorities_seeds_and_salts_in_vllms_words(worlds: Worlds):
    async with worlds() as world:
        body = await bodies_of_one(world, priority=3, salt="so/me@salt")
        again = await bodies_of_one(world, salt="so/me@salt")
        assert (body["priority"], again["priority"]) == (-3, 0)
        assert body["cache_salt"] == again["cache_salt"]
        assert re.fullmatch("[0-9a-f]{32}", str(body["cache_salt"]))
        assert body["cache_salt"] != (await bodies_of_one(world))["cache_salt"]
        assert "seed" in body["sampling_params"]
    async with worlds(takes_priorities=False) as world:
        assert (await bodies_of_one(world, priority=3))["priority"] == 0
    async with worlds(on_cpu=True) as world:
        assert "seed" not in (await bodies_of_one(world))["sampling_params"]
    async with worlds(on_cpu=True, chunked=False) as world:
        assert "seed" in (await bodies_of_one(world))["sampling_params"]


async def test_all_of_the_sampling_is_said(worlds: Worlds):
    async with worlds() as world:
        sent = (await bodies_of_one(world))["sampling_params"]
        neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
        assert {name: sent[name] for name in neutral} == neutral
        assert "structured_outputs" not in sent
        sampling = {"top_k": 5, "min_p": 0.1, "presence_penalty": 0.5, "grammar": {"lark": "start: /a/"}}
        sent = (await bodies_of_one(world, sampling={**sampling, "grammar": {"regex": "7"}}))[
            "sampling_params"
        ]
        assert (sent["top_k"], sent["min_p"], sent["presence_penalty"]) == (5, 0.1, 0.5)
        assert (sent["structured_outputs"], sent["ignore_eos"]) == ({"regex": "7"}, False)

        tagged = await bodies_of_one(world, sampling={"grammar": {"structural_tag": "{}"}})
        assert tagged["sampling_params"]["structured_outputs"] == {"structural_tag": "{}"}


async def test_the_models_own_settings_cut_nothing_off_the_distribution(worlds: Worlds):
    replies: list[GenerateReply] = []
    for defaults in ({}, {"top_k": 1, "repetition_penalty": 1.1}):
        async with worlds(scale_out=False, defaults=defaults) as world, world.engine() as engine:
            replies.append(await engine.generate(request("a", max_new_tokens=30)))
    assert replies[0].token_ids == replies[1].token_ids


# ---- another server than was meant ----


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"release": "0.20.1"}, r"/version: it is vLLM 0.20.1, and this adapter knows 0.32.x and 0.33.x"),
        ({"key": "right"}, r"/v1/models: answered 401: Unauthorized; give the engine's API key"),
    ],
)
async def test_another_server_is_refused_at_once(worlds: Worlds, settings: dict[str, object], message: str):
    async with worlds(**settings) as world, world.engine(key="wrong") as engine:
        with pytest.raises(EngineError, match=message):
            await engine.capabilities()


async def test_another_release_can_be_allowed(worlds: Worlds):
    async with worlds(release="0.99.0") as world, world.engine(served=Served(any_release=True)) as engine:
        assert (await engine.capabilities()).kind == "vllm"


async def test_another_model_name_or_folder_is_refused(worlds: Worlds):
    async with worlds() as world:
        async with world.engine(served=Served(name="other")) as engine:
            with pytest.raises(EngineError, match="model: the engine serves fake; name one of them"):
                await engine.capabilities()
        (world.model / "config.json").write_text('{"architectures": []}')
        async with world.engine() as engine:
            with pytest.raises(EngineError, match="name the folder of the model that the engine serves"):
                await engine.capabilities()


async def test_a_label_that_is_no_version_of_ours_is_refused(worlds: Worlds):
    async with worlds(version="checkpoint-7") as world, world.engine() as engine:
        with pytest.raises(EngineError, match=r"labelled 'checkpoint-7', .* /update_weight_version"):
            await engine.capabilities()


async def test_another_life_of_the_server_is_seen(worlds: Worlds):
    async with worlds() as world, world.engine() as engine:
        await update(engine, world.other, "0.1")
        assert (await engine.capabilities()).version == "0.1"
        calls = len(world.fake.calls)
        await engine.capabilities()
        assert len(world.fake.calls) == calls + 2, "what is known is not tried again"
        world.fake.started, world.fake.version = 2.0, "default"
        assert (await engine.capabilities()).version == "0.0"
        assert TOKENS in world.fake.calls[calls + 2 :], "a new server is tried anew"


# ---- pauses ----


async def test_a_server_that_somebody_else_has_paused_is_waited_for(worlds: Worlds):
    async with worlds() as world, world.engine() as engine:
        await engine.capabilities()
        world.fake.paused = "abort"
        replies: list[GenerateReply] = []
        async with anyio.create_task_group() as group:
            group.start_soon(into, replies, engine, "a", 3)
            while "/is_paused" not in world.fake.calls[-1:]:  # noqa: ASYNC110
                await anyio.sleep(0.01)
            assert not replies
            world.fake.paused = ""
        assert len(replies[0].token_ids) == 3


async def test_a_busy_server_that_is_not_paused_is_an_error(worlds: Worlds):
    async with worlds() as world, world.engine() as engine:
        await engine.capabilities()
        world.fake.broken[TOKENS] = refusing(503, "too many requests")
        with pytest.raises(EngineError, match="answered 503: too many requests"):
            await engine.generate(request("a"))


async def test_a_pause_that_fails_lets_requests_in_again(worlds: Worlds):
    async with worlds() as world, world.engine() as engine:
        await engine.capabilities()
        world.fake.broken["/pause"] = refusing(500, "no")
        with pytest.raises(EngineError, match="/pause: answered 500: no"):
            await engine.pause(PauseMode.KEEP)
        assert world.fake.calls[-1] == "/resume"
        assert len((await engine.generate(request("a"))).token_ids) == 8


# ---- broken answers ----

_EVENT = b'data: {"choices": [{"token_ids": [5], "logprobs": {"content": [{"token_id": 5, "logprob": -1.0}]}'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<html>hello</html>", "the answer ended in the middle"),
        (b"", "the answer ended in the middle"),
        (_EVENT + b"\n\n", "answered with no Event"),
        (_EVENT + b"}]}\n\n", "the answer ended in the middle"),
        (_EVENT + b"}]}\n\ndata: [DONE]\n\n", "answered with it ended without saying why"),
        (b'data: {"choices": "many"}\n\n', "answered with no Event"),
        (
            b'data: {"error": {"message": "EngineCore died"}}\n\n',
            "EngineCore died; look into the engine's log",
        ),
        (
            _EVENT.replace(b"-1.0", b"-9999.0") + b"}]}\n\ndata: [DONE]\n\n",
            "answered with -9999.0 as a log-probability",
        ),
        (
            _EVENT.replace(b'"token_ids": [5]', b'"token_ids": [5, 6]') + b"}]}\n\ndata: [DONE]\n\n",
            "answered with 2 tokens with 1 log-probabilities",
        ),
        (
            _EVENT + b', "finish_reason": "length", "weight_versions": [{"version": "0.0", "start": 0, '
            b'"end": 9}]}]}\n\ndata: [DONE]\n\n',
            "answered with versions that do not cover its 1 tokens",
        ),
        (
            _EVENT + b', "finish_reason": "error"}]}\n\ndata: [DONE]\n\n',
            "answered with the finish reason 'error'",
        ),
    ],
)
async def test_a_broken_answer_is_an_error(worlds: Worlds, content: bytes, message: str):
    async with worlds() as world, world.engine() as engine:
        await engine.capabilities()
        world.fake.broken[TOKENS] = saying(content)
        with pytest.raises(EngineError, match=re.escape(message)) as caught:
            await engine.generate(request("a"))
        assert str(caught.value).startswith(f"engine e0 (vllm at {world.url}): /inference/v1/generate: ")
        world.fake.broken.clear()
        assert len((await engine.generate(request("a"))).token_ids) == 8


async def test_a_server_that_leaves_out_the_most_probable_tokens_is_an_error(worlds: Worlds):
    answer = _EVENT + b', "finish_reason": "length"}]}\n\ndata: [DONE]\n\n'
    message = "a token without the most probable ones, which were asked for"
    async with worlds() as world, world.engine() as engine:
        await engine.capabilities()
        world.fake.broken[TOKENS] = saying(answer)
        with pytest.raises(EngineError, match=message):
            await engine.generate(request("a", top_logprobs=2))
        async with world.engine() as other:
            with pytest.raises(EngineError, match=message):
                await other.capabilities()


async def test_a_connection_that_is_lost_in_mid_answer_is_an_error(worlds: Worlds):
    async def cut(http_request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(http_request)
        await response.write(_EVENT + b"}]}\n\n")
        assert http_request.transport is not None
        http_request.transport.abort()
        return response

    async with worlds() as world, world.engine() as engine:
        await engine.capabilities()
        world.fake.broken[TOKENS] = cut
        with pytest.raises(EngineError, match="the connection was lost"):
            await engine.generate(request("a"))


async def test_a_deadline_leaves_nothing_running(worlds: Worlds):
    async with worlds(context=8000) as world, world.engine(generate_s=0.5) as engine:
        await engine.capabilities()
        with pytest.raises(EngineError, match=r"no answer within 0\.\d+ s"):
            await engine.generate(request("a", max_new_tokens=7000))
        await until_idle(engine)
        assert "/inference/v1/abort_requests" in world.fake.calls


async def test_a_request_does_not_wait_for_ever_behind_a_pause(worlds: Worlds):
    async with worlds() as world, world.engine(generate_s=0.5) as engine:
        await engine.capabilities()
        await engine.pause(PauseMode.KEEP)
        for call in (
            lambda: engine.generate(request("a")),
            lambda: engine.score(ScoreRequest(token_ids=[5, 6, 7], start=1)),
        ):
            with pytest.raises(EngineError, match=r"it stands still for over 0\.5 s; resume it"):
                await call()
        await engine.resume()
        assert (await engine.generate(request("b"))).token_ids


async def test_metrics_that_are_none_are_an_error(worlds: Worlds):
    async with worlds() as world, world.engine() as engine:
        await engine.capabilities()
        for content, message in [
            ("<html>", "answered without vllm:num_requests_running; start it without --disable-log-stats"),
            ("vllm:num_requests_running nonsense", "metrics that cannot be read"),
        ]:
            world.fake.broken["/metrics"] = saying(content)
            with pytest.raises(EngineError, match=message):
                await engine.load()


@pytest.mark.parametrize("is_file", [True, False])
async def test_routed_experts_are_read(is_file: bool):
    routed = np.arange(2 * 3 * 2).reshape(2, 3, 2).astype(np.uint8)
    file = io.BytesIO()
    np.save(file, routed)
    said = base64.b64encode(file.getvalue() if is_file else b"nonsense").decode()
    asked = request("a", routed_experts=True)
    gathered = Gathered("engine", asked, served="0.0", telling=None, sent_s=0.0, first_s=0.0)
    end = f', "finish_reason": "length", "routed_experts": "{said}"' + "}]}"
    gathered.take(Answer("engine", _EVENT.removeprefix(b"data: ") + end.encode()))
    if not is_file:
        with pytest.raises(EngineError, match="routed experts that cannot be read"):
            gathered.reply(str, pause_s=0.0)
        return
    found = gathered.reply(str, pause_s=0.0).routed_experts
    assert found is not None
    data = np.frombuffer(base64.b64decode(found.data), dtype="<i2").reshape(found.shape)
    assert (data == routed).all()
