"""Conversations of simulated programs as token ids.  A message's content says which ids it is."""

from collections.abc import Iterable, Sequence

from sostenuto.records import Producer
from sostenuto.runtime.rendering.renderer import Extension, Piece, Turn
from sostenuto.tools.wire import ToolSchema
from sostenuto.types import Message, ToolCall


def content_of(runs: Iterable[tuple[int, int]]) -> str:
    """What a message says that is rendered as `(count, id)` after `(count, id)`."""
    return " ".join(f"{count}*{id_}" for count, id_ in runs)


class SyntheticRenderer:
    """A turn is read from its last token, which names the tool; see `script`."""

    stop_token_ids: tuple[int, ...] = ()

    def __init__(self, tool_names: Sequence[str]) -> None:
        answer = Turn(Message("assistant", ""))
        calls = (Turn(Message("assistant", "", (ToolCall(name, "{}"),))) for name in tool_names)
        self._turns = (answer, *calls)

    def start(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[Piece]:
        del tools
        return [Piece(Producer.USER, _ids(message)) for message in messages]

    def parse(self, token_ids: Sequence[int], *, finished: bool, tools: Sequence[ToolSchema] = ()) -> Turn:
        del finished, tools
        # A turn that was interrupted names none yet.
        return self._turns[token_ids[-1] if token_ids[-1] < len(self._turns) else 0]

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
        del before, turn, sampled_ids, context_ids, tools
        return Extension(tuple(Piece(Producer.ENVIRONMENT, _ids(message)) for message in new))

    def write(self, before: Sequence[Message], turn: Message, tools: Sequence[ToolSchema]) -> list[int]:
        del before, tools
        name = turn.tool_calls[0].name if turn.tool_calls else ""
        calls = [call.message.tool_calls for call in self._turns]
        return [next(index for index, made in enumerate(calls) if (made[0].name if made else "") == name)]


def _ids(message: Message) -> list[int]:
    ids: list[int] = []
    for run in message.content.split():
        count, _, id_ = run.partition("*")
        ids += [int(id_)] * int(count)
    return ids
