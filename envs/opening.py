"""What `reset` returned, read strictly: how the conversation starts."""

from collections.abc import Sequence
from typing import cast

from sostenuto.errors import EnvironmentFailure
from sostenuto.types import Message

ROLES = ["system", "user", "assistant", "tool"]


def read_opening(returned: object, system: str, doing: str) -> tuple[Message, ...]:
    """A user message or a sequence of messages, after the system message if there is one.

    Anything else is an EnvironmentFailure, and so are two system messages.
    """
    messages = (
        (Message("user", encodable(returned)),) if isinstance(returned, str) else _read(returned, doing)
    )
    if not system:
        return messages
    if any(message.role == "system" for message in messages):
        raise EnvironmentFailure(f"{doing}: returned a system message, and the class has `system`; keep one")
    return (Message("system", system), *messages)


def encodable(text: str) -> str:
    """The text, with `?` for what UTF-8 cannot carry."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def _read(returned: object, doing: str) -> tuple[Message, ...]:
    items = tuple(cast("Sequence[object]", returned)) if isinstance(returned, Sequence) else ()
    messages = tuple(item for item in items if isinstance(item, Message))
    if not messages or len(messages) != len(items):
        raise EnvironmentFailure(
            f"{doing}: returned {returned!r:.80}; return a str (the first user message) or a list of Message"
        )
    for message in messages:
        if message.role not in ROLES:
            raise EnvironmentFailure(
                f"{doing}: a message has the role {message.role!r}; known: {sorted(ROLES)}"
            )
    return messages
