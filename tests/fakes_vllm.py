"""A fake vLLM on a real socket: the routes that the adapter uses, with their documented traps.

- A pause of `abort` or `wait` answers new requests with 503 (`refuses_when_paused`), or queues them.
- /reset_prefix_cache answers 200 and `success: false` while requests run.
- An aborted request ends with 200, the tokens that it has, and `finish_reason` abort.
- Log-probabilities are of the raw distribution unless `processed`.
- /reload_weights that fails has changed the weights; one that ignores the path answers 200.
- An empty list of ids aborts everything.
"""

import asyncio
import itertools
import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from aiohttp.test_utils import TestServer

from fakes_vllm_model import END, FakeCache, Floats, logprobs_after, vocabulary_of, weights_of

Body = dict[str, Any]

TOKENS, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
_METRICS = {
    "running": "num_requests_running", "waiting": "num_requests_waiting",
    "prompt": "prompt_tokens_total", "cached": "prompt_tokens_cached_total",
    "generated": "generation_tokens_total",
}  # fmt: skip


@dataclass(eq=False)
class Running:
    """One request."""

    id: str
    token_ids: list[int]
    salt: str
    sampling: Body
    priority: int
    cached: int = 0
    sampled: list[int] = field(default_factory=list[int])
    spans: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    is_aborted: bool = False
    recomputed: int = 0


