"""Hostile requests, of many kinds, against a gateway in a process of its own.

It has to answer each with what is wrong, never with 5xx for input, go on serving, and not grow.
"""

import json
import random
import socket
from collections import Counter
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import anyio

from benchmarks.figure import Tell
from benchmarks.gateway_stand import Stand, standing

_COUNT = 100_000
_AT_ONCE = 32
_LARGE = 50 << 20
_LARGE_EVERY = 2000
_RAW_EVERY = 50
_PATHS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/inference/v1/generate", "/generate", "/p/x/v1/chat/completions", "/programs/release",
)  # fmt: skip
_TRICKS = (
    "/../etc/passwd", "/p/%00/v1/chat/completions", "/p/..%2f..%2f/v1/models", "//v1//chat//completions",
    "/v1/chat/completions/../../admin", "/p/" + "a" * 5000 + "/v1/models", "/v1/models?x=%ff%fe", "/%c0%ae",
    "/profiles/%2e%2e", "/programs",
)  # fmt: skip
_VALUES: list[Any] = json.loads(
    """[null, true, false, 0, -1, 1e308, -1e308, 9223372036854775808, -9223372036854775808, 0.1,
    10000000000000000000000000000000000000000, "", "NaN", "\\ud800", "\\u0000", [], {}, [[]], {"a": {}},
    ["a", 1, null], [null, null, null, null, null, null, null, null], {"role": "user"}, [{"role": 1}]]"""
)
_LONG = "a" * 10_000
_KEYS = (
    "model", "messages", "prompt", "input", "temperature", "top_p", "top_k", "n", "stop", "seed",
    "max_tokens", "tools", "tool_choice", "stream", "stream_options", "logprobs", "top_logprobs",
    "response_format", "user", "program_id", "extra_body", "nvext", "token_ids", "input_ids",
    "sampling_params", "system", "metadata", "previous_response_id", "echo", "suffix", "logit_bias",
    "thinking", "instructions", "text", "return_logprob",
)  # fmt: skip
_HEADERS = (
    "X-Program-Id", "X-Session-ID", "Authorization", "x-api-key", "Idempotency-Key", "X-Request-ID",
    "x-stainless-retry-count", "X-Parent-Session-ID", "X-Dynamo-Session-ID", "Content-Type",
)  # fmt: skip
_HEADER_VALUES = ("", "x", "a" * 300, "Bearer ", "Bearer so-none", "x, y", "é", "0", "-1", "text/plain")

Body = bytes


def measure_fuzz(tell: Tell, *, quick: bool) -> None:
    anyio.run(_measure, tell, 2000 if quick else _COUNT)


