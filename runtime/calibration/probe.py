"""The engine that is probed, over its OpenAI-compatible HTTP routes."""

import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import aiohttp
import anyio

from sostenuto.errors import EngineError
from sostenuto.runtime.calibration.limits import Answer, Limits, Pool, served_model, sglang_pool, vllm_pool


class Probed(Protocol):
    """An engine as calibration sees it.  Requests may run beside each other."""

    async def limits(self) -> Limits: ...

    async def generate(self, token_ids: Sequence[int], output_tokens: int) -> float:
        """Seconds from sending the request to its whole answer."""
        ...

    async def stream(self, token_ids: Sequence[int], output_tokens: int) -> Sequence[float]:
        """Seconds from sending the request to each token of the answer."""
        ...


@asynccontextmanager
async def open_engine(
    url: str,
    *,
    model: str | None = None,
    api_key: str | None = None,
    now_s: Callable[[], float] = anyio.current_time,
) -> AsyncGenerator["HttpEngine"]:
    """Speak to the engine at `url`, with or without a trailing `/v1`."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=None)
    # A connection that idles while a long request runs may be closed by the engine as it is used again.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:
        yield HttpEngine(session, url.rstrip("/").removesuffix("/v1"), model, now_s)


class HttpEngine:
    """Use `open_engine`."""

    def __init__(
        self, session: aiohttp.ClientSession, root: str, model: str | None, now_s: Callable[[], float]
    ) -> None:
        self._session = session
        self._root = root
        self._model = model
        self._now_s = now_s

    async def limits(self) -> Limits:
        models = await self._json("/v1/models")
        if models is None:
            raise EngineError(f"{self._root}: no OpenAI-compatible engine answers there")
        served = served_model(models, self._model)
        self._model = served["id"]
        pool = await self._pool()
        return Limits(served["id"], served.get("max_model_len") or pool.kv_tokens, pool)

    async def _pool(self) -> Pool:
        info = await self._json("/server_info?config_format=json")
        pool = vllm_pool(await self._text("/metrics") or "", info)
        if pool is None and info is None:
            raise EngineError(f"{self._root}: neither vLLM's /metrics nor SGLang's /server_info answers")
        return pool or sglang_pool(info or {})

    async def generate(self, token_ids: Sequence[int], output_tokens: int) -> float:
        begin_s = self._now_s()
        async with self._completion(token_ids, output_tokens, stream=False) as answer:
            await answer.read()
        return self._now_s() - begin_s

    async def stream(self, token_ids: Sequence[int], output_tokens: int) -> Sequence[float]:
        begin_s = self._now_s()
        async with self._completion(token_ids, output_tokens, stream=True) as answer:
            return [self._now_s() - begin_s async for line in answer.content if line.startswith(b"data: {")]

    @asynccontextmanager
    async def _completion(
        self, token_ids: Sequence[int], output_tokens: int, *, stream: bool
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        body = {
            "model": self._model, "prompt": list(token_ids), "max_tokens": output_tokens,
            "ignore_eos": True, "temperature": 0, "stream": stream,
        }  # fmt: skip
        try:
            async with self._session.post(f"{self._root}/v1/completions", json=body) as answer:
                if answer.status != 200:
                    raise EngineError(f"{self._root}/v1/completions: {answer.status} {await answer.text()}")
                yield answer
        except aiohttp.ClientError as exc:
            raise self._unreachable(exc) from exc

    async def _json(self, route: str) -> Answer | None:
        text = await self._text(route)
        return None if text is None else json.loads(text)

    async def _text(self, route: str) -> str | None:
        """None when the engine has no such route."""
        try:
            async with self._session.get(f"{self._root}{route}") as answer:
                if answer.status == 404:
                    return None
                if answer.status != 200:
                    raise EngineError(f"{self._root}{route}: {answer.status} {await answer.text()}")
                return await answer.text()
        except aiohttp.ClientError as exc:
            raise self._unreachable(exc) from exc

    def _unreachable(self, exc: aiohttp.ClientError) -> EngineError:
        return EngineError(f"{self._root}: {type(exc).__name__}: {exc}; is the engine running?")
