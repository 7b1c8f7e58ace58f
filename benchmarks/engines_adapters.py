"""What an adapter adds to a call over raw HTTP, with 64 concurrent calls to a server that computes nothing.

The server is a process of its own (`engines_stand_in`); the raw client sends the body that the adapter
sent, and reads the answer as JSON.

- "added p50": 64 calls overlap over the time of an answer, as those of a batch do, every other one of the
  adapter, so that both meet what else the machine does.
- "added a call": the server answers at once and 64 callers wait for nothing else, so the time a call is
  what a call costs in all, client and server.  Rounds of raw HTTP and of the adapter take turns.
"""

import json
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import aiohttp
import anyio

from benchmarks.engines_stand_in import VOCABULARY
from benchmarks.figure import Tell
from sostenuto.runtime.engines.folder import WeightFolders
from sostenuto.runtime.engines.protocol import Engine
from sostenuto.runtime.engines.sglang.engine import SGLangEngine
from sostenuto.runtime.engines.sglang.transports import Disk as SGLangDisk
from sostenuto.runtime.engines.vllm.engine import VllmEngine
from sostenuto.runtime.engines.vllm.transports import Disk as VllmDisk
from sostenuto.runtime.engines.wire import GenerateRequest
from sostenuto.types import EngineId

CONCURRENT, PROMPT_TOKENS, SAMPLED_TOKENS = 64, 512, 64
_ANSWER_S = 0.25
_CALLS = 4
_READY_S = 60.0
_ROUTES = {"sglang": "/generate", "vllm": "/inference/v1/generate"}

Call = Callable[[str], Awaitable[None]]


class Standing(NamedTuple):
    """A server that stands in, and two ways to call it."""

    url: str
    raw: Call
    ours: Call


class _Round(NamedTuple):
    """Seconds a call: of the clock, and of the processor in this process."""

    each_s: float
    cpu_s: float


def measure_adapters(tell: Tell, *, quick: bool) -> None:
    """Rounds of raw HTTP and of the adapter in turns."""
    for kind in _ROUTES:
        anyio.run(_measure, tell, kind, 4 if quick else 20)


async def _measure(tell: Tell, kind: str, rounds: int) -> None:
    name = f"{kind}_adapter"
    async with standing(kind, _ANSWER_S) as stand:
        raw, ours = await _overlapping(stand, rounds)
    tell(f"{name}_added_p50_64_concurrent", (median(ours) - median(raw)) * 1e3, "ms", "<= 1")
    async with standing(kind, 0.0) as stand:
        both = await _in_turns(stand, rounds)
    tell(f"{name}_added_a_call_64_callers", median(b.each_s - a.each_s for a, b in both) * 1e3, "ms", "<= 1")
    tell(f"{name}_time_over_raw_http_64_callers", median(b.each_s / a.each_s for a, b in both), "ratio")
    tell(f"{name}_added_cpu_64_callers", median(b.cpu_s - a.cpu_s for a, b in both) * 1e3, "ms", "<= 1")
    tell(f"{name}_raw_http_cpu_64_callers", median(a.cpu_s for a, _ in both) * 1e3, "ms")


async def _overlapping(stand: Standing, rounds: int) -> tuple[list[float], list[float]]:
    """How long calls took: raw ones, and the adapter's.

    `CONCURRENT` calls come over the time of one answer, as requests do: at once they would measure a queue.
    The first round opens the connections.
    """
    raw: list[float] = []
    ours: list[float] = []

    async def timed(number: int, i: int) -> None:
        await anyio.sleep(_ANSWER_S * i / CONCURRENT)
        call, took = (stand.ours, ours) if (number + i) % 2 else (stand.raw, raw)
        began_s = time.perf_counter()
        await call(f"{number}-{i}")
        took.append(time.perf_counter() - began_s)

    for number in range(rounds + 1):
        async with anyio.create_task_group() as group:
            for i in range(CONCURRENT):
                group.start_soon(timed, number, i)
        if number == 0:
            raw.clear()
            ours.clear()
    return raw, ours


