"""Which path is answered by what."""

from dataclasses import dataclass

from aiohttp import web

from sostenuto.runtime.gateway.dialects.anthropic import AnthropicDialect, counted
from sostenuto.runtime.gateway.dialects.chat import ChatDialect
from sostenuto.runtime.gateway.dialects.completions import CompletionDialect
from sostenuto.runtime.gateway.dialects.dialect import Dialect, Json
from sostenuto.runtime.gateway.dialects.inference import InferenceDialect
from sostenuto.runtime.gateway.dialects.responses import ResponsesDialect
from sostenuto.runtime.gateway.dialects.sglang import SGLangDialect
from sostenuto.runtime.gateway.keys import Scope
from sostenuto.runtime.gateway.openapi import document
from sostenuto.runtime.gateway.programs_routes import programs_routes
from sostenuto.runtime.gateway.refusing import json_reply
from sostenuto.runtime.gateway.server import OF_PROGRAM, Gateway, Handler, require
from sostenuto.runtime.gateway.weights import Weights
from sostenuto.runtime.gateway.weights_routes import weights_routes
from sostenuto.runtime.gateway.workers import Workers, worker_routes


@dataclass(frozen=True, slots=True)
class Controls:
    """What clients with the scope `admin` may change; None: nothing of it."""

    workers: Workers | None = None
    weights: Weights | None = None


def routes(gateway: Gateway, controls: Controls) -> list[web.RouteDef]:
    """Every route, each model call also under the path of a program."""
    anthropic = AnthropicDialect()
    calls: list[tuple[str, Dialect]] = [
        ("/v1/chat/completions", ChatDialect()),
        ("/v1/messages", anthropic),
        ("/v1/completions", CompletionDialect()),
        ("/inference/v1/generate", InferenceDialect()),
        ("/generate", SGLangDialect()),
        ("/v1/responses", ResponsesDialect()),
    ]
    handlers = [(path, gateway.model_call(dialect)) for path, dialect in calls]
    handlers.append(("/v1/messages/count_tokens", gateway.question(anthropic, counted)))
    found = [web.get("/health", _health), web.get("/openapi.json", _described)]
    for path, handler in handlers:
        found += [web.post(path, handler), web.post(OF_PROGRAM + path, handler)]
    models = _models(gateway)
    found += [web.get("/v1/models", models), web.get(f"{OF_PROGRAM}/v1/models", models)]
    return [
        *found,
        *programs_routes(gateway),
        *worker_routes(gateway, controls.workers),
        *weights_routes(gateway, controls.weights),
    ]


async def _health(_request: web.Request) -> web.Response:
    return json_reply({"status": "ok"})


async def _described(_request: web.Request) -> web.Response:
    return json_reply(document())


def _models(gateway: Gateway) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        require(gateway.grantee(request), Scope.AGENT)
        served = gateway.served
        model: Json = {
            "id": served.model,
            "object": "model",
            "created": served.created,
            "owned_by": "sostenuto",
            "root": served.model,
            "parent": None,
            "max_model_len": served.context_tokens(),
        }
        return json_reply({"object": "list", "data": [model]})

    return handle
