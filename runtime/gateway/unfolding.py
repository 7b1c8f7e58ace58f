"""The text of a turn while it is sampled: only what cannot change any more.

Whether a text becomes a tool call is known at its end, so what may begin one is held back.  What was told is
always the beginning of what the whole turn says; where a turn turns out otherwise, the rest is not told.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sostenuto.runtime.rendering.calls import FormsCalls
from sostenuto.runtime.rendering.renderer import Renderer, Turn
from sostenuto.runtime.rendering.spelled import PYTHON_TAG
from sostenuto.tools.wire import ToolSchema
from sostenuto.types import Message

OFTEN_S = 0.04
"""A turn is read anew no more often, as reading costs what it is long."""
_OPENERS = "<[{"
"""How the marks of tool calls and reasoning begin, in every family."""
_MARK = 32
"""No such mark is longer."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new."""

    reasoning: str = ""
    content: str = ""

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content)


class Unfolding:
    """Of one turn."""

    def __init__(
        self,
        renderer: Renderer,
        tools: Sequence[ToolSchema],
        now_s: Callable[[], float],
        *,
        stops: Sequence[str] = (),
    ) -> None:
        """`stops` are texts that end the turn and are no part of it."""
        self._renderer = renderer
        self._tools = tools
        self._stops = stops
        self._now_s = now_s
        self._read_s = float("-inf")
        self._call_begins = _unmarked(renderer) if tools else ""
        """What a text that is a call begins with, in a format without a mark for them."""
        self._token_ids: list[int] = []
        self._reasoning = ""
        self._content = ""

    def feed(self, token_ids: Sequence[int]) -> Delta:
        """What is certain with these tokens, beyond what was told."""
        self._token_ids += token_ids
        if self._now_s() < self._read_s + OFTEN_S:
            return Delta()
        self._read_s = self._now_s()
        turn = self._renderer.parse(self._token_ids, finished=False, tools=self._tools)
        if self._call_begins:
            turn = replace(turn, message=_before_call(turn.message, self._call_begins))
        return self._told(_certain(turn, self._stops))

    def end(self, turn: Turn) -> Delta:
        """The rest of the turn as it is known now."""
        return self._told(turn.message)

    def _told(self, message: Message) -> Delta:
        delta = Delta(_rest(message.reasoning, self._reasoning), _rest(message.content, self._content))
        self._reasoning += delta.reasoning
        self._content += delta.content
        return delta


def _unmarked(renderer: Renderer) -> str:
    form = renderer.call_form if isinstance(renderer, FormsCalls) else None
    return form.begin.lstrip()[:1] if form is not None and not form.trigger else ""


def _before_call(message: Message, begins: str) -> Message:
    """Without what may be a call as a whole."""
    content = message.content.partition(PYTHON_TAG)[0]
    return replace(message, content="" if content.startswith(begins) else content)


def _rest(text: str, told: str) -> str:
    return text[len(told) :] if text.startswith(told) else ""


def _certain(turn: Turn, stops: Sequence[str]) -> Message:
    """What of a turn that goes on will stand as it is."""
    message = turn.message
    content = message.content
    if message.tool_calls:
        # The text around calls is put together at the end.
        content = ""
    elif turn.problem is not None:
        content = content[: min((at for mark in _OPENERS if (at := content.find(mark)) >= 0), default=None)]
    return Message("assistant", _settled(content, stops), reasoning=_settled(message.reasoning, ()))


def _settled(text: str, stops: Sequence[str]) -> str:
    """Without what may be half a character, blanks that are stripped, or the beginning of a mark or stop."""
    last = max(text.rfind(mark) for mark in _OPENERS)
    if last >= max(0, len(text) - _MARK):
        text = text[:last]
    for stop in stops:
        text = text[: len(text) - overlap(text, stop)]
    return text.rstrip("\ufffd").rstrip()


def overlap(text: str, stop: str) -> int:
    """How much of the end of `text` may be the beginning of `stop`."""
    return next((n for n in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:n])), 0)