async def _measure(tell: Tell, count: int) -> None:
    statuses: Counter[int] = Counter()
    async with standing() as stand:
        timeout = aiohttp.ClientTimeout(total=60)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
            await _attack(stand, http, statuses, count // 10, seed=1)
            before = stand.gateway.memory_info().rss
            await _attack(stand, http, statuses, count - count // 10, seed=2)
            grown = stand.gateway.memory_info().rss - before
            good = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
            async with http.post(f"{stand.url}/v1/chat/completions", json=good) as response:
                serves = response.status == 200
    errors = sum(number for status, number in statuses.items() if status >= 500)
    tell(f"hostile requests answered, of {count:,}", sum(statuses.values()), "")
    tell("of them with a server error", errors, "", "<= 0")
    tell("the gateway serves afterwards", float(serves), "", ">= 1")
    tell("memory grown after the first tenth", grown / 2**20, "MiB", "<= 64")


async def _attack(
    stand: Stand, http: aiohttp.ClientSession, statuses: Counter[int], count: int, *, seed: int
) -> None:
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            drawn = random.Random(f"{seed}/{number}")
            if number % _RAW_EVERY == 0:
                statuses[await _raw(stand, drawn)] += 1
            else:
                statuses[await _send(stand, http, drawn, large=number % _LARGE_EVERY == 1)] += 1

    async with anyio.create_task_group() as group:
        for _ in range(_AT_ONCE):
            group.start_soon(work)


async def _send(stand: Stand, http: aiohttp.ClientSession, drawn: random.Random, *, large: bool) -> int:
    path = drawn.choice(_TRICKS) if drawn.random() < 0.1 else drawn.choice(_PATHS)
    body = _large(drawn) if large else drawn.choice(_BODIES)(drawn)
    headers = {"Content-Type": "application/json"} | _header(drawn)
    method = drawn.choice(("POST",) * 8 + ("GET", "DELETE"))
    try:
        async with http.request(method, stand.url + path, data=body, headers=headers) as response:
            if drawn.random() < 0.05:
                return response.status  # Half read: the connection is dropped.
            await response.read()
            return response.status
    except (aiohttp.ClientError, ValueError, TimeoutError):
        return 0


def _header(drawn: random.Random) -> dict[str, str]:
    if drawn.random() < 0.7:
        return {}
    return {drawn.choice(_HEADERS): drawn.choice(_HEADER_VALUES)}


def _object(drawn: random.Random) -> dict[str, Any]:
    """A request that is nearly good, with some wrong values."""
    body: dict[str, Any] = {
        "model": "default",
        "messages": [{"role": "user", "content": "Hello"}],
        "prompt": "Hello",
        "input": "Hello",
        "token_ids": [65, 66],
        "input_ids": [65, 66],
        "sampling_params": {"max_tokens": 4, "max_new_tokens": 4},
        "max_tokens": 4,
    }
    for _ in range(drawn.randrange(4)):
        body[drawn.choice(_KEYS)] = drawn.choice([*_VALUES, _LONG])
    return body


def _json(drawn: random.Random) -> Body:
    return json.dumps(_object(drawn)).encode()


def _deep(drawn: random.Random) -> Body:
    depth = drawn.choice((50, 1000, 100_000))
    opened, closed = drawn.choice(((b'{"a":', b"}"), (b"[", b"]")))
    return opened * depth + b"1" + closed * drawn.choice((0, depth))


def _bytes(drawn: random.Random) -> Body:
    whole = bytearray(_json(drawn))
    for _ in range(drawn.randrange(1, 8)):
        whole[drawn.randrange(len(whole))] = drawn.randrange(256)
    return bytes(whole)


def _cut(drawn: random.Random) -> Body:
    whole = _json(drawn)
    return whole[: drawn.randrange(len(whole))]


def _nested_values(drawn: random.Random) -> Body:
    body = _object(drawn)
    body["messages"] = [
        {"role": drawn.choice(("user", "assistant", "tool", "system", "x", 1)),
         "content": drawn.choice(_VALUES), "tool_calls": drawn.choice(_VALUES)}
        for _ in range(drawn.randrange(5))
    ]  # fmt: skip
    function = {"name": drawn.choice(_VALUES), "parameters": drawn.choice(_VALUES)}
    body["tools"] = [{"type": "function", "function": function}]
    return json.dumps(body).encode()


_BODIES: tuple[Callable[[random.Random], Body], ...] = (_json, _json, _deep, _bytes, _cut, _nested_values)


def _large(drawn: random.Random) -> Body:
    kinds = (
        lambda: json.dumps({"messages": [{"role": "user", "content": "a" * _LARGE}]}).encode(),
        lambda: b"x" * _LARGE,
        lambda: b"[" + b"1," * (_LARGE // 2) + b"1]",
    )
    return drawn.choice(kinds)()


async def _raw(stand: Stand, drawn: random.Random) -> int:
    """Bytes that are no whole request; the status of what is answered, 0 for nothing."""
    address = urlsplit(stand.url)
    parts = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"GET /\x00 HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: a\r\n b\r\nY\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Request-ID: a\rb\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    )
    with anyio.move_on_after(drawn.choice((0.05, 0.5))):
        try:
            stream = await anyio.connect_tcp(str(address.hostname), int(address.port or 0))
        except OSError:
            return 0
        async with stream:
            await stream.send(drawn.choice(parts))
            if drawn.random() < 0.5:
                stream.extra(anyio.abc.SocketAttribute.raw_socket).shutdown(socket.SHUT_WR)
            try:
                said = await stream.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                return 0
            return _status(said)
    return 0


def _status(said: bytes) -> int:
    words = said.split(b" ", 2)
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
