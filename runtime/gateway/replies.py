"""What a client goes on from by naming a reply alone: conversations of programs that are there."""

from collections import OrderedDict
from dataclasses import dataclass

from sostenuto.runtime.gateway.turn import Refused
from sostenuto.types import Message, ToolCall


@dataclass(frozen=True, slots=True)
class Past:
    """A conversation that ends with a reply."""

    messages: tuple[Message, ...] = ()
    calls: tuple[tuple[str, ToolCall], ...] = ()
    """Of its assistant, with the ids by which the client knows them."""

    @property
    def characters(self) -> int:
        return sum(len(message.content) + len(message.reasoning) for message in self.messages)


class Replies:
    """Of one program.  The oldest are forgotten; the newest never."""

    def __init__(self, *, kept: int = 32, characters: int = 1_000_000) -> None:
        """At most so many conversations, of so many characters together."""
        self._kept = kept
        self._characters = characters
        self._pasts: OrderedDict[str, Past] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pasts)

    def keep(self, id_: str, past: Past) -> None:
        self._pasts[id_] = past
        while len(self._pasts) > 1 and self._is_full():
            self._pasts.popitem(last=False)

    def find(self, id_: str) -> Past | None:
        return self._pasts.get(id_)

    def _is_full(self) -> bool:
        total = sum(past.characters for past in self._pasts.values())
        return len(self._pasts) > self._kept or total > self._characters


def past_of(replies: Replies | None, id_: str) -> Past:
    """The conversation that ends with the reply; "" is none.  Refused for one that is not there.

    `replies`: of the program that asks; None when it is not here.
    """
    if not id_:
        return Past()
    past = replies.find(id_) if replies is not None else None
    if past is None:
        raise Refused(
            f"previous_response_id: {id_[:80]!r} is not here; a reply is kept while its program is, so name "
            "the program in every call (by a key of its own, /p/ID/v1 or X-Program-Id), or send the whole "
            "conversation as input",
            field="previous_response_id",
            code="previous_response_not_found",
        )
    return past
