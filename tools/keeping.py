"""Results of one program in the journal: how they get there, and how they come back."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from pydantic import TypeAdapter

from sostenuto.errors import SostenutoError
from sostenuto.tools.edge import Edge
from sostenuto.tools.journal import Journal, Kind, Ran, ResultRow
from sostenuto.tools.refused import OutcomeUnknown, raised
from sostenuto.tools.wire import Refusal, Reward
from sostenuto.types import ToolResult

T = TypeVar("T")

_RESULT = TypeAdapter(ToolResult)


@dataclass(frozen=True, slots=True)
class Keeping(Generic[T]):
    """Writes the calls or the rewards of one program; what is written is fit to leave the server."""

    journal: Journal
    program: str
    kind: Kind
    encode: Callable[[T], bytes]
    decode: Callable[[bytes], T]
    encode_error: Callable[[SostenutoError], bytes]

    async def opens(self, call_id: str) -> None:
        """Return when the call may run; ToolServerError when that could not be recorded."""
        await self.journal.call_opens(self.program, self.kind, call_id)

    def closes(self, call_id: str, outcome: T | SostenutoError) -> None:
        if not self.journal.keeps:
            return
        if isinstance(outcome, SostenutoError):
            ran, data = Ran.FAILED, self.encode_error(outcome)
        else:
            ran, data = Ran.DONE, self.encode(outcome)
        self.journal.call_closes(self.program, self.kind, call_id, ran, data)

    def forgets(self, call_id: str) -> None:
        self.journal.call_closes(self.program, self.kind, call_id, Ran.FORGOTTEN, None)

    def restored(self, row: ResultRow) -> T | SostenutoError | None:
        """What a row says that the call came to; None when its result is no longer kept."""
        match row.ran:
            case Ran.FORGOTTEN:
                return None
            case Ran.OPENED:
                return unknown(row.call_id)
            case Ran.DONE:
                return self.decode(row.outcome or b"")
            case Ran.FAILED:
                return raised(Refusal.model_validate_json(row.outcome or b""))


def calls_of(program: str, journal: Journal, edge: Edge) -> Keeping[ToolResult]:
    return Keeping(journal, program, Kind.CALL, edge.json, _RESULT.validate_json, _error_by(edge))


def scores_of(program: str, journal: Journal, edge: Edge) -> Keeping[Reward]:
    return Keeping(journal, program, Kind.REWARD, edge.json, Reward.model_validate_json, _error_by(edge))


def unknown(call_id: str) -> OutcomeUnknown:
    return OutcomeUnknown(
        f"call {call_id!r} was under way when the tool server died: whether it ran to its end is unknown; "
        "only a tool that is declared idempotent is run again"
    )


def _error_by(edge: Edge) -> Callable[[SostenutoError], bytes]:
    return lambda error: edge.json(edge.refusal(error))
