"""Which experts the tokens of one program's contexts were routed to, as its engines tell turn by turn."""

import base64
import binascii

import numpy as np

from sostenuto.errors import EngineError
from sostenuto.records import Experts
from sostenuto.runtime.engines.wire import RoutedExperts

_UNKNOWN = -1


class ExpertLog:
    """Of one conversation: by sequence, each from its first token on.

    What was told of a token first stays: it is what ran when the tokens behind it were sampled.
    """

    def __init__(self) -> None:
        self._closed: list[Experts | None] = []
        self._parts: list[Experts] = []
        self.tokens = 0
        """Of the current sequence."""

    def add(self, told: RoutedExperts, *, context: int) -> None:
        """Take in what an engine told of a context of so many tokens; EngineError when it cannot be."""
        experts = decoded(told)
        if told.start + len(experts) > context:
            raise EngineError(
                f"the engine returned experts up to {told.start + len(experts)} of {context} tokens"
            )
        if self._parts and experts.shape[1:] != self._parts[0].shape[1:]:
            raise EngineError(
                f"the engine returned experts of shape {experts.shape[1:]} a token, before "
                f"{self._parts[0].shape[1:]}"
            )
        gap = told.start - self.tokens
        if gap > 0:
            self._parts.append(np.full((gap, *experts.shape[1:]), _UNKNOWN, dtype=np.int16))
        new = experts[max(0, -gap) :]
        self._parts.append(new)
        self.tokens = max(self.tokens, told.start + len(experts))

    def close(self) -> None:
        """The sequence is over; the next one begins anew."""
        self._closed.append(self._current())
        self._parts, self.tokens = [], 0

    def sequences(self, count: int) -> tuple[Experts | None, ...]:
        """Of the first `count` sequences; empty when nothing was told of any."""
        found = (*self._closed, self._current())[:count]
        return found if any(part is not None for part in found) else ()

    def _current(self) -> Experts | None:
        return np.concatenate(self._parts) if self._parts else None


def decoded(told: RoutedExperts) -> Experts:
    """What an engine told, as (tokens, layers, experts a token); EngineError when it is not that."""
    try:
        data = base64.b64decode(told.data, validate=True)
        return np.frombuffer(data, dtype="<i2").astype(np.int16).reshape(told.shape)
    except (binascii.Error, ValueError) as exc:
        raise EngineError(f"the engine returned experts that are not {told.shape} numbers: {exc}") from exc
