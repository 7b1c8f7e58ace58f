"""An answer in events: tokens as they come, and in the end the whole of it.

Each event repeats everything so far, or carries only what is new (`--incremental-streaming-output`).
"""

from typing import Any

from sostenuto.errors import EngineError
from sostenuto.runtime.engines.http import Answer
from sostenuto.runtime.engines.sglang.replies import Event, Generated, MetaInfo
from sostenuto.runtime.engines.telling import Telling

_SLICED = (
    "output_token_logprobs",
    "output_top_logprobs",
    "output_token_sampling_mask",
    "output_token_sampling_logprobs",
)
"""What an incremental event has only of its own tokens."""


class Stream:
    """Of one request."""

    def __init__(self, telling: Telling, where: str, *, is_incremental: bool) -> None:
        self._telling = telling
        self._where = where
        self._is_incremental = is_incremental
        self._ids: list[int] = []
        self._said: dict[str, list[Any]] = {}
        self._last: MetaInfo | None = None

    def take(self, answer: Answer) -> None:
        """One event."""
        event = answer.read(Event)
        if event.error is not None:
            raise EngineError(f"{self._where}: {event.error.message}")
        if event.meta_info is None or event.output_ids is None:
            raise EngineError(
                f"{self._where}: an event without tokens; is its version one that the adapter knows?"
            )
        before = len(self._ids)
        if self._is_incremental:
            self._ids += event.output_ids
            for name in _SLICED:
                self._said.setdefault(name, []).extend(getattr(event.meta_info, name) or [])
        else:
            self._ids = event.output_ids
            self._said = {name: getattr(event.meta_info, name) for name in _SLICED}
        self._last = event.meta_info
        self._tell(before)

    def whole(self) -> Generated:
        """All of it, as if it had come at once; EngineError when nothing came."""
        if self._last is None:
            raise EngineError(f"{self._where}: it ended without a token; look into the engine's log")
        said = {name: value or None for name, value in self._said.items()}
        said["output_token_logprobs"] = said["output_token_logprobs"] or []
        return Generated(output_ids=self._ids, meta_info=self._last.model_copy(update=said))

    def _tell(self, before: int) -> None:
        """Hand on the tokens from position `before`."""
        tokens = self._ids[before:]
        values = [value for value, _, _ in (self._said["output_token_logprobs"] or [])[before:]]
        if len(values) != len(tokens) or None in values:
            raise EngineError(
                f"{self._where}: {len(tokens)} tokens came with log-probabilities {values[:4]}; "
                "is its version one that the adapter knows?"
            )
        self._telling.tell(tokens, values)
