"""What the gateway takes, as an OpenAPI document, out of the models that read it."""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from types import MappingProxyType

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from sostenuto.runtime.gateway.dialects.anthropic_body import MessagesBody, PromptBody
from sostenuto.runtime.gateway.dialects.chat import ChatBody
from sostenuto.runtime.gateway.dialects.completions import CompletionBody
from sostenuto.runtime.gateway.dialects.dialect import Json
from sostenuto.runtime.gateway.dialects.inference import InferenceBody
from sostenuto.runtime.gateway.dialects.responses_body import ResponsesBody
from sostenuto.runtime.gateway.dialects.sglang import SGLangBody

BODIES: Mapping[str, type[BaseModel]] = MappingProxyType(
    {
        "/v1/chat/completions": ChatBody,
        "/v1/completions": CompletionBody,
        "/v1/responses": ResponsesBody,
        "/v1/messages": MessagesBody,
        "/v1/messages/count_tokens": PromptBody,
        "/inference/v1/generate": InferenceBody,
        "/generate": SGLangBody,
    }
)
"""What is posted where; each also under `/p/{program}`."""

_NAME = {"name": "program", "in": "path", "required": True, "schema": {"type": "string"}}
_REPLIES = {
    "200": {"description": "The reply, as JSON or as a stream of events."},
    "4XX": {"description": "What is wrong with the request, and which key."},
    "503": {"description": "An engine failed."},
}


@cache
def document() -> Json:
    """Not to be changed by the caller."""
    mode: JsonSchemaMode = "validation"
    models: list[tuple[type[BaseModel], JsonSchemaMode]] = [(model, mode) for model in BODIES.values()]
    names, schemas = models_json_schema(models, ref_template="#/components/schemas/{model}")
    paths: Json = {}
    for path, model in BODIES.items():
        schema = names[model, mode]
        paths[path] = {"post": _operation(schema)}
        paths["/p/{program}" + path] = {"post": _operation(schema), "parameters": [_NAME]}
    paths["/v1/models"] = {"get": {"responses": {"200": {"description": "What is served."}}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Sostenuto gateway", "version": version("sostenuto")},
        "components": {
            "schemas": schemas.get("$defs", {}),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
        "paths": paths,
    }


def _operation(schema: Mapping[str, object]) -> Json:
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}, "responses": _REPLIES}
