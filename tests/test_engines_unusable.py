"""Engines that a job names and cannot use: what is said of each, and that the others go on."""

import json
import shutil
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from elsewhere import build_model, evaluating, sglang, until, vllm, with_other_weights
from sostenuto.errors import ConfigError, EngineError
from sostenuto.runtime.config import EngineEntry, RuntimeConfig
from sostenuto.runtime.engines.reached import key_of
from sostenuto.runtime.runtime import JobCancelled, Runtime


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_other_weights(model, tmp_path_factory.mktemp("models") / "other")


@asynccontextmanager
async def saying(content: str) -> AsyncGenerator[str]:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=content)

    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", answer)
    async with TestServer(app, host="127.0.0.1") as server:
        yield str(server.make_url("")).rstrip("/")


@asynccontextmanager
async def unusable(other: Path, place: Path) -> AsyncGenerator[tuple[EngineEntry, ...]]:
    """Engines of both kinds that no job can use."""
    longer = shutil.copytree(other, place / "longer")
    config = json.loads((longer / "config.json").read_text())
    (longer / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 7}))
    (place / "key").write_text("wrong")
    async with AsyncExitStack() as stack:
        opened: list[EngineEntry] = []
        for serve, lock in ((vllm, "key"), (sglang, "api_key")):
            locked = await stack.enter_async_context(serve(other, **{lock: "right"}))
            kind = locked.kind
            opened.append(locked.entry(id=f"{kind}-locked", api_key_file=place / "key"))
            other_model = await stack.enter_async_context(serve(longer))
            opened.append(other_model.entry(id=f"{kind}-other-model"))
            for name, content in (("page", "<html>"), ("half", '{"version": '), ("nothing", "")):
                url = await stack.enter_async_context(saying(content))
                opened.append(EngineEntry.model_validate({"kind": kind, "url": url, "id": f"{kind}-{name}"}))
            url = f"http://127.0.0.1:{unused_port()}"
            opened.append(EngineEntry.model_validate({"kind": kind, "url": url, "id": f"{kind}-away"}))
        fixed = await stack.enter_async_context(vllm(other, dev_mode=False))
        opened.append(fixed.entry(id="vllm-fixed"))
        yield tuple(opened)


SAID = {
    "locked": "answered 401: Unauthorized; give the engine's API key",
    "other-model": "whose num_hidden_layers is 7, and that of",
    "page": "answered with HTML, not JSON; is this the engine's address?",
    "half": "is its version one that the adapter knows?",
    "nothing": "answered with nothing; look into the engine's log",
    "away": "is the engine running there?",
    "fixed": "it cannot do update; start it with VLLM_SERVER_DEV_MODE=1",
}


async def test_engines_that_cannot_be_used_are_named_with_call_and_remedy_and_the_fleet_goes_on(
    tmp_path: Path, model: Path, other: Path
):
    async with vllm(other) as good, unusable(other, tmp_path) as bad:
        config = RuntimeConfig(directory=tmp_path / "run", engines=(*bad, good.entry(id="good")))
        async with Runtime(config) as runtime:
            handle = await runtime.submit(evaluating(model, programs=400))
            job = handle.name
            views = await until(runtime, lambda _: good.samples > 20)
            handle.cancel()
            with pytest.raises(JobCancelled):
                await handle.result()
    assert views.pop(f"{job}-good").state == "serving"
    assert len(views) == len(bad)
    for entry in bad:
        view = views[f"{job}-{entry.id}"]
        assert view.url == entry.url
        assert f"engine {job}-{entry.id} ({entry.kind} at {entry.url})" in view.reason
        assert SAID[entry.id.removeprefix(f"{entry.kind}-")] in view.reason


async def test_a_job_does_not_begin_without_an_engine_and_gives_every_reason(
    tmp_path: Path, model: Path, other: Path
):
    async with (
        unusable(other, tmp_path) as bad,
        Runtime(RuntimeConfig(directory=tmp_path / "run", engines=bad)) as runtime,
    ):
        handle = await runtime.submit(evaluating(model))
        with pytest.raises(EngineError) as refused:
            await handle.result()
    for entry in bad:
        assert f"{entry.id} ({entry.kind} at {entry.url})" in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"api_key_env": "NO_SUCH_KEY"},
            "api_key_env: NO_SUCH_KEY is not set; set it to the key",
        ),
        (
            {"api_key_file": "/nowhere"},
            "api_key_file: /nowhere: .*No such file.*; name a text file",
        ),
        (
            {"api_key_file": "/dev/null"},
            "api_key_file: /dev/null is empty; write the key into it",
        ),
    ],
)
def test_a_key_that_is_not_there_is_an_error_of_the_configuration(fields: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=f"^engines: e: {said}"):
        key_of(EngineEntry.model_validate({"kind": "vllm", "id": "e", "url": "http://a:1", **fields}))


def test_a_key_comes_from_the_variable_or_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ENGINE_KEY", "a key")
    (tmp_path / "key").write_text("another\n")
    entry = EngineEntry(kind="vllm", id="e", url="http://a:1")
    assert key_of(entry) == ""
    assert key_of(entry.model_copy(update={"api_key_env": "ENGINE_KEY"})) == "a key"
    assert key_of(entry.model_copy(update={"api_key_file": tmp_path / "key"})) == "another"
