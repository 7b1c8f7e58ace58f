"""Weight control in the shapes of vLLM, SGLang and prime-rl, where a folder of weights says what to serve.

What those engines do beyond that (tensors over NCCL or shared memory, adapters, sleep) is refused with what
to do instead.  All of it needs the scope `admin`.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Literal

from aiohttp import web
from pydantic import Field

from sostenuto.errors import lone_error
from sostenuto.runtime.engines.wire import PauseMode
from sostenuto.runtime.gateway.bodies import Body, Text, read
from sostenuto.runtime.gateway.dialects.dialect import Json
from sostenuto.runtime.gateway.keys import Scope
from sostenuto.runtime.gateway.refusing import json_reply
from sostenuto.runtime.gateway.server import Gateway, Handler, body_of, object_of, require
from sostenuto.runtime.gateway.turn import Refused
from sostenuto.runtime.gateway.weights import Weights
from sostenuto.runtime.publishing import Publication

_VLLM = {"abort": PauseMode.ABORT, "wait": PauseMode.FINISH, "keep": PauseMode.KEEP}
_TENSORS = (
    "tensors do not come through the gateway; save a folder of safetensors and send its path as weight_dir "
    "to /update_weights"
)
_ADAPTERS = "the gateway serves one set of weights; merge the adapter into them and publish the folder"
_SLEEP = "the gateway keeps its engines; end it to free their memory, or remove an engine"
_KV = "KV of old weights is dropped as new ones are published; leave this call out"
_LABEL = "a version is what was verified; give weight_version with the weights"
_ABORT = "a call ends as its client closes the connection; a program with /programs/release"

REFUSED = {
    "/init_weight_transfer_engine": _TENSORS, "/shutdown_weight_transfer_engine": _TENSORS,
    "/start_draft_weight_update": _TENSORS, "/init_broadcaster": _TENSORS,
    "/init_weights_update_group": _TENSORS, "/destroy_weights_update_group": _TENSORS,
    "/begin_weight_update": _TENSORS, "/end_weight_update": _TENSORS,
    "/update_weights_from_distributed": _TENSORS, "/update_weights_from_tensor": _TENSORS,
    "/update_weights_from_ipc": _TENSORS, "/collective_rpc": _TENSORS,
    "/v1/load_lora_adapter": _ADAPTERS, "/v1/unload_lora_adapter": _ADAPTERS,
    "/load_lora_adapter": _ADAPTERS, "/unload_lora_adapter": _ADAPTERS,
    "/sleep": _SLEEP, "/wake_up": _SLEEP,
    "/release_memory_occupation": _SLEEP, "/resume_memory_occupation": _SLEEP,
    "/reset_prefix_cache": _KV, "/flush_cache": _KV, "/update_weight_version": _LABEL,
    "/abort_request": _ABORT, "/abort_requests": _ABORT, "/inference/v1/abort_requests": _ABORT,
}  # fmt: skip
"""Routes of those engines that have no meaning here, and what to do instead."""


class PauseBody(Body):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class UpdateInfo(Body):
    path: Text | None = None


class UpdateBody(Body):
    weight_dir: Text | None = None
    model_path: Text | None = None
    update_info: UpdateInfo | None = None
    weight_version: Annotated[str, Field(max_length=80, coerce_numbers_to_str=True)] | None = None

    def folder(self) -> Path:
        """Refused where there is none."""
        info = self.update_info.path if self.update_info else None
        given = self.weight_dir or self.model_path or info
        if not given or "\0" in given:
            raise Refused(f"weight_dir: no folder is given; {_TENSORS}", field="weight_dir")
        return Path(given)


class FinishBody(Body):
    weight_version: Annotated[str, Field(max_length=80, coerce_numbers_to_str=True)] | None = None


Act = Callable[[web.Request, Weights], Awaitable[Json]]


def weights_routes(gateway: Gateway, weights: Weights | None) -> list[web.RouteDef]:
    """Without `weights` each is refused: a job publishes its own."""

    def handler(act: Act) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            require(gateway.grantee(request), Scope.ADMIN)
            if weights is None:
                raise Refused(
                    "the weights here are those of a job, which publishes them itself; leave this call out",
                    status=501,
                    code="not_supported",
                )
            with lone_error():
                return json_reply(await act(request, weights))

        return handle

    def refusal(remedy: str) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            require(gateway.grantee(request), Scope.ADMIN)
            raise Refused(f"{request.path} is not supported: {remedy}", status=501, code="not_supported")

        return handle

    async def server_info(_request: web.Request, weights: Weights) -> Json:
        served = gateway.served
        return {
            "model": served.model,
            "context_tokens": served.context_tokens(),
            "engines": weights.engines,
            "features": sorted(served.features()),
            "weight_version": str(weights.version),
            "is_paused": weights.is_paused,
        }

    posts: dict[str, Act] = {
        "/pause": _pause,
        "/resume": _resume,
        "/pause_generation": _pause_generation,
        "/continue_generation": _resume,
        "/start_weight_update": _start,
        "/update_weights": _update,
        "/finish_weight_update": _finish,
        "/update_weights_from_disk": _from_disk,
    }
    gets: dict[str, Act] = {
        "/is_paused": _is_paused,
        "/weight_info": _weight_info,
        "/model_info": _weight_info,
        "/get_world_size": _world_size,
        "/server_info": server_info,
    }
    return [
        *(web.post(path, handler(act)) for path, act in posts.items()),
        *(web.get(path, handler(act)) for path, act in gets.items()),
        *(web.post(path, refusal(remedy)) for path, remedy in REFUSED.items()),
    ]


async def _pause(request: web.Request, weights: Weights) -> Json:
    mode = request.query.get("mode", "abort")
    if mode not in _VLLM:
        raise Refused(f"mode: {mode[:80]!r} is none; give abort, wait or keep", field="mode")
    await weights.pause(_VLLM[mode])
    return {"status": "paused"}


async def _pause_generation(request: web.Request, weights: Weights) -> Json:
    mode = read(PauseBody, await _body(request)).mode
    await weights.pause(PauseMode.KEEP if mode == "in_place" else PauseMode(mode))
    return {"status": "paused"}


async def _resume(_request: web.Request, weights: Weights) -> Json:
    await weights.resume()
    return {"status": "resumed"}


async def _is_paused(_request: web.Request, weights: Weights) -> Json:
    return {"is_paused": weights.is_paused}


async def _start(_request: web.Request, weights: Weights) -> Json:
    await weights.begin()
    return {"status": "started"}


async def _update(request: web.Request, weights: Weights) -> Json:
    asked = read(UpdateBody, await _body(request))
    publication = await weights.take(asked.folder(), asked.weight_version)
    return {"status": "staged"} if publication is None else {"status": "updated", **_told(publication)}


async def _finish(request: web.Request, weights: Weights) -> Json:
    publication = await weights.finish(read(FinishBody, await _body(request)).weight_version)
    return {"status": "updated", **_told(publication)}


async def _from_disk(request: web.Request, weights: Weights) -> Json:
    asked = read(UpdateBody, await _body(request))
    publication = await weights.publish(asked.folder(), asked.weight_version)
    return {"success": True, "message": "published", "num_paused_requests": 0, **_told(publication)}


async def _weight_info(_request: web.Request, weights: Weights) -> Json:
    return {"weight_version": str(weights.version)}


async def _world_size(_request: web.Request, weights: Weights) -> Json:
    return {"world_size": weights.engines}


def _told(publication: Publication) -> Json:
    return {
        "weight_version": str(publication.version),
        "stage_s": publication.stage_s,
        "pause_s": publication.pause_s,
        "recomputed_requests": publication.recomputed_requests,
        "dropped_programs": publication.dropped_programs,
    }


async def _body(request: web.Request) -> Json:
    """Empty where there is none."""
    raw = await body_of(request)
    return object_of(raw) if raw.strip() else {}
