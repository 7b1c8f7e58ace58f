"""Renders with the model's own chat template, whatever it is.

A conversation goes on by rendering it whole and taking what comes after the turn's terminator; only that
text is encoded.  It counts as a continuation when the text before the turn is still what the turn was
sampled from and the turn's reasoning is still there; else the history was rewritten.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from sostenuto.errors import ConfigError
from sostenuto.records import Producer
from sostenuto.runtime.rendering import hermes
from sostenuto.runtime.rendering.calls import CallForm, hermes_form
from sostenuto.runtime.rendering.folder import ModelFolder
from sostenuto.runtime.rendering.hiding import hide_message, hide_tool, texts_of
from sostenuto.runtime.rendering.renderer import Extension, Piece, Turn
from sostenuto.runtime.rendering.template import ChatTemplate, Dialect, Translated
from sostenuto.runtime.rendering.vocabulary import Disguise, Vocabulary
from sostenuto.tools.wire import ToolSchema
from sostenuto.types import Message

_SENTINEL = 0x100000
"""First code point of private characters that stand for whole contents."""
_PROBE = "Zanzibar"


class TemplateRenderer:
    """A Renderer on a Jinja template and a tokenizer."""

    def __init__(
        self, folder: ModelFolder, vocabulary: Vocabulary, options: Mapping[str, Any] | None = None
    ) -> None:
        self._vocabulary = vocabulary
        self._template = ChatTemplate(folder.chat_template, folder.special_tokens, options)
        self.dialect = Dialect.probe(self._template)
        eos = folder.special_tokens.get("eos_token", "")
        self._terminator = self._find_terminator() or eos
        ids = (*folder.eos_token_ids, vocabulary.id_of(eos), vocabulary.id_of(self._terminator))
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(id_ for id_ in ids if id_ is not None))
        if not self.stop_token_ids:
            raise ConfigError(
                f"{folder.path}: nothing ends a turn; set eos_token_id in generation_config.json "
                "or eos_token in tokenizer_config.json"
            )

    def _find_terminator(self) -> str | None:
        """The first control token that the template writes after an assistant's content."""
        probe = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": _PROBE}]
        _, found, tail = self._template.attempt(probe).rpartition(_PROBE)
        controls = self._vocabulary.controls_in(tail) if found else []
        return controls[0][0] if controls else None

    def start(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[Piece]:
        disguise = self._disguise(messages, tools)
        told, functions = self._translate(messages, tools, disguise)
        text = self._text(told, functions, generate=True)
        skeleton = self._text(_with_sentinels(told, 0), functions, generate=True)
        return self._pieces(text, skeleton, told, disguise, continues=False)

    def parse(
        self,
        token_ids: Sequence[int],
        *,
        finished: bool,
        tools: Sequence[ToolSchema] = (),
    ) -> Turn:
        body = token_ids[:-1] if token_ids and token_ids[-1] in self.stop_token_ids else token_ids
        read = hermes.read(self._vocabulary.decode(body), thinking=self.dialect.opens_reasoning)
        problem = read.problem
        if problem and not finished:
            problem = f"The turn was cut off at its limit. {problem}"
        return Turn(Message("assistant", read.content, read.calls, read.reasoning), problem)

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
        past = (*before, turn)
        disguise = self._disguise((*past, *new), tools)
        told, functions = self._translate((*past, *new), tools, disguise)
        kept = len(self.dialect.translate(past, tools))
        begun = self._text(told[: kept - 1], functions, generate=True)
        text = self._text(told, functions, generate=True)
        end = self._end_of_turn(text, begun, disguise.hide(turn.reasoning), told, kept - 1, functions)
        if end is None:
            return Extension(tuple(self.start((*past, *new), tools)), rewritten=True)
        skeleton = self._text(_with_sentinels(told, kept), functions, generate=True)
        at_turn = text[:end]
        follows = skeleton[end:] if skeleton.startswith(at_turn) else ""
        pieces = self._suffix(text[end:], follows, told[kept:], disguise, sampled_ids)
        return Extension(tuple(pieces))

    def write(self, before: Sequence[Message], turn: Message, tools: Sequence[ToolSchema]) -> list[int]:
        disguise = self._disguise((*before, turn), tools)
        told, functions = self._translate((*before, turn), tools, disguise)
        begun = self._text(told[:-1], functions, generate=True)
        text = self._text(told, functions, generate=False)
        body = text[len(begun) :] if text.startswith(begun) else self._own_form(turn, disguise)
        stop = self._first_stop(body)
        body = body[: stop.end()] if stop else body.rstrip()
        ids = self._vocabulary.encode(body, disguise, continues=True)
        return ids if stop else [*ids, self.stop_token_ids[0]]

    @cached_property
    def call_form(self) -> CallForm | None:
        """As `FormsCalls` says."""
        marks = {hermes.THINK_OPEN, hermes.THINK_CLOSE}
        return hermes_form(
            opens_reasoning=self.dialect.opens_reasoning,
            marks_reasoning=marks <= self._vocabulary.control_ids.keys(),
        )

    def _own_form(self, turn: Message, disguise: Disguise) -> str:
        """A turn whose form in history does not begin with the generation prompt."""
        hidden = hide_message(turn, disguise)
        reasoning = hermes.write_reasoning(hidden.reasoning) if hidden.reasoning else ""
        if self.dialect.opens_reasoning:
            reasoning = f"{hidden.reasoning}\n{hermes.THINK_CLOSE}\n\n"
        return reasoning + hermes.write(hidden.content, hidden.tool_calls) + self._terminator

    def _disguise(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> Disguise:
        return self._vocabulary.disguise(texts_of(messages, tools))

    def _translate(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], disguise: Disguise
    ) -> tuple[list[Translated], list[dict[str, Any]]]:
        hidden_tools = [hide_tool(tool, disguise) for tool in tools]
        told = self.dialect.translate([hide_message(m, disguise) for m in messages], hidden_tools)
        given = hidden_tools if self.dialect.takes_tools else []
        return told, [tool.as_function() for tool in given]

    def _text(self, told: Sequence[Translated], functions: list[dict[str, Any]], *, generate: bool) -> str:
        return self._template.render([message for message, _ in told], functions, generate=generate)

    def _end_of_turn(
        self,
        text: str,
        begun: str,
        reasoning: str,
        told: Sequence[Translated],
        index: int,
        functions: list[dict[str, Any]],
    ) -> int | None:
        """Where the turn's terminator begins in `text`; None when the history was rewritten."""
        if not text.startswith(begun):
            return None
        stop = self._first_stop(text, len(begun))
        if stop:
            end = stop.start()
        else:
            marked = list(told)
            marked[index] = _with_content(told[index], chr(_SENTINEL))
            tail = self._text(marked, functions, generate=True).rpartition(chr(_SENTINEL))[2]
            end = len(text) - len(tail)
        return end if reasoning.strip() in text[len(begun) : end] else None

    def _first_stop(self, text: str, start: int = 0) -> re.Match[str] | None:
        return next((m for m in self._vocabulary.controls_in(text, start) if self._stops(m[0])), None)

    def _stops(self, control: str) -> bool:
        return self._vocabulary.control_ids[control] in self.stop_token_ids

    def _suffix(
        self,
        text: str,
        skeleton: str,
        told: Sequence[Translated],
        disguise: Disguise,
        sampled_ids: Sequence[int],
    ) -> list[Piece]:
        """`text` after the sampled tokens, without the terminator when the policy sampled one."""
        stop = self._first_stop(text)
        terminated = stop is not None and stop.start() == 0
        pieces = self._pieces(text, skeleton, told, disguise, continues=not terminated)
        if terminated and sampled_ids and sampled_ids[-1] in self.stop_token_ids:
            head = pieces[0].token_ids[1:]
            pieces[:1] = [Piece(pieces[0].producer, head)] if head else []
        return pieces

    def _pieces(
        self, text: str, skeleton: str, told: Sequence[Translated], disguise: Disguise, *, continues: bool
    ) -> list[Piece]:
        parts = _parts(text, skeleton, told)
        runs = self._vocabulary.encode_parts(
            text, [start for start, _ in parts], disguise, continues=continues
        )
        return [Piece(parts[index][1], ids) for index, ids in runs]


def _parts(text: str, skeleton: str, told: Sequence[Translated]) -> list[tuple[int, Producer]]:
    """Starts of the stretches of `text`, with their producers; all TEMPLATE where they cannot be told.

    `skeleton` is the same rendering with a sentinel for each content, in order.
    """
    whole = [(0, Producer.TEMPLATE)]
    between = _SENTINELS.split(skeleton)
    if len(between) != len(told) + 1 or not text.startswith(between[0]):
        return whole
    parts, position = list(whole), len(between[0])
    for (message, producer), after in zip(told, between[1:], strict=True):
        length = _length_of(str(message["content"]), after, text, position)
        if length is None:
            return whole
        if length and producer is not Producer.TEMPLATE:
            parts += [(position, producer), (position + length, Producer.TEMPLATE)]
        position += length + len(after)
    return parts


def _length_of(content: str, after: str, text: str, position: int) -> int | None:
    """How long a content is in `text`; templates strip it or not."""
    for form in (content, content.strip(), content.lstrip(), content.rstrip()):
        if text.startswith(form + after, position):
            return len(form)
    return None


_SENTINELS = re.compile(f"[{chr(_SENTINEL)}-{chr(_SENTINEL + 0xFFFD)}]")


def _with_content(told: Translated, content: str) -> Translated:
    return told._replace(message={**told.message, "content": content})


def _with_sentinels(told: Sequence[Translated], first: int) -> list[Translated]:
    marked = [_with_content(item, chr(_SENTINEL + i)) for i, item in enumerate(told[first:])]
    return [*told[:first], *marked]
