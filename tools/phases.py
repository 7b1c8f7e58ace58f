"""Where a program is on the tool server, and which way it may go.

    preparing --PREPARED--> ready --CALL--> calling --IDLE--> ready
                            ready --SCORE-> scoring --IDLE--> ready
    any phase --RELEASE---> releasing, for good

A program in `calling` may start further calls; one in `scoring` may start nothing.
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from sostenuto.errors import InvalidTransition


class Phase(StrEnum):
    PREPARING = "preparing"
    READY = "ready"
    CALLING = "calling"
    SCORING = "scoring"
    RELEASING = "releasing"


class Event(StrEnum):
    PREPARED = "prepared"
    CALL = "call"
    SCORE = "score"
    IDLE = "idle"
    """The last running call or score has ended."""
    RELEASE = "release"


TRANSITIONS: Mapping[Phase, Mapping[Event, Phase]] = MappingProxyType(
    {
        Phase.PREPARING: {Event.PREPARED: Phase.READY, Event.RELEASE: Phase.RELEASING},
        Phase.READY: {Event.CALL: Phase.CALLING, Event.SCORE: Phase.SCORING, Event.RELEASE: Phase.RELEASING},
        Phase.CALLING: {Event.CALL: Phase.CALLING, Event.IDLE: Phase.READY, Event.RELEASE: Phase.RELEASING},
        Phase.SCORING: {Event.IDLE: Phase.READY, Event.RELEASE: Phase.RELEASING},
        Phase.RELEASING: {Event.IDLE: Phase.RELEASING, Event.RELEASE: Phase.RELEASING},
    }
)


def accepts(phase: Phase, event: Event) -> bool:
    """Whether `event` may happen in `phase`."""
    return event in TRANSITIONS[phase]


def advance(phase: Phase, event: Event) -> Phase:
    """The phase after `event`, or InvalidTransition."""
    if not accepts(phase, event):
        raise InvalidTransition(f"{event} while {phase}")
    return TRANSITIONS[phase][event]
