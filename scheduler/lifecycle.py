"""The life of one program, as a table.

Everything that changes a phase is in this file; nothing in it knows which engine or sandbox a program
uses.  What a program holds is a property of its phase, never a flag beside it:

    phase      KV   environment  decoding
    QUEUED     -    -            -
    PREPARING  -    being made   -
    WAITING    -    yes          -         nothing to wait for but KV and a slot
    REASONING  yes  yes          yes
    ACTING     yes  yes          -         a tool call is in flight
    READY      yes  yes          -         the result is back, no decode slot yet
    PARKED     -    yes          -         KV given up, the tool call is in flight
    SCORING    -    yes          -         the last turn is over, the reward is computed
    DONE       -    -            -

A program that has just been prepared is WAITING: it differs in nothing from one that gave up its KV.
A turn that needs no tool server (a malformed call is answered by the runtime) still passes ACTING.
"""

from enum import StrEnum
from types import MappingProxyType

from sostenuto.errors import InvalidTransition


class Phase(StrEnum):
    QUEUED = "queued"
    PREPARING = "preparing"
    WAITING = "waiting"
    REASONING = "reasoning"
    ACTING = "acting"
    READY = "ready"
    PARKED = "parked"
    SCORING = "scoring"
    DONE = "done"

    @property
    def holds_kv(self) -> bool:
        return self in _HOLDS_KV

    @property
    def is_runnable(self) -> bool:
        """Whether nothing but KV and a decode slot is missing."""
        return self in _RUNNABLE


class Move(StrEnum):
    """What can happen to a program."""

    PREPARE = "prepare"
    PREPARED = "prepared"
    DECODE = "decode"
    CALL_TOOL = "call_tool"
    TOOL_RETURNED = "tool_returned"
    EVICT = "evict"
    LOSE_ENGINE = "lose_engine"
    ANSWER = "answer"
    """The last turn is over, for whatever reason."""
    FINISH = "finish"


_HOLDS_KV = frozenset({Phase.REASONING, Phase.ACTING, Phase.READY})
_RUNNABLE = frozenset({Phase.WAITING, Phase.READY})

TRANSITIONS = MappingProxyType(
    {
        Phase.QUEUED: {Move.PREPARE: Phase.PREPARING, Move.FINISH: Phase.DONE},
        Phase.PREPARING: {
            Move.PREPARED: Phase.WAITING,
            Move.ANSWER: Phase.SCORING,
            Move.FINISH: Phase.DONE,
        },
        Phase.WAITING: {
            Move.DECODE: Phase.REASONING,
            Move.ANSWER: Phase.SCORING,
            Move.FINISH: Phase.DONE,
        },
        Phase.REASONING: {
            Move.CALL_TOOL: Phase.ACTING,
            Move.LOSE_ENGINE: Phase.WAITING,
            Move.ANSWER: Phase.SCORING,
            Move.FINISH: Phase.DONE,
        },
        Phase.ACTING: {
            Move.TOOL_RETURNED: Phase.READY,
            Move.EVICT: Phase.PARKED,
            Move.LOSE_ENGINE: Phase.PARKED,
            Move.ANSWER: Phase.SCORING,
            Move.FINISH: Phase.DONE,
        },
        Phase.READY: {
            Move.DECODE: Phase.REASONING,
            Move.EVICT: Phase.WAITING,
            Move.LOSE_ENGINE: Phase.WAITING,
            Move.ANSWER: Phase.SCORING,
            Move.FINISH: Phase.DONE,
        },
        Phase.PARKED: {
            Move.TOOL_RETURNED: Phase.WAITING,
            Move.ANSWER: Phase.SCORING,
            Move.FINISH: Phase.DONE,
        },
        Phase.SCORING: {Move.FINISH: Phase.DONE},
        Phase.DONE: {},
    }
)


def after(phase: Phase, move: Move, *, program: str = "program") -> Phase:
    """The phase that `move` leads to, or InvalidTransition."""
    try:
        return TRANSITIONS[phase][move]
    except KeyError:
        raise InvalidTransition(f"{program}: {move} while {phase}") from None
