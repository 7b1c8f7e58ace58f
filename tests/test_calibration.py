"""A profile that is measured is the profile of what was measured."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from sostenuto.errors import ConfigError, EngineError
from sostenuto.runtime.calibration.calibrate import ProbeSettings, calibrate, calibrate_engine
from sostenuto.runtime.calibration.fit import (
    Prefill,
    PrefillSample,
    chunk_of,
    fit_prefill,
    itl_of,
    overlap_of,
)
from sostenuto.runtime.calibration.limits import Limits, Pool
from sostenuto.runtime.calibration.probe import open_engine
from sostenuto.runtime.calibration.profile_file import profile_text
from sostenuto.runtime.simulation.profile import EngineProfile, OnRelease
from sostenuto.runtime.simulation.profiles import load_profile

KNOWN = EngineProfile(
    name="known",
    kv_tokens=65_536,
    block_tokens=32,
    concurrency=8,
    prefill_tokens_s=5_000,
    prefill_s_per_token_squared=3e-7,
    chunk_tokens=1_024,
    overlap=0.4,
    itl_s=((1, 0.015), (2, 0.018), (4, 0.021), (8, 0.03)),
    request_s=0.02,
    on_release=OnRelease.IGNORE,
)


@dataclass(slots=True, eq=False)
class Asked:
    tokens: int
    to_prefill: int
    output_tokens: int
    times: list[float] = field(default_factory=list[float])
    done: anyio.Event = field(default_factory=anyio.Event)


class PrefixCache:
    """Holds every beginning of every prompt, in whole blocks."""

    def __init__(self, block_tokens: int) -> None:
        self._block = block_tokens
        self._seen: set[tuple[int, ...]] = set()

    def new_tokens(self, prompt: Sequence[int]) -> int:
        """What it did not hold; from now on it does.  The last token is always new."""
        beginnings = [tuple(prompt[:end]) for end in range(self._block, len(prompt), self._block)]
        held = max((len(beginning) for beginning in beginnings if beginning in self._seen), default=0)
        self._seen.update(beginnings)
        return len(prompt) - held


class KnownEngine:
    """Makes one step after the other, each as long as the profile says."""

    def __init__(self, profile: EngineProfile, pool: Pool) -> None:
        self._profile = profile
        self._pool = pool
        self._cache = PrefixCache(pool.block_tokens)
        self._asked: list[Asked] = []
        self._came = anyio.Event()

    async def limits(self) -> Limits:
        return Limits("known", 4_096, self._pool)

    async def generate(self, token_ids: Sequence[int], output_tokens: int) -> float:
        return (await self.stream(token_ids, output_tokens))[-1]

    async def stream(self, token_ids: Sequence[int], output_tokens: int) -> Sequence[float]:
        begin_s = anyio.current_time()
        asked = Asked(len(token_ids), self._cache.new_tokens(token_ids), output_tokens)
        await anyio.sleep(self._profile.request_s)
        self._asked.append(asked)
        self._came.set()
        await asked.done.wait()
        return [time - begin_s for time in asked.times]

    async def run(self) -> None:
        while True:
            while self._asked:
                await self._step()
            self._came = anyio.Event()
            await self._came.wait()

    async def _step(self) -> None:
        decoding = [asked for asked in self._asked if not asked.to_prefill]
        first = next((asked for asked in self._asked if asked.to_prefill), None)
        chunk = min(first.to_prefill, self._profile.chunk_tokens) if first else 0
        context = first.tokens - first.to_prefill + chunk if first else 0
        prefill_s = self._profile.prefill_s(chunk, context)
        decode_s = self._profile.itl(len(decoding)) if decoding else 0.0
        await anyio.sleep(prefill_s + decode_s - self._profile.overlap * min(prefill_s, decode_s))
        if first:
            first.to_prefill -= chunk
            decoding += [] if first.to_prefill else [first]
        for asked in decoding:
            asked.times.append(anyio.current_time())
            if len(asked.times) == asked.output_tokens:
                self._asked.remove(asked)
                asked.done.set()


async def measured(pool: Pool, batches: tuple[int, ...] = (1, 2, 4, 8)) -> EngineProfile:
    engine = KnownEngine(KNOWN, pool)
    profiles: list[EngineProfile] = []
    async with anyio.create_task_group() as group:
        group.start_soon(engine.run)
        profiles.append(await calibrate_engine(engine, ProbeSettings(repeats=1, batches=batches)))
        group.cancel_scope.cancel()
    return profiles[0]


@pytest.mark.looptime
async def test_the_profile_of_a_known_engine_is_found():
    found = await measured(Pool(65_536, 32, chunk_tokens=1_024, concurrency=8))
    assert found.prefill_tokens_s == pytest.approx(5_000, rel=0.02)
    assert found.prefill_s_per_token_squared == pytest.approx(3e-7, rel=0.05)
    assert found.request_s == pytest.approx(0.02, rel=0.05)
    assert [n for n, _ in found.itl_s] == [1, 2, 4, 8]
    assert [s for _, s in found.itl_s] == pytest.approx([s for _, s in KNOWN.itl_s], rel=0.03)
    assert found.overlap == pytest.approx(0.4, abs=0.1)
    assert (found.kv_tokens, found.block_tokens, found.concurrency) == (65_536, 32, 8)
    assert found.chunk_tokens == 1_024


@pytest.mark.looptime
async def test_a_chunk_that_the_engine_does_not_tell_is_seen_in_the_gaps_of_decoding():
    found = await measured(Pool(65_536, 32, concurrency=8), batches=(1, 2))
    assert found.chunk_tokens == pytest.approx(1_024, rel=0.05)


@pytest.mark.looptime
async def test_the_prompts_that_decode_together_leave_half_of_a_small_pool():
    found = await measured(Pool(4_096, 32, chunk_tokens=1_024, concurrency=8), batches=(1, 8))
    assert [n for n, _ in found.itl_s] == [1, 8]


def test_prefill_is_fitted_through_its_three_parts():
    fresh = [PrefillSample(n, n, 0.01 + n / 2_000 + 4e-7 * n**2 / 2) for n in (64, 256, 1_024)]
    appended = PrefillSample(100, 1_100, 0.01 + 0.05 + 4e-7 * 100 * 1_050)
    found = fit_prefill([*fresh, appended])
    assert (found.fixed_s, found.tokens_s) == pytest.approx((0.01, 2_000))
    assert found.s_per_token_squared == pytest.approx(4e-7)
    assert found.tokens_in(found.marginal_s(777)) == pytest.approx(777)


def test_a_part_that_would_be_negative_is_none():
    found = fit_prefill([PrefillSample(n, n, n / 1_000 - 1e-3) for n in (100, 200, 400, 800)])
    assert found.fixed_s == 0
    assert found.tokens_s == pytest.approx(1_000, rel=0.02)
    straight = fit_prefill([PrefillSample(n, n, n / 1_000 - 1e-7 * n**2) for n in (100, 200, 400, 800)])
    assert straight.s_per_token_squared == 0
    assert straight.tokens_in(2.0) == pytest.approx(2 * straight.tokens_s)


def test_an_engine_that_takes_no_longer_for_more_is_not_idle():
    with pytest.raises(EngineError, match="otherwise idle"):
        fit_prefill([PrefillSample(n, n, 1.0 / n) for n in (100, 200, 400)])
    with pytest.raises(EngineError, match="otherwise idle"):
        itl_of(1.0, 0.9, 10)


def test_overlap_is_what_prefill_hid_behind_decoding():
    assert overlap_of(10 * 0.02, 10, 0.02, 0.02) == 0
    assert overlap_of(10 * 0.015, 10, 0.02, 0.02) == pytest.approx(0.25)
    assert overlap_of(0.0, 10, 0.02, 0.02) == 1
    assert overlap_of(-1.0, 10, 0.02, 0.02) == 1


def test_a_gap_in_decoding_says_how_large_the_chunk_was():
    prefill = Prefill(0.01, 1_000, 0.0)
    assert chunk_of(0.512 + 0.01, prefill, 0.01, 0.0) == 512
    assert chunk_of(0.512, prefill, 0.01, 1.0) == 512


def test_a_profile_file_is_read_as_it_was_written(tmp_path: Path):
    path = tmp_path / "known.toml"
    path.write_text(profile_text(KNOWN))
    assert load_profile(str(path)) == KNOWN


METRICS = """# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="8",engine="0",num_cpu_blocks="None",num_gpu_blocks="700"} 1.0
"""
SCHEDULER = {"vllm_config": {"scheduler_config": {"max_num_batched_tokens": 512, "max_num_seqs": 1}}}
MODELS = {"data": [{"id": "tiny", "max_model_len": 96}]}


def vllm_routes() -> dict[str, Any]:
    return {"/v1/models": MODELS, "/metrics": METRICS, "/server_info": SCHEDULER}


@dataclass(slots=True)
class FakeEngine:
    """Its time goes on with what it is asked for, and with nothing else."""

    routes: dict[str, Any]
    now_s: float = 0.0
    asked: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    keys: set[str | None] = field(default_factory=set[str | None])
    cache: PrefixCache = field(default_factory=lambda: PrefixCache(8))

    async def get(self, request: web.Request) -> web.Response:
        answer = self.routes.get(request.path)
        if isinstance(answer, str):
            return web.Response(text=answer)
        return web.Response(status=404) if answer is None else web.json_response(answer)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        self.keys.add(request.headers.get("Authorization"))
        self.now_s += 0.25 * self.cache.new_tokens(body["prompt"]) + 0.5 * body["max_tokens"]
        if not body["stream"]:
            return web.json_response({"choices": [{"text": ""}]})
        pieces = 'data: {"choices": [{"text": ""}]}\n\n' * body["max_tokens"]
        return web.Response(text=f"{pieces}data: [DONE]\n\n", content_type="text/event-stream")


@asynccontextmanager
async def served(fake: FakeEngine) -> AsyncGenerator[str]:
    application = web.Application()
    application.router.add_post("/v1/completions", fake.complete)
    application.router.add_get("/{route:.*}", fake.get)
    async with TestServer(application) as server:
        yield str(server.make_url("/v1"))


async def test_a_vllm_is_probed_with_token_ids_over_http():
    fake = FakeEngine(vllm_routes())
    settings = ProbeSettings(decode_tokens=16, prefill_sizes=3, repeats=1)
    async with served(fake) as url, open_engine(url, api_key="secret", now_s=lambda: fake.now_s) as engine:
        found = await calibrate_engine(engine, settings)
    assert (found.name, found.kv_tokens, found.block_tokens) == ("tiny", 699 * 8, 8)
    assert (found.chunk_tokens, found.concurrency) == (512, 1)
    assert found.prefill_tokens_s == pytest.approx(4)
    assert found.itl_s == ((1, pytest.approx(0.5)),)
    assert found.on_release is OnRelease.IGNORE
    assert fake.keys == {"Bearer secret"}
    assert all(ask["ignore_eos"] and ask["model"] == "tiny" for ask in fake.asked)
    assert max(len(ask["prompt"]) for ask in fake.asked) == 95


async def test_each_token_of_a_stream_has_its_time():
    async with served(FakeEngine(vllm_routes())) as url, open_engine(url, model="tiny") as engine:
        times = await engine.stream([1, 2, 3], 5)
    assert len(times) == 5
    assert list(times) == sorted(times)


async def test_an_sglang_says_its_pool_in_its_server_info():
    info = {
        "max_total_num_tokens": 9_000,
        "page_size": 1,
        "chunked_prefill_size": 256,
        "max_running_requests": 7,
    }
    fake = FakeEngine({"/v1/models": MODELS, "/server_info": info})
    async with served(fake) as url, open_engine(url) as engine:
        limits = await engine.limits()
    assert limits == Limits("tiny", 96, Pool(9_000, 1, chunk_tokens=256, concurrency=7))


async def test_an_engine_that_serves_several_models_has_to_be_told_which():
    fake = FakeEngine(vllm_routes() | {"/v1/models": {"data": [{"id": "a"}, {"id": "b"}]}})
    async with served(fake) as url:
        with pytest.raises(ConfigError, match="model: the engine serves a, b; name one of them"):
            await calibrate(url)
        async with open_engine(url, model="b") as engine:
            assert (await engine.limits()).model == "b"


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        ({}, "no OpenAI-compatible engine"),
        ({"/v1/models": MODELS}, "neither vLLM's /metrics nor SGLang's /server_info"),
        ({"/v1/models": MODELS, "/server_info": {"version": "1"}}, "gives no max_total_num_tokens"),
        (
            {"/v1/models": MODELS, "/metrics": 'vllm:cache_config_info{block_size="32"} 1.0'},
            "gives no block_size and num_gpu_blocks",
        ),
    ],
)
async def test_an_engine_that_does_not_say_its_pool_is_refused(routes: dict[str, Any], message: str):
    async with served(FakeEngine(routes)) as url:
        with pytest.raises(EngineError, match=message):
            await calibrate(url)


async def test_an_engine_that_is_not_there_is_named():
    async with served(FakeEngine({})) as url:
        pass
    with pytest.raises(EngineError, match="is the engine running"):
        await calibrate(url)
