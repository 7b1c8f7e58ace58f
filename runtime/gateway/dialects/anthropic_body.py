"""A request of Anthropic's Messages API: its keys, and its content blocks as messages.

A message of theirs may be several of ours: results of tools stand inside the user's message there.
"""

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import Field

from sostenuto.runtime.engines.wire import Grammar, Sampling
from sostenuto.runtime.gateway.bodies import Body, FunctionBody, Name, Text, tool_message, tool_of
from sostenuto.runtime.gateway.choosing import Choice, chosen, strict_of
from sostenuto.runtime.gateway.turn import Refused
from sostenuto.tools.wire import ToolSchema
from sostenuto.types import Message, ToolCall

_VOLATILE = "x-anthropic-billing-header:"
"""Begins a system block of Claude Code that is another one in each call: nobody's text, and with it no
conversation would go on from its last call."""

Calls = list[tuple[str, ToolCall]]


class Block(Body):
    """Of a content; which keys count depends on `type`."""

    type: Annotated[str, Field(max_length=64)]
    text: Text | None = None
    thinking: Text | None = None
    id: Text | None = None
    name: Annotated[str, Field(max_length=128)] | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Text | None = None
    content: "Text | list[Block] | None" = None


class MessageBody(Body):
    role: Literal["user", "assistant", "system"]
    content: Text | list[Block]


class ToolBody(Body):
    type: Annotated[str, Field(max_length=64)] | None = None
    name: Name
    description: Text | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ChoiceBody(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingBody(Body):
    type: Literal["enabled", "adaptive", "disabled"]


class PromptBody(Body):
    """What decides over the prompt; all that is counted."""

    model: Text | None = None
    messages: Annotated[list[MessageBody], Field(min_length=1, max_length=20_000)]
    system: Text | list[Block] | None = None
    tools: Annotated[list[ToolBody], Field(max_length=1024)] | None = None
    tool_choice: ChoiceBody | None = None

    def conversation(self) -> tuple[Message, ...]:
        """Refused for a block that is no text, and for a last message of the assistant."""
        messages = _system(self.system)
        calls: Calls = []
        for index, body in enumerate(self.messages):
            messages += _messages_of(body, f"messages.{index}.content", calls)
        if messages[-1].role not in {"user", "tool"}:
            raise Refused(
                "messages: the last one must be the user's, for the model to answer it", field="messages"
            )
        return tuple(messages)

    def choice(self) -> Choice:
        """Refused for a tool that is none, and for a choice of one that is not there."""
        given, wanted = self.tools or (), self.tool_choice or ChoiceBody(type="auto")
        tools = tuple(_tool(tool, f"tools.{index}") for index, tool in enumerate(given))
        strict = strict_of((tool.name, tool.strict) for tool in given)
        if wanted.type == "tool":
            return chosen(tools, "required", [wanted.name or ""], several=False, strict=strict)
        kind = "required" if wanted.type == "any" else wanted.type
        return chosen(tools, kind, several=not wanted.disable_parallel_tool_use, strict=strict)


class MessagesBody(PromptBody):
    max_tokens: Annotated[int, Field(gt=0, le=2**31 - 1)]
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    stop_sequences: Annotated[list[Text], Field(max_length=16)] | None = None
    stream: bool | None = None
    thinking: ThinkingBody | None = None

    @property
    def shows_thinking(self) -> bool:
        """Only who asks for it expects blocks before the text."""
        return self.thinking is not None and self.thinking.type != "disabled"

    def sampling(self, stop_token_ids: Sequence[int], grammar: Grammar | None = None) -> Sampling:
        stops = tuple(self.stop_sequences or ())
        if not all(stops):
            raise Refused("stop_sequences: an empty one would stop at once", field="stop_sequences")
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            stop_token_ids=tuple(stop_token_ids),
            stop_strings=stops,
            top_k=max(0, self.top_k or 0),
            top_p=1.0 if self.top_p is None else self.top_p,
            grammar=grammar,
        )


def _system(system: str | Sequence[Block] | None) -> list[Message]:
    blocks = [Block(type="text", text=system)] if isinstance(system, str) else system or []
    _check(blocks, "system")
    text = _text(block for block in blocks if not (block.text or "").startswith(_VOLATILE))
    return [Message("system", text)] if text else []


def _messages_of(body: MessageBody, where: str, calls: Calls) -> list[Message]:
    if isinstance(body.content, str):
        return [Message(body.role, body.content)]
    if body.role == "assistant":
        return [_assistant(body.content, where, calls)]
    return _users(body.role, body.content, where, calls)


def _assistant(blocks: Sequence[Block], where: str, calls: Calls) -> Message:
    _check(blocks, where, "tool_use", "thinking", "redacted_thinking")
    made = [
        (block.id or "", _call(block, f"{where}.{index}"))
        for index, block in enumerate(blocks)
        if block.type == "tool_use"
    ]
    calls += made
    reasoning = "\n".join(block.thinking or "" for block in blocks if block.type == "thinking")
    text = _text(block for block in blocks if block.type == "text")
    return Message("assistant", text, tuple(call for _, call in made), reasoning)


def _users(role: str, blocks: Sequence[Block], where: str, calls: Calls) -> list[Message]:
    """In their order: each result of a tool, and what is said between them."""
    _check(blocks, where, "tool_result")
    messages: list[Message] = []
    for is_result, group in groupby(enumerate(blocks), lambda pair: pair[1].type == "tool_result"):
        if is_result:
            messages += [_result(block, f"{where}.{index}.content", calls) for index, block in group]
        else:
            messages.append(Message(role, _text(block for _, block in group)))
    return messages or [Message(role, "")]


def _result(block: Block, where: str, calls: Calls) -> Message:
    inner = block.content
    if inner is not None and not isinstance(inner, str):
        _check(inner, where)
        inner = _text(inner)
    return tool_message(inner or "", block.tool_use_id, calls)


def _call(block: Block, where: str) -> ToolCall:
    if not block.name:
        raise Refused(f"{where}.name is missing", field=f"{where}.name")
    return ToolCall(block.name, json.dumps(block.input or {}, ensure_ascii=False))


def _check(blocks: Sequence[Block], where: str, *allowed: str) -> None:
    """Refused for a block that is neither text nor one of those allowed."""
    for index, block in enumerate(blocks):
        if block.type != "text" and block.type not in allowed:
            field = f"{where}.{index}"
            raise Refused(f"{field}: this model reads text, not {block.type!r}", field=field)


def _text(blocks: Iterable[Block]) -> str:
    return "\n".join(block.text or "" for block in blocks)


def _tool(tool: ToolBody, where: str) -> ToolSchema:
    if tool.input_schema is None:
        raise Refused(
            f"{where}.input_schema is missing; tools of others, such as {tool.type or tool.name!r}, "
            "do not run here",
            field=f"{where}.input_schema",
        )
    function = FunctionBody(name=tool.name, description=tool.description, parameters=tool.input_schema)
    return tool_of(function, where, "input_schema")
