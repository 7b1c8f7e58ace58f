"""What the SGLang adapter adds to a call over raw HTTP, with 64 concurrent calls to a server that waits."""

import json
import multiprocessing
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import aiohttp
import anyio
from aiohttp import web

from benchmarks.figure import Tell
from sostenuto.runtime.engines.folder import WeightFolders
from sostenuto.runtime.engines.sglang.engine import SGLangEngine
from sostenuto.runtime.engines.sglang.transports import Disk
from sostenuto.runtime.engines.wire import GenerateRequest
from sostenuto.types import EngineId

CONCURRENT, PROMPT_TOKENS, SAMPLED_TOKENS = 64, 512, 64
_ANSWER_S = 0.25
_SERVER = {
    "version": "0.5.23", "max_total_num_tokens": 1 << 20, "max_req_input_len": 8192,
    "internal_states": [{"effective_max_running_requests_per_dp": 256}], "startup_time": 1,
    "enable_session_radix_cache": True, "enable_priority_scheduling": True,
}  # fmt: skip


class _Round(NamedTuple):
    """A call's median duration, and processor time in this process for each."""

    median_s: float
    cpu_s: float


def measure_adapter(tell: Tell, *, quick: bool) -> None:
    """Calls of raw HTTP and of the adapter in turns."""
    anyio.run(_measure, tell, 4 if quick else 12)


async def _measure(tell: Tell, rounds: int) -> None:
    with socket.socket() as listener, tempfile.TemporaryDirectory() as folder:
        listener.bind(("127.0.0.1", 0))
        listener.listen(CONCURRENT)
        server = multiprocessing.get_context("spawn").Process(target=_serve, args=(listener,), daemon=True)
        server.start()
        try:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            await _compare(tell, rounds, url, _model(Path(folder)))
        finally:
            server.terminate()
            server.join()


async def _compare(tell: Tell, rounds: int, url: str, model: Path) -> None:
    transport = Disk(WeightFolders(model / "weights", model))
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        SGLangEngine(EngineId("e0"), url, model=model, transport=transport) as engine,
        aiohttp.ClientSession(connector=connector) as session,
    ):
        await engine.capabilities()
        raw: list[_Round] = []
        ours: list[_Round] = []
        for number in range(-1, rounds):
            plain = await _round(lambda request: _raw(session, url, request), number)
            adapted = await _round(lambda request: _adapted(engine, request), number)
            if number >= 0:  # the first one opens the connections
                raw.append(plain)
                ours.append(adapted)
    both = list(zip(raw, ours, strict=True))
    added_s = median(b.median_s - a.median_s for a, b in both)
    added_cpu_s = median(b.cpu_s - a.cpu_s for a, b in both)
    tell("sglang_adapter_added_p50_64_concurrent", added_s * 1e3, "ms", "<= 1")
    tell("sglang_adapter_added_cpu_64_concurrent", added_cpu_s * 1e3, "ms", "<= 1")
    tell("sglang_raw_http_cpu_64_concurrent", median(one.cpu_s for one in raw) * 1e3, "ms")


async def _round(call: Callable[[GenerateRequest], Awaitable[None]], number: int) -> _Round:
    """`CONCURRENT` calls that overlap."""
    took: list[float] = []

    async def timed(i: int) -> None:
        # They come over the time of one answer, as requests do: at once they would measure a queue.
        await anyio.sleep(_ANSWER_S * i / CONCURRENT)
        request = GenerateRequest(
            request_id=f"r{number}-{i}", program_id=f"p{i}", token_ids=list(range(PROMPT_TOKENS)),
            max_new_tokens=SAMPLED_TOKENS,
        )  # fmt: skip
        began_s = time.perf_counter()
        await call(request)
        took.append(time.perf_counter() - began_s)

    began_s = time.process_time()
    async with anyio.create_task_group() as group:
        for i in range(CONCURRENT):
            group.start_soon(timed, i)
    return _Round(median(took), (time.process_time() - began_s) / CONCURRENT)


async def _adapted(engine: SGLangEngine, request: GenerateRequest) -> None:
    assert len((await engine.generate(request)).token_ids) == SAMPLED_TOKENS


async def _raw(session: aiohttp.ClientSession, url: str, request: GenerateRequest) -> None:
    """The same body, and its answer as JSON."""
    body = {
        "rid": request.request_id, "input_ids": request.token_ids, "return_logprob": True, "stream": False,
        "sampling_params": {"max_new_tokens": SAMPLED_TOKENS, "temperature": 1.0, "ignore_eos": True},
    }  # fmt: skip
    async with session.post(f"{url}/generate", json=body) as response:
        assert len((await response.json())["output_ids"]) == SAMPLED_TOKENS


def _model(folder: Path) -> Path:
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 32_000}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _serve(listener: socket.socket) -> None:
    """A server that answers every request after the same time, in a process of its own."""
    app = web.Application(client_max_size=64 << 20)
    said: dict[str, Any] = {"model_path": "m", "weight_version": "0.0", "is_generation": True}
    app.router.add_get("/model_info", _always(said))
    app.router.add_get("/server_info", _always(_SERVER))
    app.router.add_get("/ready", _always({}))
    app.router.add_post("/close_session", _always({}))
    app.router.add_post("/generate", _generate)
    web.run_app(app, sock=listener, print=None, access_log=None)


def _always(content: dict[str, Any]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(_request: web.Request) -> web.Response:
        return web.json_response(content)

    return answer


async def _generate(request: web.Request) -> web.Response:
    body = await request.json()
    tokens = list(range(body["sampling_params"]["max_new_tokens"]))
    if len(tokens) > 1:
        await anyio.sleep(_ANSWER_S)
    meta = {
        "id": body["rid"], "finish_reason": {"type": "length", "length": len(tokens)},
        "prompt_tokens": len(body["input_ids"]), "cached_tokens": 0,
        "weight_versions": [{"version": "0.0", "start": 0, "end": len(tokens)}],
        "output_token_logprobs": [[-1.0, token, None] for token in tokens],
    }  # fmt: skip
    return web.json_response({"output_ids": tokens, "meta_info": meta})


if __name__ == "__main__":
    from benchmarks.telling import Telling

    tell = Telling(None)
    measure_adapter(tell, quick=True)
    tell.end()
