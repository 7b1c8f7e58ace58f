"""Renders families that the `renderers` library knows, with its parsers for their tool-call formats.

A family is used only for a folder on which it was tried: its rendering must equal the folder's own chat
template token by token on probe conversations, and its bridge must continue them exactly.  Texts are
disguised before the library sees them, and its tokenizer is ours, so special-token strings stay text.
"""

import json
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from importlib import import_module
from itertools import groupby
from typing import Any, Protocol, cast

from sostenuto.errors import ConfigError
from sostenuto.records import Producer
from sostenuto.runtime.rendering import hermes, spelled
from sostenuto.runtime.rendering.calls import TRIED_TOOLS, CallForm, read_form
from sostenuto.runtime.rendering.folder import ModelFolder
from sostenuto.runtime.rendering.hiding import hide_message, hide_tool, texts_of
from sostenuto.runtime.rendering.renderer import Extension, Piece, Turn
from sostenuto.runtime.rendering.template import ChatTemplate
from sostenuto.runtime.rendering.vocabulary import Disguise, Vocabulary
from sostenuto.tools.wire import ToolSchema
from sostenuto.types import Message, ToolCall

_FAMILIES = {
    "qwen3": ("qwen3", "prime-qwen3"),
    "qwen3_moe": ("qwen3",),
    "qwen3_5": ("qwen3.5", "qwen3.6", "qwen3.8"),
    "qwen3_5_moe": ("qwen3.5", "qwen3.6", "qwen3.8"),
    "qwen3_5_text": ("qwen3.5", "qwen3.6", "qwen3.8"),
    "glm4_moe": ("glm-4.5", "glm-5"),
    "glm4_moe_lite": ("glm-5",),
    "glm_moe_dsa": ("glm-5", "glm-5.1", "glm-5.3"),
    "minimax_m2": ("minimax-m2",),
    "deepseek_v3": ("deepseek-v3", "deepseek-r1"),
    "kimi_k2": ("kimi-k2",),
    "nemotron_h": ("nemotron-3", "nemotron-3-ultra", "nemotron-3.5"),
    "llama": ("llama-3",),
    "gpt_oss": ("gpt-oss",),
    "hunyuan_v3": ("hy3",),
}
"""Families of the library to try, by the model type of config.json."""

_PRODUCERS = {"user": Producer.USER, "tool": Producer.ENVIRONMENT}
_NOTHING_HIDDEN = Disguise(None, {}, {})
_disguise: ContextVar[Disguise] = ContextVar("disguise", default=_NOTHING_HIDDEN)


_Functions = list[dict[str, Any]] | None


class _Rendered(Protocol):
    token_ids: list[int]
    message_indices: list[int]


class _Family(Protocol):
    """The part of the library's Renderer that is used here."""

    def render(
        self, messages: list[dict[str, Any]], *, tools: _Functions, add_generation_prompt: bool = False
    ) -> _Rendered: ...

    def parse_response(self, token_ids: list[int], *, tools: _Functions, prompt_ids: list[int]) -> Any: ...  # noqa: ANN401

    def get_stop_token_ids(self) -> list[int]: ...

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[dict[str, Any]],
        *,
        tools: _Functions,
    ) -> _Rendered | None: ...


