"""A model served from engines elsewhere, and changed meanwhile: the fake servers, with a real runtime."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
import safetensors.numpy

from elsewhere import LIMITS, Elsewhere, build_model, sglang, vllm, with_other_weights
from gateways import Json
from sostenuto.runtime.config import GatewaySettings, RuntimeConfig
from sostenuto.runtime.gateway.dialects.dialect import COMMENT
from sostenuto.runtime.jobs.serve import ServeJob
from sostenuto.runtime.runtime import Runtime


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_other_weights(model, tmp_path_factory.mktemp("models") / "other")


def tensors_in(folder: Path) -> dict[str, bytes]:
    library = cast("Any", safetensors.numpy)
    loaded = library.load_file(folder / "model.safetensors")
    return {name: tensor.tobytes() for name, tensor in loaded.items()}


@dataclass(frozen=True)
class Served:
    engine: Elsewhere
    runtime: Runtime
    url: str
    http: aiohttp.ClientSession

    async def get(self, path: str) -> Json:
        async with self.http.get(self.url + path) as response:
            return await response.json()

    async def post(self, path: str, body: Json | None = None) -> tuple[Json, str]:
        """The answer, and the version that sampled it where something was."""
        async with self.http.post(self.url + path, json=body) as response:
            told = await response.json()
            assert response.status == 200, told
            return told, response.headers.get("X-Sostenuto-Version", "")


@asynccontextmanager
async def served(model: Path, tmp_path: Path) -> AsyncGenerator[Served]:
    async with (
        vllm(model) as engine,
        Runtime(
            RuntimeConfig(
                directory=tmp_path, engines=(engine.entry(),), gateway=GatewaySettings(keep_alive_s=0.3)
            )
        ) as runtime,
        runtime.serve(ServeJob(model=model, limits=LIMITS)) as gateway,
        aiohttp.ClientSession() as http,
    ):
        yield Served(engine, runtime, gateway.url, http)


async def test_weights_of_a_folder_reach_the_engines_and_those_that_join_later(
    tmp_path: Path, model: Path, other: Path
):
    asked = {"prompt": [40, 41, 42], "max_tokens": 4}
    async with served(model, tmp_path) as front, sglang(model) as worker:
        _, before = await front.post("/v1/completions", asked)
        told, _ = await front.post("/update_weights", {"weight_dir": str(other)})
        assert told["weight_version"] == front.engine.label != before
        assert front.engine.weights == front.engine.weights_in(other)
        _, after = await front.post("/v1/completions", asked)
        assert after == told["weight_version"]
        await front.post(f"/add_worker?url={worker.url}")
        assert worker.url in (await front.get("/list_workers"))["urls"]
        assert (await front.get("/get_world_size"))["world_size"] == 2
        (given,) = (tmp_path / "weights").glob(f"sglang-*/weights-{after}")
        assert (worker.label, worker.weights) == (after, worker.weights_in(given))
        assert tensors_in(given) == tensors_in(other)
        await front.post(f"/remove_worker?url={front.engine.url}")
        sampled = worker.samples
        _, elsewhere = await front.post("/inference/v1/generate", {"token_ids": [40, 41, 42, 43]})
        assert (elsewhere, worker.samples) == (after, sampled + 1)
    assert not (tmp_path / "published").exists()


async def test_engines_stand_still_between_a_pause_and_what_ends_it(tmp_path: Path, model: Path):
    async with served(model, tmp_path) as front:
        await front.post("/pause?mode=keep")
        async with front.http.post(
            front.url + "/v1/completions",
            json={"prompt": [40, 41], "max_tokens": 2, "stream": True},
        ) as waiting:
            assert await waiting.content.readany() == COMMENT
            await front.post("/resume")
            assert b"[DONE]" in await waiting.read()
