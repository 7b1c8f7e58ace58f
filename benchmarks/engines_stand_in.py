"""A server that computes nothing and answers as vLLM or SGLang does, for what an adapter costs.

python -m benchmarks.engines_stand_in KIND ANSWER_S

It says its address in a line once it serves.  A request for more than one token is answered after
`ANSWER_S`; `GET /asked` tells the body of the last one.
"""

import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
from aiohttp import web

VOCABULARY = 32_000
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_SGLANG_SERVER = {
    "version": "0.5.23", "max_total_num_tokens": 1 << 20, "max_req_input_len": 8192,
    "internal_states": [{"effective_max_running_requests_per_dp": 256}], "startup_time": 1,
    "enable_session_radix_cache": True, "enable_priority_scheduling": True,
}  # fmt: skip
_SGLANG_MODEL = {"model_path": "m", "weight_version": "0.0", "is_generation": True}
_VLLM_CONFIG = {
    "vllm_config": {
        "model_config": {"dtype": "torch.bfloat16", "max_logprobs": 20},
        "scheduler_config": {"max_num_seqs": 256, "enable_chunked_prefill": True},
        "device_config": {"device": "cuda"},
        "parallel_config": {"world_size": 1},
    }
}
_VLLM_METRICS = """\
vllm:num_requests_running{engine="0"} 0
vllm:num_requests_waiting{engine="0"} 0
vllm:prompt_tokens_total{engine="0"} 0
vllm:prompt_tokens_cached_total{engine="0"} 0
vllm:generation_tokens_total{engine="0"} 0
vllm:kv_cache_usage_perc{engine="0"} 0
vllm:cache_config_info{block_size="16",enable_prefix_caching="True",num_gpu_blocks="65537"} 1.0
process_start_time_seconds 1.0
"""


class StandIn:
    """The application; `kind` is sglang or vllm."""

    def __init__(self, kind: str, answer_s: float) -> None:
        self._answer_s = answer_s
        self._asked: dict[str, Any] = {}
        self.app = web.Application(client_max_size=64 << 20)
        self.app.router.add_get("/asked", self._tell_asked)
        {"sglang": self._sglang, "vllm": self._vllm}[kind]()

    def _sglang(self) -> None:
        self._answers("/model_info", _SGLANG_MODEL)
        self._answers("/server_info", _SGLANG_SERVER)
        self._answers("/ready", {})
        self.app.router.add_post("/close_session", _always({}))
        self.app.router.add_post("/generate", self._sglang_generate)

    def _vllm(self) -> None:
        self._answers("/version", {"version": "0.33.0"})
        self._answers("/v1/models", {"data": [{"id": "m", "max_model_len": 8192}]})
        self._answers("/is_paused", {"is_paused": False})
        self._answers("/weight_info", {"weight_version": "0.0"})
        self._answers("/server_info", _VLLM_CONFIG)
        self.app.router.add_get("/metrics", _metrics)
        self.app.router.add_post("/inference/v1/generate", self._vllm_generate)

    def _answers(self, route: str, content: dict[str, Any]) -> None:
        self.app.router.add_get(route, _always(content))

    async def _tell_asked(self, _request: web.Request) -> web.Response:
        return web.json_response(self._asked)

    async def _taken(self, request: web.Request) -> dict[str, Any]:
        self._asked = await request.json()
        return self._asked

    async def _worked(self, tokens: int) -> None:
        if tokens > 1 and self._answer_s:
            await anyio.sleep(self._answer_s)

    async def _sglang_generate(self, request: web.Request) -> web.Response:
        body = await self._taken(request)
        tokens = _sampled(body["sampling_params"]["max_new_tokens"])
        await self._worked(len(tokens))
        meta = {
            "id": body["rid"], "finish_reason": {"type": "length", "length": len(tokens)},
            "prompt_tokens": len(body["input_ids"]), "cached_tokens": 0,
            "weight_versions": [{"version": "0.0", "start": 0, "end": len(tokens)}],
            "output_token_logprobs": [[-1.0, token, None] for token in tokens],
            "output_top_logprobs": [[[-1.0, token, None]] for token in tokens],
        }  # fmt: skip
        return web.json_response({"output_ids": tokens, "meta_info": meta})

    async def _vllm_generate(self, request: web.Request) -> web.StreamResponse:
        body = await self._taken(request)
        tokens, prompt = _sampled(body["sampling_params"]["max_tokens"]), len(body["token_ids"])
        usage = {"prompt_tokens": prompt, "prompt_tokens_details": {"cached_tokens": 0}}
        if not body.get("stream"):
            scores = [None, *({str(token): {"logprob": -1.0}} for token in body["token_ids"][1:])]
            whole = {"choices": [_choice(tokens, ends=True)], "prompt_logprobs": scores, "usage": usage}
            return web.json_response(whole)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if len(tokens) > 1:
            await response.write(_event({"choices": [_choice(tokens[:1], ends=False)]}))
            await self._worked(len(tokens))
        ranked = body["sampling_params"]["logprobs"]
        last = _choice(tokens[1:] or tokens, ends=True, of=len(tokens), ranked=ranked)
        await response.write(_event({"choices": [last]}))
        await response.write(_event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
        await response.write_eof()
        return response


def _sampled(count: int) -> list[int]:
    return list(range(1000, 1000 + count))


def _choice(tokens: list[int], *, ends: bool, of: int = 1, ranked: int = 0) -> dict[str, Any]:
    """`of`: tokens of the whole answer; `ranked`: the most probable ones that come with each."""
    top = [{"token_id": token, "logprob": -1.0 - token} for token in range(ranked)]
    content = [
        {"token": f"token_id:{token}", "token_id": token, "logprob": -1.0, "rank": 1, "top_logprobs": top}
        for token in tokens
    ]
    end = {"finish_reason": "length", "weight_versions": [{"version": "0.0", "start": 0, "end": of}]}
    return {"index": 0, "token_ids": tokens, "logprobs": {"content": content}, **(end if ends else {})}


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def _always(content: dict[str, Any]) -> _Handler:
    async def answer(_request: web.Request) -> web.Response:
        return web.json_response(content)

    return answer


async def _metrics(_request: web.Request) -> web.Response:
    return web.Response(text=_VLLM_METRICS)


async def _serve(kind: str, answer_s: float) -> None:
    runner = web.AppRunner(StandIn(kind, answer_s).app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await anyio.sleep_forever()


def main() -> None:
    anyio.run(_serve, sys.argv[1], float(sys.argv[2]))


if __name__ == "__main__":
    main()
