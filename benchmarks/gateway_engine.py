"""An engine that computes nothing: it answers on a socket as the embedded engine does, at a given pace.

python -m benchmarks.gateway_engine SOCKET VOCABULARY STOP_ID SECONDS_A_TOKEN
"""

import asyncio
import json
import sys
from typing import Any

from aiohttp import web

_CONTEXT = 1 << 15
_KV = 1 << 24
_SLOTS = 4096


class Pace:
    """Answers with as many tokens as are asked for."""

    def __init__(self, vocabulary: int, stop_id: int, token_s: float) -> None:
        self._vocabulary = vocabulary
        self._stop_id = stop_id
        self._token_s = token_s
        self._counts = {"prefilled_tokens": 0, "generated_tokens": 0}

    async def capabilities(self, _request: web.Request) -> web.Response:
        return web.json_response(
            {
                "model": "pace", "architecture": "Pace", "vocabulary_size": self._vocabulary,
                "context_tokens": _CONTEXT, "kv_tokens": _KV, "concurrency": _SLOTS,
                "shares_prefixes": False, "version": "0.0", "dtype": "float32", "threads": 1,
                "features": ["hold", "stream", "truncation", "penalties", "top_logprobs"],
            }
        )  # fmt: skip

    async def load(self, _request: web.Request) -> web.Response:
        nothing = dict.fromkeys(
            ("running", "waiting", "used_kv_tokens", "held_kv_tokens", "held_programs", "cached_tokens",
             "updates", "busy_s", "pause_s"), 0,
        )  # fmt: skip
        return web.json_response(nothing | self._counts)

    async def done(self, request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=b"{}", content_type="application/json")

    async def generate(self, request: web.Request) -> web.StreamResponse:
        asked: dict[str, Any] = json.loads(await request.read())
        count = int(asked["max_new_tokens"])
        ids = [65 + (len(asked["token_ids"]) + i) % 26 for i in range(count - 1)] + [self._stop_id]
        self._counts["prefilled_tokens"] += len(asked["token_ids"])
        self._counts["generated_tokens"] += count
        if "stream" in request.query:
            return await self._streamed(request, ids, len(asked["token_ids"]))
        if self._token_s:
            await asyncio.sleep(self._token_s * count)
        reply = json.dumps(_reply(ids, len(asked["token_ids"]), self._token_s)).encode()
        return web.Response(body=reply, content_type="application/json")

    async def _streamed(self, request: web.Request, ids: list[int], prompt: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        for place, id_ in enumerate(ids, 1):
            await asyncio.sleep(began_s + place * self._token_s - loop.time())
            span = {"span": {"token_ids": [id_], "logprobs": [-0.5], "version": "0.0"}}
            await response.write(json.dumps(span, separators=(",", ":")).encode() + b"\n")
        reply = {"reply": _reply(ids, prompt, self._token_s)}
        await response.write(json.dumps(reply, separators=(",", ":")).encode() + b"\n")
        await response.write_eof()
        return response


def _reply(ids: list[int], prompt: int, token_s: float) -> dict[str, Any]:
    return {
        "token_ids": ids,
        "logprobs": [-0.5] * len(ids),
        "versions": [{"version": "0.0", "start": 0, "end": len(ids)}],
        "finish_reason": "stop",
        "cached_tokens": 0,
        "prefilled_tokens": prompt,
        "queue_s": 0.0,
        "prefill_s": 0.0,
        "decode_s": token_s * len(ids),
    }


async def _serve(socket: str, pace: Pace) -> None:
    app = web.Application(client_max_size=1 << 30)
    app.add_routes(
        [
            web.get("/capabilities", pace.capabilities),
            web.get("/load", pace.load),
            web.post("/generate", pace.generate),
            *(web.post(path, pace.done) for path in ("/abort", "/release", "/offload", "/restore")),
        ]
    )
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.UnixSite(runner, socket).start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


def main() -> None:
    socket, vocabulary, stop_id, token_s = sys.argv[1:5]
    asyncio.run(_serve(socket, Pace(int(vocabulary), int(stop_id), float(token_s))))


if __name__ == "__main__":
    main()
