"""How a program enters the scheduler, and what its record says however it leaves."""

from dataclasses import replace

from sostenuto.errors import EngineError, ProgramError, boundary
from sostenuto.records import Trajectory, validate
from sostenuto.runtime.drive import Drive, Surroundings
from sostenuto.runtime.fresh_turn import FreshTurn
from sostenuto.runtime.place import Mail
from sostenuto.runtime.program import ProgramSpec, Timeouts
from sostenuto.runtime.turn_stream import TurnSpans
from sostenuto.scheduler.events import SandboxClaim, Submitted
from sostenuto.types import Outcome, OutcomeKind, StopReason

STALE = "stale"
"""Why a program is ended whose record could not be trained any more."""


def lease_s_of(spec: ProgramSpec, timeouts: Timeouts) -> float:
    """Every part of a program has a deadline of its own; the lease ends after all of them."""
    t = timeouts
    return spec.limits.wall_s + t.prepare_s + t.reward_s + t.call_margin_s + t.release_s


def submitted_for(spec: ProgramSpec, lease_s: float) -> Submitted:
    """How the scheduler hears of a program."""
    return Submitted(
        spec.id,
        lease_s,
        group=spec.group_id,
        group_size=spec.group_size,
        trainable_until=spec.trainable_until,
        sandbox=SandboxClaim(memory_bytes=0 if spec.history else spec.environment.memory_bytes),
        has_environment=spec.history is None,
        is_urgent=spec.priority < 0,
        requires=spec.requires,
    )


def drive_for(spec: ProgramSpec, around: Surroundings, mail: Mail, spans: TurnSpans | None) -> Drive:
    """Not begun yet."""
    if spec.history is None:
        return Drive(spec, around, mail.take, spans)
    return FreshTurn(spec, spec.history, around, mail.take, spans)


async def finish(drive: Drive) -> Trajectory:
    """The program's record, with the outcome FAILED when one of its parts failed."""
    try:
        trajectory = await drive.run()
        with boundary(EngineError, "the record is refused"):
            validate(trajectory)
    except ProgramError as error:
        return failed(drive, error)
    return trajectory


def failed(drive: Drive, error: ProgramError) -> Trajectory:
    """The record as it stands, with what went wrong."""
    outcome = Outcome(OutcomeKind.FAILED, str(error), error.blame)
    return replace(drive.record(StopReason.FAILED), outcome=outcome)


def stale(drive: Drive) -> Trajectory:
    """The record of a program that was ended because it could not be trained any more."""
    return replace(drive.record(StopReason.CANCELLED), outcome=Outcome(OutcomeKind.DROPPED, STALE))
