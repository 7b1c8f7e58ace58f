"""Scripted conversations as token sequences for supervised training, as a rollout would record them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sostenuto.records import Mask, Tokens
from sostenuto.runtime.rendering.renderer import Renderer
from sostenuto.tools.wire import ToolSchema
from sostenuto.types import Message


@dataclass(frozen=True, slots=True, eq=False)
class Demonstration:
    """`token_ids` (T,) int32; `mask` (T,) bool, True for the assistant's tokens with their terminators."""

    token_ids: Tokens
    mask: Mask


def demonstrate(
    renderer: Renderer, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()
) -> tuple[Demonstration, ...]:
    """Render a whole conversation as a rollout would have recorded it.

    One demonstration, or one for each branch where the template rewrites the history; every assistant turn
    is masked in exactly one.  ValueError when the conversation begins with or lacks an assistant turn.
    """
    turns = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if not turns or turns[0] == 0:
        raise ValueError("a demonstration needs a prompt and then an assistant's message")
    done: list[Demonstration] = []
    ids = [id_ for piece in renderer.start(messages[: turns[0]], tools) for id_ in piece.token_ids]
    mask = [False] * len(ids)
    for index, following in zip(turns, [*turns[1:], None], strict=True):
        turn = renderer.write(messages[:index], messages[index], tools)
        ids += turn
        mask += [True] * len(turn)
        if following is None:
            break
        extension = renderer.extend(
            messages[:index], messages[index], turn, context_ids=ids,
            new=messages[index + 1 : following], tools=tools,
        )  # fmt: skip
        if extension.rewritten:
            done.append(_freeze(ids, mask))
            ids, mask = [], []
        ids += extension.token_ids
        mask += [False] * len(extension.token_ids)
    return (*done, _freeze(ids, mask))


def _freeze(ids: list[int], mask: list[bool]) -> Demonstration:
    return Demonstration(np.asarray(ids, dtype=np.int32), np.asarray(mask, dtype=np.bool_))
