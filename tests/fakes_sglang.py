"""A fake SGLang server on a real socket, with the documented traps of the real one.

- A request that waits behind a pause is unknown to the scheduler: its abort is lost, and so is the next.
- `pause_generation` aborts by default, and its abort mode never ends over requests that stand still.
- `update_weight_version` aborts everything by default.
- A flush is refused while requests run; an update that is not told otherwise flushes, and fails then with
  the weights changed.  A load that fails has changed some tensors.
- Unless paused, an update waits for every request, and new ones wait for it.
- A running request that is aborted answers 200 with what it has; a queued one has nothing.
- A client that goes away is noticed late.
"""

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from fakes_sglang_core import CONTEXT, Core, Req, vocabulary_of, weights_of

EXPERTS, LAYERS = 2, 3
_lives = count(1)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(eq=False)
class _State:
    """A request in the front end."""

    body: dict[str, Any]
    news: asyncio.Event = field(default_factory=asyncio.Event)
    ended: Req | None = None
    abort_sent: bool = False
    is_dispatched: bool = False


@dataclass
class FakeSGLang:
    """`async with serve(FakeSGLang(folder)) as url`."""

    folder: Path
    version: str = "0.0"
    api_key: str = ""
    admin_key: str = ""
    step_s: float = 0.001
    flags: dict[str, Any] = field(default_factory=dict[str, Any])
    """Changes what `/server_info` says, and what follows from it."""
    core: Core = field(init=False)
    bodies: list[tuple[str, Any]] = field(default_factory=list[tuple[str, Any]])
    """(route, body) of everything that came."""
    broken: dict[str, Handler] = field(default_factory=dict[str, Handler])
    """Routes that answer otherwise."""
    torn_update: str = ""
    """The next load of weights fails with this message, and leaves other weights than before."""
    group: "asyncio.Queue[int]" = field(default_factory=asyncio.Queue)
    """What the sender broadcasts: a number that stands for the bytes."""
    has_checker: bool = True

    def __post_init__(self) -> None:
        self.core = Core(weights_of(self.folder), self.version, vocabulary_of(self.folder))
        self.start_again()

    def start_again(self) -> None:
        """A new life with the weights it was started with."""
        self.core = Core(
            weights_of(self.folder), self.version, self.core.vocabulary, concurrency=self.core.concurrency
        )
        self.core.eos_stops = False
        self._states: dict[str, _State] = {}
        self._open = asyncio.Event()
        self._open.set()
        self._arrivals = count()
        self._reading = 0
        self._session_open = False
        self._label, self._model_path = self.version, str(self.folder)
        self._life = next(_lives)

    @property
    def routes(self) -> list[str]:
        return [route for route, _ in self.bodies]

    def info(self) -> dict[str, Any]:
        return {
            "version": "0.5.23", "max_total_num_tokens": self.core.pool, "max_req_input_len": CONTEXT,
            "internal_states": [{"effective_max_running_requests_per_dp": self.core.concurrency}],
            "startup_time": {"tokenizer_e2e": float(self._life)}, "dp_size": 1, "tp_size": 1, "page_size": 1,
            "dtype": "float32", "skip_tokenizer_init": False, "disable_radix_cache": False,
            "enable_session_radix_cache": True, "enable_priority_scheduling": True,
            "schedule_low_priority_values_first": False, "incremental_streaming_output": False,
            "enable_return_routed_experts": True, "grammar_backend": "xgrammar",
            "sampling_mask_max_tokens": 64, "context_length": None, "something_new": [1],
        } | self.flags  # fmt: skip

    async def run(self) -> None:
        """The scheduler's loop."""
        while True:
            await asyncio.sleep(self.step_s)
            for req in self.core.step():
                self._end(req)
            for state in self._states.values():
                if state.body.get("stream"):
                    state.news.set()

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._gatekeeper], client_max_size=64 << 20)
        names = (
            "generate", "pause_generation", "continue_generation", "abort_request", "flush_cache",
            "update_weights_from_disk", "update_weights_from_distributed", "init_weights_update_group",
            "begin_weight_update", "end_weight_update", "update_weight_version", "weights_checker",
            "close_session", "model_info", "server_info", "ready",
        )  # fmt: skip
        for name in names:
            app.router.add_route("*", f"/{name}", getattr(self, f"_{name}"))
        app.router.add_get("/v1/loads", self._loads)
        return app

    @web.middleware
    async def _gatekeeper(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        admin = {"generate", "close_session", "model_info", "server_info", "v1", "ready"}
        is_normal = request.path.split("/")[1] in admin
        key = self.api_key if is_normal else self.admin_key or self.api_key
        if key and request.headers.get("Authorization") != f"Bearer {key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        raw = await request.read()
        self.bodies.append((request.path, json.loads(raw) if raw else None))
        return await self.broken.get(request.path, handler)(request)

    # ---------------------------------------------------------------- requests

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if refusal := self._refusal(body):
            return _error(400, refusal)
        state = self._states[body["rid"]] = _State(body)
        try:
            while not self._open.is_set():
                await self._open.wait()
            self._reading += 1
            try:
                self._dispatch(state)
                if body.get("stream"):
                    return await self._streamed(request, state)
                await state.news.wait()
                return self._answered(state)
            finally:
                self._reading -= 1
        finally:
            self._states.pop(body["rid"], None)

    def _refusal(self, body: dict[str, Any]) -> str:
        tokens, limit = body["input_ids"], CONTEXT + 6
        if any(not 0 <= token < self.core.vocabulary for token in tokens):
            raise AssertionError("the real server's scheduler dies of this")
        if body["rid"] in self._states:
            return f"Duplicate request ID detected: {body['rid']}"
        if len(tokens) >= limit or len(tokens) + body["sampling_params"]["max_new_tokens"] > limit:
            return f"Requested token count exceeds the model's maximum context length of {limit} tokens."
        if "regex" in body["sampling_params"] and self.info()["grammar_backend"] == "none":
            return "Grammar-based generation is not supported with --grammar-backend none"
        cap = self.info()["sampling_mask_max_tokens"]
        if body.get("return_sampling_mask") and not 0 < body["sampling_params"].get("top_k", 1 << 30) <= cap:
            return f"return_sampling_mask requires top_k=1 for greedy sampling or finite 1 < top_k <= {cap}"
        return ""

    def _dispatch(self, state: _State) -> None:
        req = Req(state.body, next(self._arrivals))
        state.is_dispatched = True
        state.ended = None
        preferred = self.flags.get("preferred_sampling_params", {})
        req.body = req.body | {"sampling_params": preferred | req.body["sampling_params"]}
        if self.flags.get("allow_auto_truncate"):
            req.body = req.body | {"input_ids": req.body["input_ids"][:8]}
        self.core.waiting.append(req)

    def _end(self, req: Req, *, in_queue: bool = False) -> None:
        state = self._states.get(req.rid)
        if state is None:
            return
        if in_queue:
            req.finish = {"type": "abort", "message": "Abort in waiting queue"}
        state.ended = req
        state.news.set()

    def _answered(self, state: _State) -> web.Response:
        assert state.ended is not None
        finish = state.ended.finish or {}
        if finish["type"] == "abort" and (finish.get("status_code") or 0) >= 400:
            return _error(finish["status_code"], finish["message"])
        return web.json_response(self._answer(state.ended))

    def _answer(self, req: Req, start: int = 0) -> dict[str, Any]:
        spans = req.spans(self.core.version)
        meta: dict[str, Any] = {
            "id": req.rid, "finish_reason": req.finish, "weight_version": spans[-1]["version"],
            "weight_versions": spans, "completion_tokens": len(req.output), "e2e_latency": 0.01,
            "output_token_logprobs": req.entries[start:],
        }  # fmt: skip
        if not req.finish:
            # As in the real one: in the middle of a stream only the label is said.
            del meta["weight_versions"]
            meta["weight_version"] = self._label
        if req.is_prefilled or req.output:
            meta |= {"prompt_tokens": len(req.body["input_ids"]), "cached_tokens": req.cached}
        if req.body.get("top_logprobs_num"):
            meta["output_top_logprobs"] = req.tops[start:]
        if req.body.get("return_sampling_mask"):
            meta |= {
                "output_token_sampling_mask": req.masks[start:],
                "output_token_sampling_logprobs": req.kept[start:],
            }
        if (first := req.body.get("logprob_start_len", -1)) >= 0:
            meta |= self.core.scored(req, first)
        if req.body.get("return_routed_experts"):
            meta["routed_experts"] = base64.b64encode(_routes(req).tobytes()).decode()
        return {"text": "", "output_ids": req.output[start:], "meta_info": meta}

    async def _streamed(self, request: web.Request, state: _State) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        told = 0
        while True:
            await state.news.wait()
            state.news.clear()
            req = state.ended or next((r for r in self.core.running if r.rid == state.body["rid"]), None)
            if req is None or (len(req.output) == told and not state.ended):
                continue
            start = told if self.info()["incremental_streaming_output"] else 0
            told = len(req.output)
            await response.write(b"data: " + json.dumps(self._answer(req, start)).encode() + b"\n\n")
            if state.ended:
                await response.write(b"data: [DONE]\n\n")
                return response

    async def _abort_request(self, request: web.Request) -> web.Response:
        body = await request.json()
        self._abort(body.get("rid") or "", everything=body.get("abort_all", False))
        return web.Response()

    def _abort(self, rid: str, *, everything: bool) -> None:
        if not everything:
            state = self._states.get(rid)
            if not rid or state is None or state.abort_sent:
                return
            state.abort_sent = True
        for req in self.core.abort(rid, everything=everything):
            self._end(req, in_queue=True)

    # ---------------------------------------------------------------- pause, weights, cache

    async def _pause_generation(self, request: web.Request) -> web.Response:
        mode = (await request.json()).get("mode", "abort")
        self._open.clear()
        if mode != "abort":
            self.core.pause(mode)
        while mode == "abort" and self._reading:
            self._abort("", everything=True)
            await asyncio.sleep(self.step_s)
        return web.json_response({"status": "ok"})

    async def _continue_generation(self, _request: web.Request) -> web.Response:
        self.core.is_paused = False
        self._open.set()
        return web.json_response({"status": "ok"})

    async def _flush_cache(self, _request: web.Request) -> web.Response:
        ok = self.core.flush()
        return web.Response(text="Cache flushed." if ok else "Flush cache failed.", status=200 if ok else 400)

    async def _writer(self) -> None:
        """Unless paused, updates wait for all requests, and new requests wait for them."""
        if self._open.is_set():
            self._open.clear()
            while self._reading:  # noqa: ASYNC110 - the fake's clock is its step
                await asyncio.sleep(self.step_s)
            self._open.set()

    async def _update_weights_from_disk(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body.get("abort_all_requests", False):
            self._abort("", everything=True)
        await self._writer()
        if self.torn_update:
            self.core.weights ^= 0x5A5A
            return _done(self.torn_update)
        self.core.weights = weights_of(Path(body["model_path"]))
        self._model_path = body["model_path"]
        return self._loaded(body)

    def _loaded(self, body: dict[str, Any]) -> web.Response:
        self.core.set_version(body.get("weight_version"))
        if body.get("flush_cache", True) and not self.core.flush():
            return _done("Weights were updated, but the cache was not flushed because requests are running.")
        self._label = body.get("weight_version") or self._label
        return _done()

    async def _init_weights_update_group(self, _request: web.Request) -> web.Response:
        return _done()

    async def _begin_weight_update(self, _request: web.Request) -> web.Response:
        await self._writer()
        if self._session_open:
            return _done("a weight-update session is already open; call end_weight_update() first")
        self._session_open = True
        return _done()

    async def _end_weight_update(self, _request: web.Request) -> web.Response:
        if not self._session_open:
            return _done("no weight-update session is open; call begin_weight_update() first")
        self._session_open = False
        return _done()

    async def _update_weights_from_distributed(self, request: web.Request) -> web.Response:
        body = await request.json()
        if not self._session_open:
            return _done("update_weights_from_distributed must run between begin_weight_update() and end")
        if self.torn_update:
            self.core.weights ^= 0x5A5A
            return _done(self.torn_update)
        self.core.weights = await self.group.get()
        return self._loaded(body)

    async def _update_weight_version(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body.get("abort_all_requests", True):
            self._abort("", everything=True)
        self.core.set_version(body["new_version"])
        self._label = body["new_version"]
        return _done()

    async def _weights_checker(self, _request: web.Request) -> web.Response:
        if not self.has_checker:
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response({"success": True, "per_engine_checksum": f"{self.core.weights:08x}"})

    async def _close_session(self, request: web.Request) -> web.Response:
        self.core.close_session((await request.json())["session_id"])
        return web.Response()

    # ---------------------------------------------------------------- what it says of itself

    async def _model_info(self, _request: web.Request) -> web.Response:
        said = {"model_path": self._model_path, "weight_version": self._label, "is_generation": True}
        return web.json_response(said | {"new": None})

    async def _server_info(self, _request: web.Request) -> web.Response:
        return web.json_response(self.info())

    async def _ready(self, _request: web.Request) -> web.Response:
        return web.Response(status=200 if self._open.is_set() else 503)

    async def _loads(self, _request: web.Request) -> web.Response:
        core = self.core
        load = {
            "num_running_reqs": len(core.running), "num_waiting_reqs": len(core.waiting),
            "num_used_tokens": core.used(), "max_total_num_tokens": core.pool,
        }  # fmt: skip
        return web.json_response({"loads": [load], "version": "0.5.23"})


@asynccontextmanager
async def serve(fake: FakeSGLang) -> AsyncGenerator[str]:
    """On a port of its own, until the block ends."""
    runner = web.AppRunner(fake.application(), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with asyncio.TaskGroup() as group:
            loop = group.create_task(fake.run())
            try:
                yield f"http://127.0.0.1:{runner.addresses[0][1]}"
            finally:
                loop.cancel()
    finally:
        await runner.cleanup()


def _routes(req: Req) -> NDArray[np.int32]:
    """Each token's experts depend on its position."""
    places = np.arange(req.body.get("routed_experts_start_len") or 0, len(req.context) - 1)
    return (places[:, None, None] + np.arange(LAYERS * EXPERTS).reshape(LAYERS, EXPERTS)).astype("<i4")


def _done(refusal: str = "") -> web.Response:
    content = {"success": not refusal, "message": refusal or "Success"}
    return web.json_response(content, status=400 if refusal else 200)


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)
