"""A real engine process, over its socket."""

import json
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import anyio
import numpy as np
import psutil
import pytest

from engine_models import load, make_folder, prompt, publish, reference_logprobs
from sostenuto.errors import EngineError, VersionRefused
from sostenuto.runtime.engines.client import EngineClient, launch_embedded
from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.runtime.engines.embedded.settings import EmbeddedSettings
from sostenuto.runtime.engines.protocol import Engine
from sostenuto.runtime.engines.wire import (
    CommitRequest,
    FinishReason,
    GenerateRequest,
    PauseMode,
    Sampling,
    ScoreRequest,
)
from sostenuto.types import EngineId, ProgramId

NAME = EngineId("e0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


def settings_for(folder: Path, place: Path, kv_tokens: int = 4096, lower_tokens: int = 0) -> EmbeddedSettings:
    return EmbeddedSettings(
        model=folder,
        socket=place / "e.sock",
        kv_tokens=kv_tokens,
        concurrency=8,
        lower_tokens=lower_tokens,
        lower_folder=place / "lower",
    )


@pytest.fixture
async def engine(folder: Path, tmp_path: Path) -> AsyncIterator[EngineClient]:
    async with launch_embedded(settings_for(folder, tmp_path), engine_id=NAME) as client:
        yield client


def request(name: str, token_ids: list[int], **options: object) -> GenerateRequest:
    fields = {"request_id": name, "program_id": name, "token_ids": token_ids, "max_new_tokens": 8, **options}
    return GenerateRequest.model_validate(fields)


async def until(engine: EngineClient, field: str, value: int) -> None:
    """Poll the load until it says so; the test's own timeout ends a wait that has no end."""
    while getattr(await engine.load(), field) != value:  # noqa: ASYNC110 - the change is in another process
        await anyio.sleep(0.01)


async def test_an_engine_serves_the_whole_protocol(folder: Path, tmp_path: Path):
    taps: list[tuple[str, bytes, bytes]] = []

    def tap(name: str, sent: bytes, received: bytes) -> None:
        taps.append((name, sent, received))

    settings = settings_for(folder, tmp_path)
    module = load(folder).module
    async with launch_embedded(settings, engine_id=NAME, tap=tap) as client:
        engine: Engine = client
        assert stat.S_IMODE(settings.socket.stat().st_mode) == 0o600
        capabilities = await engine.capabilities()
        assert (capabilities.version, capabilities.kv_tokens) == ("0.0", 4096)
        assert (capabilities.vocabulary_size, capabilities.tokenizer_size) == (80, 65)
        reply = await engine.generate(request("a", prompt(20)))
        expected = reference_logprobs(module, prompt(20) + reply.token_ids, 20)
        np.testing.assert_allclose(reply.logprobs, expected, rtol=2e-6, atol=1e-5)
        name, sent, received = taps[0]
        assert name == "a"
        assert json.loads(sent)["token_ids"] == prompt(20)
        assert json.loads(received)["token_ids"] == reply.token_ids
        score = await engine.score(ScoreRequest(token_ids=prompt(20) + reply.token_ids, start=20))
        np.testing.assert_allclose(score.logprobs, reply.logprobs, atol=1e-4)
        assert (await engine.load()).held_programs == 1
        await engine.release(ProgramId("a"))
        assert (await engine.load()).used_kv_tokens == 0
        await _update(engine, tmp_path)
    assert not settings.socket.exists()


async def _update(engine: Engine, place: Path) -> None:
    new = load(make_folder(place / "new", seed=5)).module
    manifest = publish(place, new, "0.1")
    torn = manifest.model_copy(update={"tensors": manifest.tensors[1:]})
    with pytest.raises(EngineError, match=r"'model\.embed_tokens\.weight': is missing"):
        await engine.prepare_update(torn)
    await engine.prepare_update(manifest)
    with pytest.raises(VersionRefused, match=r"409.*0.1 is wanted, 0.0 is served"):
        await engine.generate(request("b", prompt(9), min_version="0.1"))
    assert (await engine.commit_update(CommitRequest(version="0.1"))).pause_s < 5
    reply = await engine.generate(request("c", prompt(9), min_version="0.1"))
    expected = reference_logprobs(new, prompt(9) + reply.token_ids, 9)
    np.testing.assert_allclose(reply.logprobs, expected, rtol=2e-6, atol=1e-5)
    await engine.flush()
    await engine.abandon_update("0.2")
    load_ = await engine.load()
    assert (load_.updates, load_.used_kv_tokens) == (1, 0)


async def test_requests_at_once_equal_requests_one_by_one(engine: EngineClient):
    requests = [request(str(i), prompt(10 + i), sampling=Sampling(seed=i), hold=False) for i in range(16)]
    together: dict[int, list[int]] = {}

    async def ask(i: int) -> None:
        together[i] = (await engine.generate(requests[i])).token_ids

    async with anyio.create_task_group() as group:
        for i in range(16):
            group.start_soon(ask, i)
    for i in (0, 7, 15):
        assert (await engine.generate(requests[i])).token_ids == together[i]


async def test_abort_answers_the_request_with_its_partial_tokens(engine: EngineClient):
    async with anyio.create_task_group() as group:

        async def ask() -> None:
            reply = await engine.generate(request("long", prompt(9), max_new_tokens=500))
            assert reply.finish_reason is FinishReason.ABORT
            assert len(reply.token_ids) == len(reply.logprobs) < 500

        group.start_soon(ask)
        await until(engine, "running", 1)
        await engine.abort("lon")
        assert (await engine.load()).running == 1
        await engine.abort("long")


async def test_an_engine_is_paused_and_offloads_over_its_socket(folder: Path, tmp_path: Path):
    settings = settings_for(folder, tmp_path, lower_tokens=256)
    async with launch_embedded(settings, engine_id=NAME) as client, anyio.create_task_group() as group:
        engine: Engine = client
        assert (await engine.capabilities()).lower_tokens == 256
        first = await engine.generate(request("a", prompt(50)))
        await engine.offload(ProgramId("a"))
        await until(client, "lower_programs", 1)
        assert (await engine.load()).held_programs == 0
        await engine.pause(PauseMode.KEEP)
        context = [*prompt(50), *first.token_ids, 3]

        async def go_on() -> None:
            assert (await engine.generate(request("b", context, program_id="a"))).cached_tokens == 57

        group.start_soon(go_on)
        await until(client, "waiting", 1)
        await engine.restore(ProgramId("a"))
        await until(client, "held_programs", 1)
        await engine.resume()
        await until(client, "running", 0)
    assert list((tmp_path / "lower").iterdir()) == []


async def test_a_pause_that_lets_requests_finish_is_answered_after_the_last(engine: EngineClient):
    ended: list[str] = []
    async with anyio.create_task_group() as group:

        async def ask() -> None:
            await engine.generate(request("long", prompt(9), max_new_tokens=200))
            ended.append("long")

        group.start_soon(ask)
        await until(engine, "running", 1)
        await engine.pause(PauseMode.FINISH)
        assert (await engine.load()).running == 0
    assert ended == ["long"]


async def test_a_cancelled_generate_is_aborted_in_the_engine_and_holds_nothing(engine: EngineClient):
    async with anyio.create_task_group() as group:
        group.start_soon(engine.generate, request("long", prompt(9), max_new_tokens=500))
        await until(engine, "running", 1)
        group.cancel_scope.cancel()
    await until(engine, "running", 0)
    assert (await engine.load()).used_kv_tokens == 0
    assert (await engine.load()).generated_tokens < 500


async def test_malformed_requests_name_the_field(engine: EngineClient, tmp_path: Path):
    connector = aiohttp.UnixConnector(path=str(tmp_path / "e.sock"))
    async with aiohttp.ClientSession(connector=connector) as session:
        for body, field in [
            ("{", "body: "),
            (
                '{"request_id": "a", "program_id": "a", "token_ids": ["x"], "max_new_tokens": 1}',
                "token_ids.0: ",
            ),
            (
                '{"request_id": "a", "program_id": "a", "token_ids": [1], "max_new_tokens": 0}',
                "max_new_tokens: ",
            ),
            ('{"request_id": "a", "program_id": "a", "token_ids": [1], "max_new_tokens": 1, "x": 1}', "x: "),
        ]:
            async with session.post("http://engine/generate", data=body) as response:
                refusal = await response.json()
                assert response.status == 400
                assert refusal["message"].startswith(field)
                assert refusal["remedy"]
    assert (await engine.load()).running == 0


async def test_an_engine_that_dies_is_an_error_with_its_last_words(engine: EngineClient):
    module = "sostenuto.runtime.engines.embedded"
    (child,) = (child for child in psutil.Process().children() if module in child.cmdline())
    async with anyio.create_task_group() as group:

        async def ask() -> None:
            with pytest.raises(EngineError, match="engine e0: generate: "):
                await engine.generate(request("long", prompt(9), max_new_tokens=500))

        group.start_soon(ask)
        await until(engine, "running", 1)
        child.send_signal(signal.SIGKILL)
    with pytest.raises(EngineError, match="engine e0: load: its process ended with status -9"):
        await engine.load()


def test_an_engine_ends_with_a_parent_that_is_killed(folder: Path, tmp_path: Path):
    script = (
        "import anyio, sys\n"
        "from pathlib import Path\n"
        "from sostenuto.runtime.engines.client import launch_embedded\n"
        "from sostenuto.runtime.engines.embedded.settings import EmbeddedSettings\n"
        "async def main():\n"
        f"    place = {str(tmp_path / 'e.sock')!r}\n"
        f"    settings = EmbeddedSettings(Path({str(folder)!r}), Path(place), 1024, 2)\n"
        "    async with launch_embedded(settings, engine_id='e0'):\n"
        "        assert 'torch' not in sys.modules\n"
        "        print('up', flush=True)\n"
        "        await anyio.sleep_forever()\n"
        "anyio.run(main)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"up\n"
        (child,) = psutil.Process(parent.pid).children()
        parent.kill()
        child.wait(timeout=60)
    assert not child.is_running()


async def refused(settings: EmbeddedSettings, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        async with launch_embedded(settings, engine_id=NAME):
            raise AssertionError("it started")


async def test_a_socket_that_cannot_be_served_on_is_refused(folder: Path, tmp_path: Path):
    taken = tmp_path / "taken"
    taken.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(taken / "e.sock"))
        listener.listen()
        await refused(settings_for(folder, taken), "is in use by a process that listens; end that process")
    deep = tmp_path / ("x" * 90)
    await refused(settings_for(folder, deep), "longer than 107 bytes; use a shorter")


async def test_what_a_dead_engine_left_is_replaced_and_too_much_kv_is_refused(folder: Path, tmp_path: Path):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "e.sock"))
    settings = settings_for(folder, tmp_path, kv_tokens=1 << 40)
    await refused(settings, r"needs \d+ MiB .*; at most --kv-tokens \d+ fits")


def test_a_folder_that_is_no_model_is_refused_by_what_it_lacks(folder: Path, tmp_path: Path):
    def broken(name: str, without: str = "", **changes: object) -> Path:
        copy = tmp_path / name
        copy.mkdir()
        for file in folder.iterdir():
            if file.name != without:
                (copy / file.name).write_bytes(file.read_bytes())
        config = json.loads((folder / "config.json").read_text()) | changes
        if without != "config.json":
            (copy / "config.json").write_text(json.dumps(config))
        return copy

    torn = broken("h")
    (torn / "model.safetensors").write_bytes(b"torn")
    for message, place in {
        "weights do not fit the": torn,
        "no tokenizer.json": broken("a", without="tokenizer.json"),
        "no config.json": broken("b", without="config.json"),
        r"no \*.safetensors": broken("c", without="model.safetensors"),
        "config.json is not understood": broken("d", model_type="never_heard_of"),
        "weights do not fit": broken("e", hidden_size=64),
        "weights lack": broken("f", num_hidden_layers=3),
        "cannot be served": broken("g", model_type="t5"),
    }.items():
        with pytest.raises(Refusal, match=message):
            load(place)