@dataclass
class FakeVllm:
    folder: Path
    key: str = ""
    release: str = "0.32.0"
    context: int = 512
    blocks: int = 129
    most_logprobs: int = 20
    scale_out: bool = True
    dev_mode: bool = True
    processed: bool = True
    tells_cached: bool = True
    defaults: Body = field(default_factory=dict[str, Any])
    """Of the model's generation_config.json: what a request to the route of completions does not say."""
    takes_priorities: bool = True
    takes_grammars: bool = True
    refuses_when_paused: bool = True
    on_cpu: bool = False
    chunked: bool = True
    ignores_weights_path: bool = False
    keeps_label: bool = False
    step_s: float = 0.002
    started: float = 1.0
    version: str = "default"
    paused: str = ""
    weights: int = 0
    vocabulary: int = 0
    broken: dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]] = field(
        default_factory=dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]]
    )
    """Handlers in place of a route's own."""
    running: list[Running] = field(default_factory=list[Running])
    calls: list[str] = field(default_factory=list[str])
    bodies: list[Body] = field(default_factory=list[Body])
    cache: FakeCache = field(default_factory=FakeCache)
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("prompt", "cached", "generated"), 0)
    )

    def __post_init__(self) -> None:
        self.weights, self.vocabulary = weights_of(self.folder), vocabulary_of(self.folder)

    def start_again(self) -> None:
        """A new life with the weights it was started with."""
        self.weights, self.version, self.paused = weights_of(self.folder), "default", ""
        self.started += 1
        self.cache.held.clear()
        self.counts = dict.fromkeys(self.counts, 0)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._between])
        control = {
            "/pause": self.pause, "/resume": self.resume, "/abort_requests": self.abort,
            "/reset_prefix_cache": self.reset, "/collective_rpc": self.rpc,
            "/update_weight_version": self.label, "/weight_checker": self.checker,
            "/init_weight_transfer_engine": self.done, "/start_weight_update": self.done,
            "/update_weights": self.done, "/finish_weight_update": self.finish,
        }  # fmt: skip
        if self.dev_mode:
            for route, handler in control.items():
                app.router.add_post(route, handler)
            app.router.add_get("/is_paused", self.is_paused)
            app.router.add_get("/weight_info", self.weight_info)
            app.router.add_get("/server_info", self.server_info)
        app.router.add_get("/version", self.version_info)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_post(TOKENS, self.generate)
        app.router.add_post("/inference/v1/abort_requests", self.abort)
        app.router.add_post(COMPLETIONS, self.generate)
        return app

    @web.middleware
    async def _between(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        self.calls.append(request.path)
        guarded = request.path.startswith(("/v1", "/inference"))
        if guarded and self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if request.path.startswith("/inference") and not self.scale_out:
            return _refused(403, "Scale-out endpoints are disabled.")
        return await self.broken.get(request.path, handler)(request)

    async def version_info(self, _: web.Request) -> web.Response:
        return web.json_response({"version": self.release})

    async def models(self, _: web.Request) -> web.Response:
        entry = {"id": "fake", "root": str(self.folder), "max_model_len": self.context}
        return web.json_response({"object": "list", "data": [entry]})

    async def server_info(self, _: web.Request) -> web.Response:
        config = {
            "model_config": {"dtype": "torch.float32", "max_logprobs": self.most_logprobs},
            "scheduler_config": {
                "max_num_batched_tokens": 64,
                "max_num_seqs": 8,
                "enable_chunked_prefill": self.chunked,
            },
            "device_config": {"device": "cpu" if self.on_cpu else "cuda"},
            "parallel_config": {"world_size": 1},
        }
        return web.json_response({"vllm_config": config})

    async def metrics(self, _: web.Request) -> web.Response:
        now = {"running": len(self.running), "waiting": 0, **self.counts}
        used = sum(len(r.token_ids) + len(r.sampled) for r in self.running)
        usage = used / (self.blocks * self.cache.block)
        lines = [f'vllm:{name}{{engine="0"}} {now[key]}' for key, name in _METRICS.items()]
        info = f'block_size="{self.cache.block}",enable_prefix_caching="True",num_gpu_blocks="{self.blocks}"'
        lines += [
            f'vllm:kv_cache_usage_perc{{engine="0"}} {usage}',
            f"vllm:cache_config_info{{{info}}} 1.0",
            f"process_start_time_seconds {self.started}",
        ]
        return web.Response(text="\n".join([*lines, ""]))

    async def is_paused(self, _: web.Request) -> web.Response:
        return web.json_response({"is_paused": bool(self.paused)})

    async def weight_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def done(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        return web.json_response({"message": "done"})

    async def pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode", "abort")
        self.paused = mode
        if mode == "abort":
            for running in self.running:
                running.is_aborted = True
        while mode != "keep" and self.running:  # noqa: ASYNC110
            await asyncio.sleep(self.step_s)
        return web.json_response({"status": "paused"})

    async def resume(self, _: web.Request) -> web.Response:
        self.paused = ""
        return web.json_response({"status": "resumed"})

    async def abort(self, request: web.Request) -> web.Response:
        ids = (await request.json()).get("request_ids")
        for running in self.running:
            running.is_aborted = running.is_aborted or not ids or running.id in ids
        return web.json_response({"status": "aborted"})

    async def reset(self, request: web.Request) -> web.Response:
        if self.running and request.query.get("reset_running_requests") != "true":
            return web.json_response({"success": False})
        for running in self.running:
            running.recomputed += 1
        self.cache.held.clear()
        return web.json_response({"success": True})

    async def rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        if body["method"] != "reload_weights":
            return _refused(500, f"no method {body['method']}")
        if not self.ignores_weights_path:
            self.weights = weights_of(Path(body["kwargs"]["weights_path"]))
        return web.json_response({"results": [None]})

    async def label(self, request: web.Request) -> web.Response:
        if not self.keeps_label:
            self.version = (await request.json())["new_version"]
        return web.json_response({"success": True})

    async def finish(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["weight_version"]
        return web.json_response({"message": "done"})

    async def checker(self, _: web.Request) -> web.Response:
        return web.json_response({"checksums": {"tp0:weight": str(self.weights)}})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        flat = request.path == COMPLETIONS
        sampling: Body = self.defaults | body if flat else body["sampling_params"]
        if refusal := self._refusal(body, sampling):
            return refusal
        prefix = "cmpl" if flat else "generate-tokens"
        running = Running(
            id=f"{prefix}-{body['request_id']}" + ("-0" if flat else ""),
            token_ids=body["prompt" if flat else "token_ids"],
            salt=body.get("cache_salt", ""),
            sampling=sampling,
            priority=body.get("priority", 0),
        )
        self.running.append(running)
        try:
            return await self._serve(request, running, body, flat=flat)
        finally:
            self.running.remove(running)

    def _refusal(self, body: Body, sampling: Body) -> web.Response | None:
        if self.refuses_when_paused and self.paused in ("abort", "wait"):
            return _refused(503, "the engine is paused")
        if body.get("priority") and not self.takes_priorities:
            return _refused(400, "Got priority 1 but Priority scheduling is not enabled.")
        if any(character in body.get("cache_salt", "") for character in "@/\\"):
            return _refused(400, "Parameter 'cache_salt' must not contain '@', '/'")
        if (sampling.get("logprobs") or 0) > self.most_logprobs:
            return _refused(400, "Requested sample logprobs is greater than max allowed")
        if sampling.get("structured_outputs") and not self.takes_grammars:
            return _refused(400, "no structured outputs backend")
        return None

    async def _serve(
        self, request: web.Request, running: Running, body: Body, *, flat: bool
    ) -> web.StreamResponse:
        running.cached = self.cache.found(running.salt, running.token_ids)
        self.counts["prompt"] += len(running.token_ids)
        self.counts["cached"] += running.cached
        usage: Body = {"prompt_tokens": len(running.token_ids)}
        if self.tells_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": running.cached}
        response = web.StreamResponse()
        if body.get("stream"):
            await response.prepare(request)
        choices: list[Body] = []
        async for choice in self._sampled(running, flat=flat):
            choices.append(choice)
            if body.get("stream"):
                await _send(response, {"choices": [choice]})
        self.cache.keep(running.salt, running.token_ids + running.sampled)
        if body.get("stream"):
            await _send(response, {"choices": [], "usage": usage})
            await response.write(b"data: [DONE]\n\n")
            return response
        prompt = self._prompt_logprobs(running.token_ids, running.sampling.get("prompt_logprobs") or 0)
        return web.json_response({"choices": choices[-1:], "usage": usage, "prompt_logprobs": prompt})

    async def _sampled(self, running: Running, *, flat: bool) -> AsyncGenerator[Body]:
        """Choices of events, with the tokens since the last one."""
        interval, told, end = running.sampling.get("stream_interval", 1), 0, None
        entries: list[Body] = []
        while end is None:
            await asyncio.sleep(self.step_s)
            while self.paused == "keep" and not running.is_aborted:  # noqa: ASYNC110
                await asyncio.sleep(self.step_s)
            if running.is_aborted:
                end = ("abort", None)
            else:
                entries.append(self._step(running))
                end = _ending(running)
            if end is not None or len(running.sampled) == 1 or len(running.sampled) - told >= interval:
                yield _choice(running, entries, told, end, flat=flat)
                told, entries = len(running.sampled), []

    def _step(self, running: Running) -> Body:
        sampling, context = running.sampling, running.token_ids + running.sampled
        temperature = sampling["temperature"]
        drawn = logprobs_after(self.weights, context[-1], temperature, self.vocabulary)
        grammar: dict[str, Any] = sampling.get("structured_outputs") or {}
        if pattern := grammar.get("regex"):
            drawn = _allowed(drawn, END if running.sampled else re.compile(pattern))
        noise = np.random.default_rng([sampling.get("seed", 0), len(running.sampled)]).gumbel(
            size=self.vocabulary
        )
        if (kept := sampling.get("top_k") or 0) > 0:
            drawn = np.where(drawn >= np.sort(drawn)[-kept], drawn, -np.inf)
        token = int(np.argmax(drawn + noise if temperature else drawn))
        told = drawn if self.processed else logprobs_after(self.weights, context[-1], size=self.vocabulary)
        running.sampled.append(token)
        self.counts["generated"] += 1
        if not running.spans or running.spans[-1][0] != self.version:
            running.spans.append((self.version, len(running.sampled) - 1))
        # The sampled token takes a place among the most probable.
        best = [int(other) for other in np.argsort(-told) if other != token]
        top = [token, *best][: max(1, sampling.get("logprobs") or 0)]
        return {"token_id": token, "top": {other: float(told[other]) for other in top}}

    def _prompt_logprobs(self, token_ids: list[int], count: int) -> list[Body | None]:
        entries: list[Body | None] = [None]
        for before, token in itertools.pairwise(token_ids):
            values = logprobs_after(self.weights, before, size=self.vocabulary)
            wanted = {token, *(int(other) for other in np.argsort(-values)[:count])}
            entries.append({str(other): {"logprob": float(values[other])} for other in wanted})
        return entries


def _allowed(logprobs: Floats, only: int | re.Pattern[str]) -> Floats:
    """Of what is left when one number is to match, or one token."""
    is_left = [token == only if isinstance(only, int) else bool(only.fullmatch(str(token)))
               for token in range(len(logprobs))]  # fmt: skip
    left = np.where(is_left, logprobs, -np.inf)
    return left - np.log(np.exp(left).sum())


def _ending(running: Running) -> tuple[str, int | str | None] | None:
    sampling, token = running.sampling, running.sampled[-1]
    if token == END and "structured_outputs" in sampling:
        return "stop", None
    if token in sampling.get("stop_token_ids", ()):
        return "stop", token
    text = "".join(f" {token}" for token in running.sampled)
    if matched := next((string for string in sampling.get("stop", ()) if string in text), None):
        return "stop", matched
    return ("length", None) if len(running.sampled) >= sampling["max_tokens"] else None


def _choice(
    running: Running, entries: list[Body], told: int, end: tuple[str, int | str | None] | None, *, flat: bool
) -> Body:
    choice: Body = {"index": 0, "token_ids": running.sampled[told:], "finish_reason": None}
    if flat:
        choice["logprobs"] = {
            "token_logprobs": [entry["top"][entry["token_id"]] for entry in entries],
            "top_logprobs": [{f"token_id:{t}": value for t, value in e["top"].items()} for e in entries],
        }
    else:
        choice["logprobs"] = {
            "content": [
                {
                    "token_id": entry["token_id"],
                    "logprob": entry["top"][entry["token_id"]],
                    "top_logprobs": [{"token_id": t, "logprob": value} for t, value in entry["top"].items()],
                }
                for entry in entries
            ]
        }
    if end is not None:
        choice["finish_reason"], choice["stop_reason"] = end
        if not flat:
            ends = [start for _, start in running.spans[1:]] + [len(running.sampled)]
            choice["weight_versions"] = [
                {"version": version, "start": start, "end": stop}
                for (version, start), stop in zip(running.spans, ends, strict=False)
            ]
    return choice


async def _send(response: web.StreamResponse, event: Body) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def _refused(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


@asynccontextmanager
async def fake_vllm(folder: Path, **settings: object) -> AsyncGenerator[tuple[FakeVllm, str]]:
    """It and its address; `settings` are fields of it."""
    fake = FakeVllm(folder)
    for name, value in settings.items():
        setattr(fake, name, value)
    # A handler whose client is gone is cancelled, as in the real server.
    async with TestServer(fake.app(), host="127.0.0.1") as server:
        yield fake, str(server.make_url("")).rstrip("/")
