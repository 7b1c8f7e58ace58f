"""Log-probabilities of tokens that somebody else chose.

A job is computed chunk by chunk between the engine's steps, on KV of its own outside the pool, so that
a long text does not stop the programs that decode.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from sostenuto.runtime.engines.embedded.adapters import Adapters
from sostenuto.runtime.engines.embedded.attention import Chunk, Step
from sostenuto.runtime.engines.embedded.distribution import tempered
from sostenuto.runtime.engines.embedded.lora import Adapter
from sostenuto.runtime.engines.embedded.model import Model
from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.runtime.engines.embedded.rows import TopLogprobs
from sostenuto.runtime.engines.embedded.sampling import chosen, most_probable
from sostenuto.runtime.engines.wire import ScoreReply, ScoreRequest
from sostenuto.types import Version

_CHUNK_TOKENS = 256


@dataclass(slots=True, eq=False)
class ScoreJob:
    """One request to score; the engine thread alone advances it."""

    request: ScoreRequest
    answer: Callable[[ScoreReply | Refusal], None]
    adapter: Adapter | None
    """What it is scored with, to its end."""
    _token_ids: torch.Tensor = field(init=False)
    _kv: tuple[torch.Tensor, torch.Tensor] | None = None
    _computed: int = 0
    _logprobs: list[float] = field(default_factory=list[float])
    _top: list[TopLogprobs] = field(default_factory=list[TopLogprobs])

    def __post_init__(self) -> None:
        self._token_ids = torch.tensor(self.request.token_ids)

    def restart(self) -> None:
        """Begin again: the weights are others now."""
        self._computed = 0
        self._logprobs.clear()
        self._top.clear()

    def advance(self, model: Model, adapters: Adapters, version: Version) -> bool:
        """Compute one chunk; True when that was the last one and the request is answered.

        `version`: of the model's weights.
        """
        total = len(self._token_ids) - 1  # nothing follows the last token
        start, end = self._computed, min(self._computed + _CHUNK_TOKENS, total)
        self._computed = end
        first = max(start, self.request.start - 1)
        with adapters.serving([(self.adapter, end - start)]):
            logits = self._forward(model, start, end, wanted=torch.arange(min(first, end - 1), end) - start)
        if first < end:
            self._take(logits, self._token_ids[first + 1 : end + 1].to(logits.device))
        if end < total:
            return False
        top = self._top if self.request.top_logprobs else None
        scored = (self.adapter and self.adapter.version) or version
        self.answer(ScoreReply(logprobs=self._logprobs, version=str(scored), top_logprobs=top))
        return True

    def _forward(self, model: Model, start: int, end: int, wanted: torch.Tensor) -> torch.Tensor:
        if self._kv is None:
            self._kv = model.shape.empty(len(self._token_ids))
        device = model.shape.device
        step = Step((), (Chunk(0, self._kv[0], self._kv[1], start, end - start),))
        ids = self._token_ids[start:end].to(device)
        return model.forward(ids, torch.arange(start, end, device=device), wanted.to(device), step)

    def _take(self, logits: torch.Tensor, targets: torch.Tensor) -> None:
        logprobs = tempered(logits, np.full(len(targets), self.request.temperature))
        self._logprobs.extend(chosen(logprobs, targets))
        if self.request.top_logprobs:
            self._top.extend(most_probable(logprobs, [self.request.top_logprobs] * len(targets)))