class _Tokenizer:
    """What the library asks of a tokenizer, on a Vocabulary."""

    def __init__(self, folder: ModelFolder, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.name_or_path = str(folder.path)
        self.unk_token_id = vocabulary.id_of(folder.special_tokens.get("unk_token", ""))
        self.eos_token_id = vocabulary.id_of(folder.special_tokens.get("eos_token", ""))
        self.chat_template = folder.chat_template
        self.all_special_tokens = list(vocabulary.control_ids)

    def encode(self, text: str, *_args: object, **_options: object) -> list[int]:
        return self._vocabulary.encode(text, _disguise.get())

    def decode(self, token_ids: int | Sequence[int], *_args: object, **_options: object) -> str:
        return self._vocabulary.decode([token_ids] if isinstance(token_ids, int) else token_ids)

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> Any:  # noqa: ANN401 - one id or a list
        if isinstance(tokens, str):
            return self._vocabulary.id_of(tokens)
        return [self._vocabulary.id_of(token) for token in tokens]


class LibraryRenderer:
    """A Renderer on one family of the library.  Pieces are cut per message."""

    def __init__(self, family: _Family, vocabulary: Vocabulary, *, wrapped_tools: bool) -> None:
        self._family = family
        self._vocabulary = vocabulary
        self._wrapped_tools = wrapped_tools
        self.stop_token_ids = tuple(family.get_stop_token_ids())
        self._prompt_ids = family.render(
            [{"role": "user", "content": "Hello"}], tools=None, add_generation_prompt=True
        ).token_ids

    def start(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[Piece]:
        with self._hidden(messages, tools) as (told, functions):
            rendered = self._render(told, functions, generate=True)
        return _pieces(rendered, messages, 0)

    def parse(self, token_ids: Sequence[int], *, finished: bool, tools: Sequence[ToolSchema] = ()) -> Turn:
        functions = [_function(tool, wrapped=self._wrapped_tools) for tool in tools] or None
        try:
            response = self._family.parse_response(
                list(token_ids), tools=functions, prompt_ids=self._prompt_ids
            )
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as exc:
            # The library's parsers meet whatever a policy samples; the turn is then plain text.
            text = self._vocabulary.decode(token_ids)
            return Turn(Message("assistant", text), f"The turn could not be read: {exc}")
        content, reasoning = str(response.content).strip(), str(response.reasoning_content or "").strip()
        read = _calls(response.tool_calls, tools)
        problem = _problem(response, read, finished=finished)
        calls = () if problem else tuple(call for found in read for call in found or ())
        if tools and not (problem or calls) and (tagged := spelled.python_tagged(content)) is not None:
            content, calls = tagged[0], tagged[1:]
        if problem and (again := self._read_as_text(token_ids, reasoning)) is not None:
            return again
        return Turn(Message("assistant", content, calls, reasoning), problem)

    def _read_as_text(self, token_ids: Sequence[int], reasoning: str) -> Turn | None:
        """A turn of Hermes' form, in which a mark inside of an argument is text; the library cuts there."""
        body = [token for token in token_ids if token not in self.stop_token_ids]
        text = self._vocabulary.decode(body)
        read = hermes.read(text.rpartition(hermes.THINK_CLOSE)[2])
        if read.problem or not read.calls:
            return None
        return Turn(Message("assistant", read.content, read.calls, reasoning))

    def extend(
        self,
        before: Sequence[Message],
        turn: Message,
        sampled_ids: Sequence[int],
        *,
        context_ids: Sequence[int],
        new: Sequence[Message],
        tools: Sequence[ToolSchema],
    ) -> Extension:
        context = list(context_ids)
        prompt, completion = context[: len(context) - len(sampled_ids)], list(sampled_ids)
        with self._hidden((*before, turn, *new), tools) as (told, functions):
            bridged = self._family.bridge_to_next_turn(
                prompt, completion, told[len(before) + 1 :], tools=functions
            )
        if bridged is None or bridged.token_ids[: len(context)] != context:
            return Extension(tuple(self.start((*before, turn, *new), tools)), rewritten=True)
        return Extension(tuple(_pieces(bridged, new, len(context))))

    def write(self, before: Sequence[Message], turn: Message, tools: Sequence[ToolSchema]) -> list[int]:
        with self._hidden((*before, turn), tools) as (told, functions):
            begun = self._render(told[:-1], functions, generate=True).token_ids
            whole = self._render(told, functions, generate=False).token_ids
        if whole[: len(begun)] != begun:
            raise ConfigError(
                "the model's template writes a finished turn differently from its generation prompt; "
                "this conversation cannot be a demonstration for it"
            )
        body = whole[len(begun) :]
        stops = [index for index, id_ in enumerate(body) if id_ in self.stop_token_ids]
        return body[: stops[0] + 1] if stops else [*body, self.stop_token_ids[0]]

    @cached_property
    def call_form(self) -> CallForm | None:
        """As `FormsCalls` says."""

        def written(before: tuple[Message, ...], turn: Message) -> str:
            token_ids = self.write(before, turn, ())
            ended = token_ids[-1] in self.stop_token_ids
            return self._vocabulary.decode(token_ids[:-1] if ended else token_ids)

        def parsed(text: str) -> Turn:
            token_ids = self._vocabulary.encode(text, continues=True)
            return self.parse([*token_ids, self.stop_token_ids[0]], finished=True, tools=TRIED_TOOLS)

        return read_form(written, parsed, self._vocabulary.units)

    def _render(self, told: list[dict[str, Any]], functions: _Functions, *, generate: bool) -> _Rendered:
        try:
            return self._family.render(told, tools=functions, add_generation_prompt=generate)
        except (ValueError, TypeError, KeyError) as exc:
            raise ConfigError(f"the model's template refuses this conversation: {exc}") from exc

    @contextmanager
    def _hidden(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> Generator[tuple[list[dict[str, Any]], _Functions]]:
        """Messages and tools as the library takes them, disguised; its tokenizer takes the disguise off."""
        disguise = self._vocabulary.disguise(texts_of(messages, tools))
        told = as_template_messages([hide_message(message, disguise) for message in messages])
        functions = [_function(hide_tool(tool, disguise), wrapped=self._wrapped_tools) for tool in tools]
        token = _disguise.set(disguise)
        try:
            yield told, functions or None
        finally:
            _disguise.reset(token)


def open_family(
    folder: ModelFolder, vocabulary: Vocabulary, template: ChatTemplate
) -> LibraryRenderer | None:
    """The family that renders as the folder's own template does, if there is one."""
    for name in _FAMILIES.get(folder.model_type, ()):
        for wrapped in (True, False):
            try:
                family = _create(name, _Tokenizer(folder, vocabulary))
                if _agrees(family, vocabulary, template, wrapped=wrapped):
                    return LibraryRenderer(family, vocabulary, wrapped_tools=wrapped)
            except Exception:  # noqa: BLE001 - a family that fails on a probe is not this folder's
                continue
    return None


def family_renderer(folder: ModelFolder, name: str) -> LibraryRenderer:
    """A family by its name, whatever the folder's own template says."""
    vocabulary = Vocabulary(folder.tokenizer_json)
    return LibraryRenderer(_create(name, _Tokenizer(folder, vocabulary)), vocabulary, wrapped_tools=True)


def _create(name: str, tokenizer: _Tokenizer) -> _Family:
    """The library is untyped, and slow to import for models that it does not know."""
    config = import_module("renderers.configs").config_from_name(name)
    return cast("_Family", import_module("renderers.base").create_renderer(tokenizer, config))


def _agrees(family: _Family, vocabulary: Vocabulary, template: ChatTemplate, *, wrapped: bool) -> bool:
    """Whether family and template give the same tokens, and the bridge the same continuation."""
    functions = [_PROBE_TOOL.as_function()]
    given = [_function(_PROBE_TOOL, wrapped=wrapped)]
    for messages in (_PROBE[:2], _PROBE[1:2], _PROBE):
        told = as_template_messages(messages)
        text = template.render(told, functions, generate=True)
        ids = family.render(told, tools=given, add_generation_prompt=True).token_ids
        if ids != vocabulary.encode(text):
            return False
    prompt = family.render(
        as_template_messages(_PROBE[:2]), tools=given, add_generation_prompt=True
    ).token_ids
    stops = family.get_stop_token_ids()
    close = next((i for i in range(len(prompt), len(ids)) if ids[i] in stops), None)
    if ids[: len(prompt)] != prompt or close is None:
        return False
    bridged = family.bridge_to_next_turn(
        prompt, ids[len(prompt) : close + 1], as_template_messages(_PROBE)[3:], tools=given
    )
    return bridged is not None and bridged.token_ids == ids


_PROBE = (
    Message("system", "You help."),
    Message("user", "Where is it?"),
    Message("assistant", "I look.", (ToolCall("find", '{"city": "Ouagadougou"}'),), "The tool knows."),
    Message("tool", "In Burkina Faso.", name="find"),
)
_PROBE_TOOL = ToolSchema(
    name="find",
    description="Find a city.",
    parameters={"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    timeout_s=1.0,
)


def _function(tool: ToolSchema, *, wrapped: bool) -> dict[str, Any]:
    function = tool.as_function()
    return dict(function) if wrapped else cast("dict[str, Any]", function["function"])


def as_template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages in the form of chat APIs, with arguments as objects and call ids in order."""
    out: list[dict[str, Any]] = []
    ids: list[str] = []
    answered = 0
    for message in messages:
        told: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.reasoning:
            told["reasoning_content"] = message.reasoning
        if message.tool_calls:
            told["tool_calls"] = [_told_call(call, len(ids) + i) for i, call in enumerate(message.tool_calls)]
            ids += [call["id"] for call in told["tool_calls"]]
        if message.role == "tool" and message.name:
            told["name"] = message.name
        if message.role == "tool" and answered < len(ids):
            told["tool_call_id"] = ids[answered]
            answered += 1
        out.append(told)
    return out


def _told_call(call: ToolCall, index: int) -> dict[str, Any]:
    try:
        arguments: object = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = call.arguments
    if not isinstance(arguments, dict):
        arguments = call.arguments
    function: dict[str, Any] = {"name": call.name, "arguments": arguments}
    return {"type": "function", "id": f"functions.{call.name}:{index}", "function": function}


def _calls(attempts: Sequence[Any], tools: Sequence[ToolSchema]) -> list[list[ToolCall] | None]:
    """Of each attempt of the library; None: it is malformed.  Of a text that several share: at the first."""
    read: list[list[ToolCall] | None] = []
    for raw, sharing in groupby(attempts, key=lambda attempt: (attempt.token_span, str(attempt.raw or ""))):
        alike = list(sharing)
        if spelled.is_spelled(raw[1]):
            read += [_reread(raw[1], alike, tools), *([] for _ in alike[1:])]
        else:
            read += [_call(attempt) for attempt in alike]
    return read


def _reread(text: str, attempts: Sequence[Any], tools: Sequence[ToolSchema]) -> list[ToolCall] | None:
    if any(attempt.status not in {"ok", "invalid_json"} for attempt in attempts):
        return None
    return spelled.reread(text, tools, [attempt.arguments for attempt in attempts])


def _call(attempt: Any) -> list[ToolCall] | None:  # noqa: ANN401 - the library's
    arguments = attempt.arguments
    if attempt.status != "ok":
        return None
    text = (
        arguments if isinstance(arguments, str) else hermes.written(arguments or {}, str(attempt.raw or ""))
    )
    return [ToolCall(str(attempt.name), text)]


def _problem(response: Any, read: Sequence[Sequence[ToolCall] | None], *, finished: bool) -> str | None:  # noqa: ANN401 - the library's
    bad = [(index, response.tool_calls[index]) for index, call in enumerate(read) if call is None]
    if bad:
        index, call = bad[0]
        reason = "arguments that are not whole" if call.status == "ok" else str(call.status).replace("_", " ")
        return f"Tool call {index + 1} is malformed ({reason}): {call.raw[:200]}"
    if finished and response.reasoning_complete is False:
        return "The turn ended inside its reasoning: close the reasoning before the answer."
    return None


def _pieces(rendered: _Rendered, messages: Sequence[Message], first: int) -> list[Piece]:
    pieces: list[Piece] = []
    for id_, index in zip(rendered.token_ids[first:], rendered.message_indices[first:], strict=True):
        producer = _PRODUCERS.get(messages[index].role) if index >= 0 else None
        if pieces and pieces[-1].producer is (producer or Producer.TEMPLATE):
            pieces[-1].token_ids.append(id_)
        else:
            pieces.append(Piece(producer or Producer.TEMPLATE, [id_]))
    return pieces
