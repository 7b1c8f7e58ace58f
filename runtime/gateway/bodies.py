"""What all dialects have in common in the bodies of requests: sampling, tools, messages.

Unknown keys are ignored, as clients send many.  What is wrong is refused with the name of its key.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from sostenuto.runtime.engines.wire import Grammar, Sampling
from sostenuto.runtime.gateway.turn import Refused
from sostenuto.tools.wire import ToolSchema
from sostenuto.types import Message, ToolCall

M = TypeVar("M", bound=BaseModel)

_TOOL_S = 3600.0
"""What a client's own tools may take; nobody here waits for them."""
_STOPS = 16
_TEXTS = frozenset({"text", "input_text", "output_text"})

Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Real = Annotated[float, Field(allow_inf_nan=False)]
Text = Annotated[str, Field(max_length=4_000_000)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]
"""Of a tool."""


class Body(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class SamplingBody(Body):
    """The keys that OpenAI, vLLM and SGLang share."""

    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    presence_penalty: Annotated[Real, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Real, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | Annotated[list[str], Field(max_length=_STOPS)] | None = None
    stop_token_ids: list[Count] | None = None

    def sampling(self, stop_token_ids: Sequence[int], grammar: Grammar | None = None) -> Sampling:
        """With the model's own stop tokens."""
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            seed=(self.seed or 0) % 2**31,
            stop_token_ids=(*stop_token_ids, *(self.stop_token_ids or ())),
            stop_strings=self._stop_strings(),
            top_k=max(0, self.top_k or 0),
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            grammar=grammar,
        )

    def _stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if not all(stops):
            raise Refused("stop: an empty text would stop at once; leave it out", field="stop")
        return stops


class FunctionBody(Body):
    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Part(Body):
    """Of a content that is a list; `text_of` reads it."""

    type: Annotated[str, Field(max_length=64)]
    text: Text | None = None


class CallFunction(Body):
    name: Name
    arguments: Text | dict[str, Any] | None = None


def read(model: type[M], body: object) -> M:
    """The body as `model`, or Refused with the key that is wrong."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        wrong = [(_path(each, body), each["msg"]) for each in error.errors(include_url=False)]
        # Of what may have several forms, the one that was read the furthest is meant.
        path, message = max(wrong, key=lambda pair: len(pair[0]))
        field = ".".join(path) or "body"
        raise Refused(f"{field}: {message.removeprefix('Value error, ')}", field=field) from None


def _path(error: ErrorDetails, body: object) -> list[str]:
    """The keys of an error's location, without the names of the forms that were tried."""
    path: list[str] = []
    value = body
    for part in error["loc"]:
        if isinstance(value, list) and isinstance(part, int):
            path.append(str(part))
            value = cast("list[object]", value)[part]
        elif isinstance(value, dict) and part in value:
            path.append(str(part))
            value = cast("dict[object, object]", value)[part]
    return [*path, str(error["loc"][-1])] if error["type"] == "missing" else path


def tool_of(function: FunctionBody, where: str, key: str = "parameters") -> ToolSchema:
    """A client's tool; Refused for parameters that are no JSON schema of an object.

    `key`: where the dialect has them, below `where`.
    """
    parameters = function.parameters or {"type": "object", "properties": {}}
    field = f"{where}.{key}"
    check_schema(parameters, field)
    kind = parameters.get("type", "object")
    if kind != "object":
        raise Refused(f"{field}: a tool takes an object, not {kind!r}", field=field)
    return ToolSchema(
        name=function.name,
        description=function.description or "",
        parameters=parameters,
        timeout_s=_TOOL_S,
    )


def check_schema(schema: dict[str, Any], field: str) -> None:
    """Refused for what cannot be a JSON schema, by the shape of its keywords."""
    pending: list[tuple[str, object]] = [(field, schema)]
    seen = 0
    while pending:
        where, part = pending.pop()
        seen += 1
        if seen > 10_000:
            raise Refused(f"{field}: the schema has more than 10,000 parts", field=field)
        if isinstance(part, bool):
            continue
        if not isinstance(part, dict):
            raise Refused(f"{where}: a schema is an object, not {type(part).__name__}", field=where)
        pending += _inner(where, cast("dict[str, Any]", part))


_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})


def _inner(where: str, schema: dict[str, Any]) -> list[tuple[str, object]]:
    """The schemas within a schema, after a look at its own keywords."""
    kinds = schema.get("type", "object")
    for kind in cast("list[object]", kinds) if isinstance(kinds, list) else [kinds]:
        if kind not in _TYPES:
            raise Refused(f"{where}.type: {kind!r} is no type of JSON", field=f"{where}.type")
    required: object = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(n, str) for n in cast("list[object]", required)):
        raise Refused(f"{where}.required: give a list of names", field=f"{where}.required")
    named: object = schema.get("properties", {})
    if not isinstance(named, dict):
        raise Refused(f"{where}.properties: give an object", field=f"{where}.properties")
    found = [(f"{where}.properties.{key}", part) for key, part in cast("dict[str, object]", named).items()]
    if "items" in schema and not isinstance(schema["items"], list):
        found.append((f"{where}.items", schema["items"]))
    return found


def text_of(content: str | Sequence[Part] | None, field: str) -> str:
    """A content as one text; Refused for a part that is none."""
    if content is None or isinstance(content, str):
        return content or ""
    for index, part in enumerate(content):
        if part.type not in _TEXTS:
            where = f"{field}.{index}"
            raise Refused(f"{where}: this model reads text, not {part.type!r}", field=where)
    return "".join(part.text or "" for part in content)


def arguments_of(arguments: str | dict[str, Any] | None) -> str:
    if isinstance(arguments, dict):
        return json.dumps(arguments, ensure_ascii=False)
    return arguments or "{}"


def tool_message(
    content: str, call_id: str | None, past: Sequence[tuple[str, ToolCall]], name: str = ""
) -> Message:
    """A result, under the name of the tool that its call id is of."""
    of_call = next((call.name for id_, call in reversed(past) if id_ == call_id), "")
    return Message("tool", content, name=name or of_call)
