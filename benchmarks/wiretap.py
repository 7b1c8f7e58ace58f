"""What crossed the engine's socket, against what the records say.

The bytes are read with nothing but a JSON parser, so that a fault of the wire types would show here too.
"""

import json
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from sostenuto.records import Span, Tokens, Trajectory


@dataclass(frozen=True, slots=True)
class Exchange:
    """One `generate`, in the tokens that were sent and returned."""

    context: list[int]
    sampled: list[int]
    prefilled_tokens: int

    @property
    def held_tokens(self) -> int:
        """KV that the engine has afterwards: the last sampled token was never fed to the model."""
        return len(self.context) + len(self.sampled) - 1


@dataclass(slots=True)
class Wiretap:
    """Give it to `Runtime(tap=...)`; parses nothing while the run goes on."""

    _heard: list[tuple[bytes, bytes]] = field(default_factory=list[tuple[bytes, bytes]])

    def __call__(self, request_id: str, sent: bytes, received: bytes) -> None:
        self._heard.append((sent, received))

    def exchanges(self) -> dict[str, list[Exchange]]:
        """Of each program, in order."""
        found: dict[str, list[Exchange]] = {}
        for sent, received in self._heard:
            request, reply = json.loads(sent), json.loads(received)
            exchange = Exchange(request["token_ids"], reply["token_ids"], reply["prefilled_tokens"])
            found.setdefault(request["program_id"], []).append(exchange)
        return found


def mismatches(record: Trajectory, exchanges: list[Exchange]) -> int:
    """Tokens of the record that were not on the socket, or the other way round.

    Each sampled span has to be what one exchange returned, and all before it, the exchange's context.
    """
    wrong, turns = 0, iter(exchanges)
    for sequence in record.sequences:
        before: Tokens = np.zeros(0, dtype=np.int32)
        for span in sequence:
            if span.mask.any():
                wrong += _differing(before, span, next(turns, None))
            before = np.concatenate([before, span.token_ids])
    return wrong + sum(len(turn.context) + len(turn.sampled) for turn in turns)


def never_sent(record: Trajectory) -> int:
    """Tokens behind the last sampled one: put into the record and shown to no engine."""
    spans = list(record.spans())
    sampled = [index for index, span in enumerate(spans) if span.mask.any()]
    return sum(len(span) for span in spans[sampled[-1] + 1 if sampled else 0 :])


def excess_prefill(exchanges: list[Exchange]) -> list[int]:
    """Of each turn after the first: tokens prefilled, less those that are new since the turn before."""
    return [
        now.prefilled_tokens - (len(now.context) - before.held_tokens) for before, now in pairwise(exchanges)
    ]


def _differing(before: Tokens, span: Span, exchange: Exchange | None) -> int:
    if exchange is None:
        return len(before) + len(span)
    return _apart(before, exchange.context) + _apart(span.token_ids, exchange.sampled)


def _apart(recorded: Tokens, heard: list[int]) -> int:
    """Places in which the two differ; what one has beyond the other's end differs."""
    shorter = min(len(recorded), len(heard))
    other = np.asarray(heard[:shorter], dtype=np.int64)
    return int((recorded[:shorter] != other).sum()) + abs(len(recorded) - len(heard))
