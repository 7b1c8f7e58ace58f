"""What the surfaces for prompts that are no chat have in common."""

from collections.abc import Mapping, Sequence
from typing import cast

from sostenuto.runtime.engines.wire import FinishReason
from sostenuto.runtime.gateway.dialects.dialect import Json, Served
from sostenuto.runtime.gateway.turn import Ask, Refused, Told

_CHOICES = 128
"""Of one request, over all its prompts."""


def prompts_of(prompt: object, served: Served, field: str) -> list[tuple[int, ...]]:
    """The prompts as tokens: one text, the token ids of one, or a list of either."""
    if not isinstance(prompt, list):
        return [_prompt_of(prompt, served, field)]
    items = cast("list[object]", prompt)
    if not items or _are_ids(items):
        return [token_prompt(items, served, field)]
    return [_prompt_of(item, served, f"{field}.{index}") for index, item in enumerate(items)]


def _prompt_of(prompt: object, served: Served, field: str) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return text_prompt(prompt, served, field)
    if isinstance(prompt, list):
        return token_prompt(cast("list[object]", prompt), served, field)
    raise Refused(f"{field}: give a text or a list of token ids", field=field)


def text_prompt(text: str, served: Served, field: str) -> tuple[int, ...]:
    """Refused for an empty one.  Control tokens in it stay text."""
    token_ids = served.texts.encode(text)
    if not token_ids:
        raise Refused(f"{field}: it is empty; there is nothing to go on from", field=field)
    return tuple(token_ids)


def token_prompt(items: Sequence[object], served: Served, field: str) -> tuple[int, ...]:
    """Refused for none, and for what is no token of the model."""
    if not items or not _are_ids(items):
        raise Refused(f"{field}: give one token id or more", field=field)
    token_ids = cast("Sequence[int]", items)
    wrong = next((id_ for id_ in (min(token_ids), max(token_ids)) if not 0 <= id_ < served.texts.end), None)
    if wrong is not None:
        raise Refused(
            f"{field}: the model has no token {wrong}; its ids end below {served.texts.end}", field=field
        )
    return tuple(token_ids)


def _are_ids(items: Sequence[object]) -> bool:
    """Without booleans, which are integers, too."""
    return set(map(type, items)) == {int}


def check_choices(prompts: int, choices: int, field: str) -> None:
    """Refused for more than one request may ask for."""
    if prompts * choices > _CHOICES:
        raise Refused(
            f"{field}: {prompts} prompts and {choices} choices of each are over {_CHOICES} samples; "
            "send several requests",
            field=field,
        )


def refuse(given: Json, neutral: Mapping[str, object], *, within: str = "") -> None:
    """Refused for keys that are not supported, unless their value asks for nothing."""
    for key, nothing in neutral.items():
        value = given.get(key)
        if value is not None and value != nothing:
            field = f"{within}{key}"
            raise Refused(f"{field} is not supported here; leave it out", field=field)


def text_of(told: Told, ask: Ask, served: Served, *, special: bool) -> str:
    """The reply's text, without what ended it.  `special`: with special tokens."""
    reply = told.reply
    token_ids = reply.token_ids
    if reply.finish_reason is not FinishReason.STOP:
        return served.texts.decode(token_ids, special=special)
    if isinstance(reply.matched, str):
        return served.texts.decode(token_ids, special=special).partition(reply.matched)[0]
    if token_ids and token_ids[-1] in ask.sampling.stop_token_ids:
        token_ids = token_ids[:-1]
    return served.texts.decode(token_ids, special=special)
