"""What a call through the gateway costs over the same call to the engine, and what idle programs cost.

Client, gateway and engine are processes of their own on the same cores.  The engine computes nothing: what
is measured is everything around it.
"""

import statistics
import time
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp
import anyio

from benchmarks.figure import Tell
from benchmarks.gateway_stand import Stand, standing

_PROMPT = "Look at the shelf and tell what is there. " * 8
_TOKENS = 32
_STREAMS, _PACE = 64, 25.0
_IDLE = 5000

Call = Callable[[int], Coroutine[Any, Any, None]]


def measure_cost(tell: Tell, *, quick: bool) -> None:
    anyio.run(_measure, tell, quick)


async def _measure(tell: Tell, quick: bool) -> None:
    async with standing() as stand, _clients(stand) as (gateway, engine):
        direct, through = _calls(stand, gateway, engine)
        for call in (direct, through):
            await _times(call, 50)
        rounds = [(await _times(direct, 100), await _times(through, 100)) for _ in range(2 if quick else 10)]
        added = statistics.median(t - d for d, t in rounds)
        tell("a call that is not streamed, added to the engine's own, p50", added * 1e3, "ms", "<= 2")
        rate = await _rate(through, 200 if quick else 5000)
        tell("turns a second, not streamed, 64 at a time", rate, "1/s", ">= 1500")
        tell("the same to the engine itself", await _rate(direct, 200 if quick else 5000), "1/s")
        await _idle(tell, stand, gateway, 200 if quick else _IDLE)
    async with standing(token_s=1 / _PACE) as stand, _clients(stand) as (gateway, engine):
        count = 25 if quick else 250
        direct_s = await _together(lambda n: _stream_engine(engine, n, count), _STREAMS)
        through_s = await _together(lambda n: _stream_gateway(stand, gateway, n, count), _STREAMS)
        tell(f"{_STREAMS} streams at {_PACE:.0f} tokens a second, rate over the engine's own",
             direct_s / through_s, "ratio", ">= 0.9")  # fmt: skip


class _clients:  # noqa: N801 - a context manager, used as one
    """Sessions with gateway and engine."""

    def __init__(self, stand: Stand) -> None:
        self._gateway = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        self._engine = aiohttp.ClientSession(connector=aiohttp.UnixConnector(path=str(stand.socket), limit=0))

    async def __aenter__(self) -> tuple[aiohttp.ClientSession, aiohttp.ClientSession]:
        return self._gateway, self._engine

    async def __aexit__(self, *_: object) -> None:
        await self._gateway.close()
        await self._engine.close()


def _calls(stand: Stand, gateway: aiohttp.ClientSession, engine: aiohttp.ClientSession) -> tuple[Call, Call]:
    prompt = list(range(100))

    async def direct(number: int) -> None:
        body = _engine_body(f"d{number}", prompt, _TOKENS)
        async with engine.post("http://engine/generate", json=body) as response:
            assert (await response.json())["finish_reason"] == "stop"

    async def through(number: int) -> None:
        body = _chat_body(_TOKENS)
        headers = {"X-Program-Id": f"p{number}", "X-Program-Final": "true"}
        url = f"{stand.url}/v1/chat/completions"
        async with gateway.post(url, json=body, headers=headers) as response:
            assert (await response.json())["choices"][0]["finish_reason"] == "stop"

    return direct, through


def _chat_body(tokens: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": _PROMPT}], "max_tokens": tokens}


def _engine_body(name: str, prompt: list[int], tokens: int) -> dict[str, Any]:
    return {"request_id": name, "program_id": name, "token_ids": prompt, "max_new_tokens": tokens}


async def _times(call: Call, count: int) -> float:
    """Median seconds of calls one after the other."""
    taken: list[float] = []
    for number in range(count):
        began_s = time.perf_counter()
        await call(number)
        taken.append(time.perf_counter() - began_s)
    return statistics.median(taken)


async def _rate(call: Call, count: int) -> float:
    numbers = iter(range(count))

    async def work(_: int) -> None:
        for number in numbers:
            await call(number)

    return count / await _together(work, _STREAMS)


async def _together(call: Call, count: int) -> float:
    """Seconds until all are done."""
    began_s = time.perf_counter()
    async with anyio.create_task_group() as group:
        for number in range(count):
            group.start_soon(call, number)
    return time.perf_counter() - began_s


async def _stream_engine(engine: aiohttp.ClientSession, number: int, tokens: int) -> None:
    body = _engine_body(f"s{number}", list(range(100)), tokens)
    async with engine.post("http://engine/generate?stream=1", json=body) as response:
        lines = [line async for line in response.content]
    assert len(lines) == tokens + 1


async def _stream_gateway(stand: Stand, gateway: aiohttp.ClientSession, number: int, tokens: int) -> None:
    body = _chat_body(tokens) | {"stream": True}
    url = f"{stand.url}/p/s{number}/v1/chat/completions"
    async with gateway.post(url, json=body) as response:
        last = b""
        async for line in response.content:
            last = line if line.strip() else last
    assert last.strip() == b"data: [DONE]"


async def _idle(tell: Tell, stand: Stand, gateway: aiohttp.ClientSession, count: int) -> None:
    """Programs that have made a call and hold their KV."""
    before = stand.gateway.memory_info().rss
    numbers = iter(range(count))

    async def work(_: int) -> None:
        for number in numbers:
            url = f"{stand.url}/p/idle{number}/v1/chat/completions"
            async with gateway.post(url, json=_chat_body(_TOKENS)) as response:
                assert response.status == 200, await response.text()

    await _together(work, _STREAMS)
    grown = stand.gateway.memory_info().rss - before
    tell(f"memory of {count:,} idle programs", grown / 2**20, "MiB", "<= 300")
