"""Where one turn is in its grammar."""

import time

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from sostenuto.runtime.engines.embedded.grammar.matching import said

_LOOK_S = 0.25
"""Processor time within which it has to be known what is allowed next; other requests wait for it."""
_STUCK = "nothing that could follow can be written with the tokens that there are"


class Guide:
    """`allowed` is what may follow; after each token that is sampled, `take` it.

    A stop token is allowed exactly when the grammar is complete.  Where the request has none, the turn
    `is_over` when the grammar is complete and nothing can follow.
    """

    def __init__(self, matcher: LLMatcher, size: int, stop_ids: frozenset[int]) -> None:
        """A matcher at its start over tokens below `size`, and its own end after them."""
        self._matcher = matcher
        self._size = size
        self._stop_ids = sorted(token for token in stop_ids if token < size)
        self.allowed: NDArray[np.int32]
        """Bit t % 32 of word t // 32 is token t."""
        self.problem: str | None = None
        """Why the turn cannot go on."""
        self.is_over = False
        self._look()

    def take(self, token: int) -> None:
        """Go on by one token that was allowed."""
        if token in self._stop_ids:
            return
        if self._matcher.consume_token(token):
            self._look()
        else:
            self.problem = self._said()

    def tokens(self) -> list[int]:
        """All that are allowed."""
        return np.flatnonzero(np.unpackbits(self.allowed.view(np.uint8), bitorder="little")).tolist()

    def _look(self) -> None:
        started_s = time.thread_time()
        self.allowed = np.frombuffer(self._matcher.compute_bitmask(), dtype="<i4").copy()
        if self._matcher.is_error():
            self.problem = self._said()
            return
        is_complete = self._put(self._size, False)
        for token in self._stop_ids:
            self._put(token, is_complete)
        is_stuck = not self.allowed.any()
        self.is_over = is_stuck and is_complete
        if is_stuck and not is_complete:
            self.problem = _STUCK
        elif time.thread_time() - started_s > _LOOK_S:
            self.problem = f"it takes longer than {_LOOK_S:g} s to find what may follow"

    def _said(self) -> str:
        error = said(self._matcher.get_error())
        return _STUCK if error.startswith("NoExtension") else error or "the token is not allowed"

    def _put(self, token: int, value: bool) -> bool:
        """Set whether a token is allowed; returns whether it was."""
        word, bit = self.allowed[token // 32 :][:1].view(np.uint32), np.uint32(1 << (token % 32))
        was = bool(word[0] & bit)
        word[0] = word[0] | bit if value else word[0] & ~bit
        return was
