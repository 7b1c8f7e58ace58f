"""A model's chat template, and what it does with a conversation, found by trying it.

Templates know more or less: some have no tool role, some refuse a system message, some drop earlier
reasoning.  `Dialect.probe` renders small conversations and looks at what came out; whatever the template
does not render itself is put into the text of a message, in Hermes form.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sostenuto.errors import ConfigError
from sostenuto.records import Producer
from sostenuto.runtime.rendering import hermes
from sostenuto.tools.wire import ToolSchema
from sostenuto.types import Message, ToolCall

_PRIVATE_ESCAPE = re.compile(r"\\u(e[0-9a-f]{3}|f[0-8][0-9a-f]{2})")

TemplateMessage = dict[str, Any]
_PRODUCERS = {"user": Producer.USER, "tool": Producer.ENVIRONMENT}


class Translated(NamedTuple):
    """A message for the template, and who its content comes from."""

    message: TemplateMessage
    producer: Producer


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    # Stand-ins of a disguise are private-use characters and must come through as themselves.
    return _PRIVATE_ESCAPE.sub(lambda match: chr(int(match[1], 16)), text) if ensure_ascii else text


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


class ChatTemplate:
    """A compiled template.  It sees plain values only, in a sandbox."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], options: Mapping[str, Any] | None = None
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        functions = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self._values = {**special_tokens, **(options or {})}
        try:
            self._template = environment.from_string(source, globals=functions)
        except TemplateError as exc:
            raise ConfigError(f"chat template: {exc}; use the template that came with the model") from exc

    def render(
        self,
        messages: Sequence[TemplateMessage],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        generate: bool,
    ) -> str:
        """Text of a conversation; ConfigError with the template's words when it refuses."""
        try:
            return self._template.render(
                messages=list(messages),
                tools=list(tools) or None,
                add_generation_prompt=generate,
                **self._values,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as exc:
            raise ConfigError(
                f"chat template: refuses this conversation ({exc}); "
                "change the roles and their order to what the template takes"
            ) from exc

    def attempt(self, messages: Sequence[TemplateMessage], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Text of a probe; empty when the template refuses it."""
        try:
            return self.render(messages, tools, generate=False)
        except ConfigError:
            return ""


_TEXT, _TOOL, _VALUE = "Zanzibar", "quetzal_tool", "Ouagadougou"
_USER: TemplateMessage = {"role": "user", "content": "Hello"}
_CALL = ToolCall(_TOOL, json.dumps({"city": _VALUE}))
_PROBE_TOOL = ToolSchema(
    name=_TOOL,
    description="Find a city.",
    parameters={"type": "object", "properties": {"city": {"type": "string", "description": "Name."}}},
    timeout_s=1.0,
)


@dataclass(frozen=True, slots=True)
class Dialect:
    """What the template renders by itself."""

    takes_system: bool
    takes_calls: bool
    """`tool_calls` come out in Hermes form."""
    takes_tools: bool
    takes_tool_role: bool
    takes_reasoning: bool
    """`reasoning_content` comes out, at least in the last turn."""
    opens_reasoning: bool
    """The generation prompt ends inside `<think>`."""

    @classmethod
    def probe(cls, template: ChatTemplate) -> "Dialect":
        """Try the template; ConfigError when it cannot render a user's message."""
        prompt = template.render([_USER], generate=True)
        if _USER["content"] not in prompt:
            raise ConfigError("chat template: does not render a user message; use the model's own template")
        calls = _takes_calls(template)
        plain = cls(
            takes_system=_TEXT in template.attempt([{"role": "system", "content": _TEXT}, _USER]),
            takes_calls=calls,
            takes_tools=calls and _TOOL in template.attempt([_USER], [_PROBE_TOOL.as_function()]),
            takes_tool_role=True,
            takes_reasoning=_takes_reasoning(template),
            opens_reasoning=prompt.rstrip().endswith(hermes.THINK_OPEN),
        )
        return replace(plain, takes_tool_role=_takes_tool_role(template, plain))

    def translate(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[Translated]:
        """Messages as the template takes them; what it does not render moves into the text."""
        if tools and not self.takes_tools:
            messages = _with_system_text(messages, hermes.describe(tools))
        if not self.takes_system:
            messages = _without_system(messages)
        count = 0
        translated: list[Translated] = []
        for message in messages:
            producer = _PRODUCERS.get(message.role, Producer.TEMPLATE)
            told = self._one(message, count)
            if self._joins(message, translated):
                told["content"] = f"{translated.pop().message['content']}\n{told['content']}"
            translated.append(Translated(told, producer))
            count += len(message.tool_calls)
        return translated

    def _joins(self, message: Message, before: Sequence[Translated]) -> bool:
        """Parallel results are one message where they come as the user's: roles may have to alternate."""
        in_a_row = bool(before) and before[-1].producer is Producer.ENVIRONMENT
        return message.role == "tool" and not self.takes_tool_role and in_a_row

    def _one(self, message: Message, calls_before: int) -> TemplateMessage:
        if message.role == "tool":
            return self._observation(message, calls_before)
        if message.role != "assistant":
            return {"role": message.role, "content": message.content}
        content = message.content
        if message.tool_calls and not self.takes_calls:
            content = hermes.write(content, message.tool_calls)
        if message.reasoning and not self.takes_reasoning:
            content = hermes.write_reasoning(message.reasoning) + content
        out: TemplateMessage = {"role": "assistant", "content": content}
        if message.reasoning and self.takes_reasoning:
            out["reasoning_content"] = message.reasoning
        if message.tool_calls and self.takes_calls:
            out["tool_calls"] = [_call(call, calls_before + i) for i, call in enumerate(message.tool_calls)]
        return out

    def _observation(self, message: Message, calls_before: int) -> TemplateMessage:
        if not self.takes_tool_role:
            return {"role": "user", "content": f"<tool_response>\n{message.content}\n</tool_response>"}
        out: TemplateMessage = {"role": "tool", "content": message.content}
        if message.name:
            out["name"] = message.name
        if calls_before:
            out["tool_call_id"] = f"call{calls_before - 1:05d}"
        return out


def _call(call: ToolCall, index: int) -> dict[str, Any]:
    """A call as templates take it: arguments as an object when they are one."""
    try:
        arguments: object = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = call.arguments
    if not isinstance(arguments, dict):
        arguments = call.arguments
    return {
        "type": "function",
        "id": f"call{index:05d}",
        "function": {"name": call.name, "arguments": arguments},
    }


def _takes_calls(template: ChatTemplate) -> bool:
    turn: TemplateMessage = {"role": "assistant", "content": "", "tool_calls": [_call(_CALL, 0)]}
    before = template.attempt([_USER])
    text = template.attempt([_USER, turn])
    body = text.removeprefix(before)
    start, end = body.find(hermes.CALL_OPEN), body.rfind(hermes.CALL_CLOSE)
    if start < 0 or end < 0:
        return False
    read = hermes.read(body[start : end + len(hermes.CALL_CLOSE)])
    return [(c.name, json.loads(c.arguments)) for c in read.calls] == [(_TOOL, {"city": _VALUE})]


def _takes_reasoning(template: ChatTemplate) -> bool:
    turn = {"role": "assistant", "content": _TEXT, "reasoning_content": _VALUE}
    text = template.attempt([_USER, turn])
    return _TEXT in text and _VALUE in text


def _takes_tool_role(template: ChatTemplate, dialect: Dialect) -> bool:
    messages = (
        Message("user", "Hello"),
        Message("assistant", "", (_CALL,)),
        Message("tool", _TEXT, name=_TOOL),
        Message("tool", _VALUE, name=_TOOL),
    )
    text = template.attempt([message for message, _ in dialect.translate(messages, ())])
    return _TEXT in text and _VALUE in text


def _with_system_text(messages: Sequence[Message], text: str) -> list[Message]:
    if messages and messages[0].role == "system":
        first = messages[0]
        return [replace(first, content=f"{first.content}\n\n{text}"), *messages[1:]]
    return [Message("system", text), *messages]


def _without_system(messages: Sequence[Message]) -> list[Message]:
    """Put the text of system messages before the message that follows."""
    out: list[Message] = []
    waiting: list[str] = []
    for message in messages:
        if message.role == "system":
            waiting.append(message.content)
        elif waiting and message.role == "user":
            out.append(replace(message, content="\n\n".join((*waiting, message.content))))
            waiting = []
        else:
            out.append(message)
    return out + [Message("user", text) for text in waiting]