async def _in_turns(stand: Standing, rounds: int) -> list[tuple[_Round, _Round]]:
    """Pairs of rounds, raw and ours; which one goes first changes.  The first pair opens the connections."""
    pairs: list[tuple[_Round, _Round]] = []
    for number in range(rounds + 1):
        if number % 2:
            adapted = await _saturating(stand.ours, f"o{number}")
            plain = await _saturating(stand.raw, f"r{number}")
        else:
            plain = await _saturating(stand.raw, f"r{number}")
            adapted = await _saturating(stand.ours, f"o{number}")
        pairs.append((plain, adapted))
    return pairs[1:]


async def _saturating(call: Call, name: str) -> _Round:
    """`CONCURRENT` callers, each with calls one after the other."""

    async def caller(i: int) -> None:
        for number in range(_CALLS):
            await call(f"{name}-{i}-{number}")

    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    async with anyio.create_task_group() as group:
        for i in range(CONCURRENT):
            group.start_soon(caller, i)
    cpu_s, all_s = time.process_time() - began_cpu_s, time.perf_counter() - began_s
    return _Round(all_s / (CONCURRENT * _CALLS), cpu_s / (CONCURRENT * _CALLS))


@asynccontextmanager
async def standing(kind: str, answer_s: float) -> AsyncGenerator[Standing]:
    """`kind` is sglang or vllm; the server answers after `answer_s`."""
    with tempfile.TemporaryDirectory(prefix="sostenuto-adapters-") as folder:
        model = _model(Path(folder))
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            _server(kind, answer_s) as url,
            _engine(kind, url, model) as engine,
            aiohttp.ClientSession(connector=connector) as session,
        ):
            await engine.capabilities()

            async def ours(name: str) -> None:
                reply = await engine.generate(_request(name))
                assert len(reply.token_ids) == SAMPLED_TOKENS

            await ours("first")
            async with session.get(f"{url}/asked") as answer:
                body = await answer.json()
            yield Standing(url, _raw(session, url + _ROUTES[kind], body), ours)


def _raw(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Call:
    """The same body under another name, and its answer as JSON."""
    id_field = "rid" if "rid" in body else "request_id"

    async def call(name: str) -> None:
        async with session.post(url, json=body | {id_field: name}) as response:
            assert response.status == 200
            content = await response.read()
        if content.startswith(b"data:"):
            lines = [line[5:].strip() for line in content.split(b"\n") if line.startswith(b"data:")]
            events = [json.loads(line) for line in lines if line != b"[DONE]"]
            told = [choice["token_ids"] for event in events for choice in event["choices"]]
            assert sum(map(len, told)) == SAMPLED_TOKENS
        else:
            assert len(json.loads(content)["output_ids"]) == SAMPLED_TOKENS

    return call


def _request(name: str) -> GenerateRequest:
    return GenerateRequest(
        request_id=name, program_id=f"p{name}", token_ids=list(range(PROMPT_TOKENS)),
        max_new_tokens=SAMPLED_TOKENS,
    )  # fmt: skip


@asynccontextmanager
async def _engine(kind: str, url: str, model: Path) -> AsyncGenerator[Engine]:
    weights, name = model / "weights", EngineId("e0")
    if kind == "sglang":
        disk = SGLangDisk(WeightFolders(weights, model))
        async with SGLangEngine(name, url, model=model, transport=disk) as engine:
            yield engine
    else:
        async with VllmEngine(name, url, model=model, transport=VllmDisk(weights, model)) as engine:
            yield engine


def _model(folder: Path) -> Path:
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": VOCABULARY}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@asynccontextmanager
async def _server(kind: str, answer_s: float) -> AsyncGenerator[str]:
    """Its address."""
    command = [sys.executable, "-m", "benchmarks.engines_stand_in", kind, str(answer_s)]
    root = Path(__file__).parent.parent
    async with await anyio.open_process(command, stderr=None, cwd=root) as process:
        try:
            assert process.stdout is not None
            with anyio.fail_after(_READY_S):
                said = await process.stdout.receive()
            yield said.decode().strip()
        finally:
            process.terminate()
