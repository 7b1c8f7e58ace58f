"""A request of OpenAI's Responses API: its keys, and its items as messages.

One turn of the policy is several items there, one for its reasoning, its text and each of its calls; side by
side they are one message again.
"""

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import Field

from sostenuto.runtime.engines.wire import Grammar
from sostenuto.runtime.gateway.bodies import (
    Body,
    Count,
    FunctionBody,
    Name,
    Part,
    SamplingBody,
    Text,
    arguments_of,
    check_schema,
    text_of,
    tool_message,
    tool_of,
)
from sostenuto.runtime.gateway.choosing import Choice, chosen, strict_of
from sostenuto.runtime.gateway.replies import Past
from sostenuto.runtime.gateway.turn import Refused
from sostenuto.tools.wire import ToolSchema
from sostenuto.types import Message, ToolCall

LOGPROBS = "message.output_text.logprobs"
_CANNOT = {
    "background": "a call is answered while its client waits; leave it out",
    "conversation": "conversations are not kept by name; use previous_response_id, or send all as input",
    "prompt": "no prompts are kept here; send instructions and input",
}


class ItemBody(Body):
    """Which keys count depends on `type`; without one it is a message."""

    type: Annotated[str, Field(max_length=64)] | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Text | list[Part] | None = None
    summary: list[Part] | None = None
    call_id: Text | None = None
    name: Name | None = None
    arguments: Text | None = None
    output: Text | list[Part] | None = None

    @property
    def is_said(self) -> bool:
        """By the policy."""
        return self.type in {"reasoning", "function_call"} or self.role == "assistant"


class ToolBody(Body):
    type: Annotated[str, Field(max_length=64)]
    name: Name | None = None
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedBody(Body):
    name: Text | None = None


class ChoiceBody(Body):
    """One tool, or the tools that are allowed."""

    type: Literal["function", "allowed_tools"]
    name: Text | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[NamedBody] | None = None


class FormatBody(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")


class TextBody(Body):
    format: FormatBody | None = None


class ResponsesBody(SamplingBody):
    model: Text | None = None
    input: Text | Annotated[list[ItemBody], Field(max_length=20_000)] | None = None
    instructions: Text | None = None
    previous_response_id: Text | None = None
    tools: Annotated[list[ToolBody], Field(max_length=1024)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChoiceBody | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, Field(gt=0, le=2**31 - 1)] | None = None
    text: TextBody | None = None
    include: list[Text] | None = None
    top_logprobs: Annotated[Count, Field(le=20)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    stream: bool | None = None
    background: Any = None
    conversation: Any = None
    prompt: Any = None

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def check(self) -> None:
        """Refused for what cannot be done here."""
        for field, why in _CANNOT.items():
            if getattr(self, field):
                raise Refused(f"{field}: {why}", field=field)
        if self.truncation == "auto":
            raise Refused(
                "truncation: nothing is left out of a conversation here; shorten the input yourself",
                field="truncation",
            )

    def grammar(self) -> Grammar | None:
        """What the text must be; Refused for a schema that is none."""
        format_ = self.text.format if self.text else None
        if format_ is None or format_.type == "text":
            return None
        schema: dict[str, Any] = {"type": "object"}
        if format_.type == "json_schema":
            if format_.json_schema is None:
                raise Refused("text.format.schema is missing", field="text.format.schema")
            schema = format_.json_schema
            check_schema(schema, "text.format.schema")
        return Grammar(json_schema=json.dumps(schema))

    def choice(self) -> Choice:
        """Refused for a tool that is none, and for a choice of one that is not there."""
        given, wanted = self.tools or (), self.tool_choice
        tools = tuple(_tool(tool, f"tools.{index}") for index, tool in enumerate(given))
        strict = strict_of((tool.name, tool.strict) for tool in given)
        several = self.parallel_tool_calls is not False
        if not isinstance(wanted, ChoiceBody):
            return chosen(tools, wanted or "auto", several=several, strict=strict)
        if wanted.type == "function":
            return chosen(tools, "required", [wanted.name or ""], several=False, strict=strict)
        names = [tool.name or "" for tool in wanted.tools or ()]
        return chosen(tools, wanted.mode, names, several=several, strict=strict)

    def gone_on(self, past: Past) -> Past:
        """The past and what is new, without the instructions; Refused for an item that cannot be read."""
        items = [ItemBody(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        found = _gone_on(past, items or ())
        if not found.messages or found.messages[-1].role == "assistant":
            raise Refused(
                "input: its last item must be of a user or a tool, for the model to answer it", field="input"
            )
        return found


def _gone_on(past: Past, items: Sequence[ItemBody]) -> Past:
    messages, calls = list(past.messages), list(past.calls)
    for is_said, group in groupby(enumerate(items), lambda pair: pair[1].is_said):
        named = [(f"input.{index}", item) for index, item in group]
        if is_said:
            made = [_call(item, where) for where, item in named if item.type == "function_call"]
            calls += made
            messages.append(_turn(named, (call for _, call in made)))
        else:
            messages += [_given(item, where, calls) for where, item in named]
    return Past(tuple(messages), tuple(calls))


def _turn(named: Sequence[tuple[str, ItemBody]], calls: Iterable[ToolCall]) -> Message:
    texts = [text_of(i.content, f"{where}.content") for where, i in named if i.role == "assistant"]
    reasoning = "\n".join(_reasoning(item) for _, item in named if item.type == "reasoning")
    return Message("assistant", "".join(texts), tuple(calls), reasoning)


def _reasoning(item: ItemBody) -> str:
    if isinstance(item.content, str):
        return item.content
    return "\n".join(part.text or "" for part in item.content or item.summary or ())


def _given(item: ItemBody, where: str, calls: Sequence[tuple[str, ToolCall]]) -> Message:
    if item.type == "function_call_output":
        return tool_message(text_of(item.output, f"{where}.output"), item.call_id, calls)
    if item.type not in {None, "message"}:
        field = f"{where}.type"
        remedy = "send the item itself" if item.type == "item_reference" else "leave it out"
        raise Refused(f"{field}: items of type {item.type!r} cannot be read here; {remedy}", field=field)
    if item.role is None:
        raise Refused(f"{where}.role is missing", field=f"{where}.role")
    role = "system" if item.role == "developer" else item.role
    return Message(role, text_of(item.content, f"{where}.content"))


def _call(item: ItemBody, where: str) -> tuple[str, ToolCall]:
    if item.name is None:
        raise Refused(f"{where}.name is missing", field=f"{where}.name")
    return item.call_id or "", ToolCall(item.name, arguments_of(item.arguments))


def _tool(tool: ToolBody, where: str) -> ToolSchema:
    if tool.type != "function":
        field = f"{where}.type"
        raise Refused(f"{field}: no tools of type {tool.type!r} here; give functions", field=field)
    if tool.name is None:
        raise Refused(f"{where}.name is missing", field=f"{where}.name")
    function = FunctionBody(name=tool.name, description=tool.description, parameters=tool.parameters)
    return tool_of(function, where)
