"""Servers that are not as they should be: an error with engine, call and remedy."""

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from fakes_sglang import FakeSGLang, Handler
from sglang_faked import PROMPT, answers
from sglang_servers import NAME, Served, adapter, faking, request
from sostenuto.errors import EngineError
from sostenuto.runtime.engines.sglang.engine import Keys, SGLangEngine
from sostenuto.runtime.engines.sglang.facts import ALWAYS, FLAGS
from sostenuto.runtime.engines.wire import (
    Feature,
    PauseMode,
    Sampling,
)

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with faking(tmp_path, step_s=0.002) as served:
        yield served


@pytest.fixture
def fake(served: Served) -> FakeSGLang:
    assert served.fake is not None
    return served.fake


@pytest.fixture
async def engine(served: Served) -> AsyncIterator[SGLangEngine]:
    async with adapter(served) as engine:
        yield engine


async def test_logprobs_of_another_temperature_are_found_out(fake: FakeSGLang, engine: SGLangEngine):
    fake.core.original_logprobs = True
    await engine.generate(request("a", PROMPT))
    with pytest.raises(EngineError, match="start it without SGLANG_RETURN_ORIGINAL_LOGPROB"):
        await engine.generate(request("b", PROMPT, sampling=Sampling(temperature=0.6)))


@pytest.mark.parametrize(
    ("flags", "feature", "remedy"),
    [
        ({"enable_session_radix_cache": False}, Feature.HOLD, "--enable-session-radix-cache"),
        ({"grammar_backend": "none"}, Feature.GRAMMAR, "--grammar-backend xgrammar"),
        ({"enable_return_routed_experts": False}, Feature.ROUTED_EXPERTS, "--enable-return-routed-experts"),
        ({"sampling_mask_max_tokens": 0}, Feature.TRUNCATION, "return_sampling_mask"),
    ],
)
async def test_what_is_missing_is_said_with_the_flag_to_set(
    fake: FakeSGLang, engine: SGLangEngine, flags: dict[str, Any], feature: Feature, remedy: str
):
    fake.flags |= flags
    asked: dict[Feature, dict[str, Any]] = {
        Feature.GRAMMAR: {"sampling": Sampling.model_validate({"grammar": {"regex": "[ab]+"}})},
        Feature.ROUTED_EXPERTS: {"routed_experts": True},
        Feature.TRUNCATION: {"sampling": Sampling(top_k=2)},
    }
    assert feature not in (await engine.capabilities()).features
    if feature in asked:
        with pytest.raises(EngineError, match=f"it cannot do {feature}; .*{remedy}"):
            await engine.generate(request("a", PROMPT, **asked[feature]))
    else:
        await engine.generate(request("a", PROMPT))
        assert "session_id" not in fake.bodies[-1][1]


@pytest.mark.parametrize("route", ["/model_info", "/server_info", "/generate", "/v1/loads"])
@pytest.mark.parametrize(
    "content", [b"<html>login</html>", b'{"output_ids": [1', b"", b"[]", b'{"other": 1}'],
    ids=["html", "half", "nothing", "list", "other"],
)  # fmt: skip
async def test_nonsense_is_an_error_with_engine_call_and_remedy(
    fake: FakeSGLang, engine: SGLangEngine, route: str, content: bytes
):
    if route in ("/generate", "/v1/loads"):
        await engine.capabilities()
    fake.broken[route] = answers(content)
    calls = {"/generate": lambda: engine.generate(request("a", PROMPT)), "/v1/loads": engine.load}
    with pytest.raises(EngineError, match=f"engine {NAME} .*{route}: answered with .*(is|look)"):
        await calls.get(route, engine.capabilities)()
    fake.broken.clear()
    assert (await engine.generate(request("b", PROMPT))).token_ids


Change = Callable[[dict[str, Any], dict[str, Any]], object]


def _spoiled(change: Change) -> Callable[[FakeSGLang], Handler]:
    """What the fake answers, changed."""

    def handler(fake: FakeSGLang) -> Handler:
        async def answer(http_request: web.Request) -> web.StreamResponse:
            response = await fake._generate(http_request)  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001
            assert isinstance(response, web.Response)
            assert isinstance(response.body, bytes)
            said = json.loads(response.body)
            change(said, said["meta_info"])
            return web.json_response(said)

        return answer

    return handler


