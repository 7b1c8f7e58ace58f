"""Which requests are guessed for in a step, how far, and what came of it.

- A guess takes a place in the pool only while it is spare: nobody loses KV for one.
- Guesses live for one step: after it a request has the tokens that were drawn and no others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sostenuto.runtime.engines.embedded.packing import Plan
from sostenuto.runtime.engines.embedded.pool import Pool
from sostenuto.runtime.engines.embedded.speculation.acceptance import Acceptance
from sostenuto.runtime.engines.embedded.speculation.lengths import best_lengths
from sostenuto.runtime.engines.embedded.turn import Turn
from sostenuto.runtime.engines.wire import Guesses, Speculation
from sostenuto.types import Version

_PRIOR = 0.6
_REQUEST_KEPT = 0.97
"""Of a request's evidence, from step to step: it is tried again after some dozens of steps."""
_SOURCE_KEPT = 0.999


class Source(Protocol):
    """Where guesses come from."""

    name: str

    @property
    def weights(self) -> torch.nn.Module | None:
        """What publications of a drafter change."""
        ...

    def ready(self, turn: Turn, most: int) -> int:
        """How many tokens it can draft for `turn`, at most `most`."""
        ...

    def token_s(self, rows: int) -> float:
        """What one guess costs when `rows` requests are guessed for."""
        ...

    def draft(self, chosen: Sequence[tuple[Turn, int]]) -> None:
        """Write that many guesses behind each context, or fewer, and set `drafted`."""
        ...

    def observe(self, planned: Plan, drawn: Sequence[int]) -> None:
        """See a pass of the model and what was drawn from it, before anybody takes it."""
        ...

    def forget(self, program_id: str) -> None:
        """Drop what is kept for a program; idempotent."""
        ...

    def clear(self) -> None:
        """Drop what other weights of the drafter computed."""
        ...


@dataclass(slots=True)
class _Count:
    drafted: int = 0
    accepted: int = 0

    def guesses(self) -> Guesses:
        return Guesses(drafted=self.drafted, accepted=self.accepted)


class Speculator:
    """One source, used where it pays.  The engine thread alone uses it."""

    def __init__(self, source: Source, *, most: int, step_s: Callable[[int], float]) -> None:
        self.source = source
        self._most = most
        self._step_s = step_s
        self._acceptance = Acceptance()
        self._total, self._since_update, self._before_update = _Count(), _Count(), _Count()

    def propose(self, pool: Pool) -> None:
        """Write guesses behind the contexts of those that decode, and make their rows wide enough."""
        self._acceptance.fade(_SOURCE_KEPT)
        decoding = [turn for turn in pool.running if turn.decodes]
        turns = [turn for turn in decoding if turn.verifiable]
        # One token for each that runs is promised already.
        spare = pool.kv_tokens - pool.used - len(pool.running)
        if not turns or spare <= 0:
            return
        prior = self._acceptance.chance(_PRIOR)
        for turn in turns:
            turn.acceptance.fade(_REQUEST_KEPT)
        lengths = best_lengths(
            [turn.acceptance.chance(prior) for turn in turns],
            [self._ready(turn) for turn in turns],
            len(decoding),
            self._step_s,
            self.source.token_s(len(turns)),
            spare,
        )
        chosen = [(turn, count) for turn, count in zip(turns, lengths, strict=True) if count]
        for turn, count in chosen:
            pool.lanes.widen(turn, turn.length + count)
        if chosen:
            self.source.draft(chosen)

    def learn(self, turn: Turn, drafted: int, tested: int, accepted: int) -> None:
        """Take what became of one request's guesses."""
        turn.acceptance.learn(tested, accepted)
        self._acceptance.learn(tested, accepted)
        for count in (self._total, self._since_update):
            count.drafted += drafted
            count.accepted += accepted

    def observe(self, planned: Plan, drawn: Sequence[int]) -> None:
        """See a pass of the model and what was drawn from it, before anybody takes it."""
        self.source.observe(planned, drawn)

    def forget(self, program_id: str) -> None:
        """Drop what is kept for a program; idempotent."""
        self.source.forget(program_id)

    def updated(self, *, drafter: bool) -> None:
        """Count from here: the model, the drafter or both have other weights now."""
        if drafter:
            self.source.clear()
        self._before_update, self._since_update = self._since_update, _Count()
        self._acceptance = Acceptance()

    def load(self, drafter: Version | None) -> Speculation:
        """`drafter`: the version of its weights."""
        return Speculation(
            source=self.source.name,
            version=None if drafter is None else str(drafter),
            total=self._total.guesses(),
            since_update=self._since_update.guesses(),
            before_update=self._before_update.guesses(),
        )

    def _ready(self, turn: Turn) -> int:
        # The last token that a request may sample is not worth a guess: it is drawn anyway.
        most = min(self._most, turn.remaining - 1)
        return self.source.ready(turn, most) if most > 0 else 0