SPOILED: list[tuple[Change, str]] = [
    (lambda said, meta: said["output_ids"].pop(), "log-probabilities are not those of output_ids|cover"),
    (lambda said, meta: meta["weight_versions"].clear(), "weight_versions .* do not cover 8 tokens"),
    (lambda said, meta: meta.update(id="other!"), "the answer is that of other!"),
    (lambda said, meta: meta.update(prompt_tokens=8), "8 of 20 prompt tokens were used"),
    (lambda said, meta: meta.update(finish_reason=None), "says of no end"),
    (lambda said, meta: meta["output_token_logprobs"][0].__setitem__(0, None), "has no log-probability"),
    (lambda said, meta: meta.update(routed_experts="AAAA"), "routed_experts of 27 tokens"),
]


@pytest.mark.parametrize(("change", "message"), SPOILED)
async def test_an_answer_whose_parts_do_not_agree_is_refused(
    fake: FakeSGLang, engine: SGLangEngine, change: Change, message: str
):
    await engine.capabilities()
    fake.broken["/generate"] = _spoiled(change)(fake)
    with pytest.raises(EngineError, match=f"engine {NAME} .*{message}.*one that the adapter knows"):
        await engine.generate(request("a", PROMPT, routed_experts=True))


async def test_a_prompt_that_the_server_cuts_without_a_word_is_an_error(
    fake: FakeSGLang, engine: SGLangEngine
):
    fake.flags["allow_auto_truncate"] = True
    with pytest.raises(EngineError, match="8 of 20 prompt tokens were used"):
        await engine.generate(request("a", PROMPT))


async def test_keys_are_asked_for_and_kept_apart(served: Served, fake: FakeSGLang):
    fake.api_key, fake.admin_key = "k1", "k2"
    async with adapter(served, keys=Keys(api="wrong")) as engine:
        with pytest.raises(
            EngineError, match="answered 401: Unauthorized; give the engine's API key"
        ) as caught:
            await engine.capabilities()
        assert "wrong" not in str(caught.value)
    async with adapter(served, keys=Keys(api="k1", admin="k2")) as engine:
        await engine.generate(request("a", PROMPT))
        await engine.pause(PauseMode.KEEP)
        await engine.resume()


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (
            {"weight_version": "default"},
            "weight_version 'default' is none of ours; start it with --weight-version",
        ),
        ({"is_generation": False}, "it does not generate"),
    ],
)
async def test_a_server_that_is_none_of_ours_is_refused_at_the_start(
    fake: FakeSGLang, engine: SGLangEngine, info: dict[str, Any], message: str
):
    said = {"model_path": "x", "weight_version": "0.0", "is_generation": True} | info
    fake.broken["/model_info"] = answers(json.dumps(said).encode())
    with pytest.raises(EngineError, match=message):
        await engine.capabilities()


async def test_a_server_with_data_parallel_ranks_is_refused(fake: FakeSGLang, engine: SGLangEngine):
    fake.flags["dp_size"] = 2
    with pytest.raises(EngineError, match=r"2 data-parallel ranks.*instead of --dp-size"):
        await engine.capabilities()


async def test_an_engine_that_another_owner_left_paused_is_not_used(fake: FakeSGLang, engine: SGLangEngine):
    fake._open.clear()  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001
    with pytest.raises(EngineError, match=r"it is paused or unwell .*POST /continue_generation"):
        await engine.capabilities()
    await engine.resume()
    assert (await engine.capabilities()).version == "0.0"


async def test_a_model_folder_that_is_incomplete_is_named(served: Served, fake: FakeSGLang, tmp_path: Path):
    del fake
    served.folder = tmp_path / "nowhere"
    async with adapter(served) as engine:
        with pytest.raises(EngineError, match=r"nowhere/config.json: FileNotFoundError.*name the folder"):
            await engine.capabilities()


def test_every_feature_that_may_be_missing_has_a_remedy():
    assert set(Feature) == ALWAYS | set(FLAGS)


async def test_an_adapter_is_asked_of_another_engine(engine: SGLangEngine):
    with pytest.raises(EngineError, match="it cannot do adapters; ask an embedded engine"):
        await engine.generate(request("a", PROMPT, adapter="mine"))
