"""What a program goes on from when its server dies: its sandbox's snapshot and its environment's state.

- It is written down when the snapshot is complete, nothing runs for the program, and its environment says
  that it can resume.  Where one of these fails, the reason is written down.
- It is given up, on disk, before anything may change the program: a call, a score, a use of its sandbox.  So
  what can be gone on from is the program exactly as its last result left it.
- The snapshot belongs to the program: it is removed with the sandbox, or with what is left of the program.
"""

from collections.abc import Collection
from dataclasses import dataclass
from logging import getLogger

from anyio import to_thread
from pydantic import BaseModel, ConfigDict

from sostenuto.errors import SostenutoError, ToolServerError
from sostenuto.sandbox.protocol import Snapshot
from sostenuto.sandbox.snapshots import seal_of
from sostenuto.tools.bounded import bounded
from sostenuto.tools.host import Host
from sostenuto.tools.journal import Journal, Left, RestRow
from sostenuto.tools.ladder import Ladder, Resting
from sostenuto.types import ProgramId

log = getLogger(__name__)

_SAVE_S = 15.0
USED_MEANWHILE = "it was used while it was written down"


class Rest(BaseModel):
    """As it stands in the journal."""

    model_config = ConfigDict(frozen=True)

    snapshot: Snapshot
    seal: str
    """Of the snapshot as it was made, see `sandbox.snapshots`."""
    shell: str
    state: bytes
    """Of the environment: JSON."""

    @property
    def resting(self) -> Resting:
        return Resting(self.snapshot, self.shell)


@dataclass(slots=True, eq=False)
class Standing:
    """Whether one program's row may say that it can go on.  Written by the program table alone."""

    journal: Journal
    program: ProgramId
    may_be_there: bool = False
    changes: int = 0
    """Times that something was about to change the program."""

    async def changes_by(self, what: str) -> None:
        """Return when `what` may change the program; ToolServerError when that could not be written down."""
        self.changes += 1
        if self.may_be_there:
            await self.journal.rest_ends(self.program, f"{what} since its last snapshot")
            self.may_be_there = False

    async def write(self, host: Host, ladder: Ladder) -> str:
        """Write down what the program, for which nothing runs, goes on from; why it could not, or nothing."""
        resting, changes = ladder.resting, self.changes
        if not self.journal.keeps:
            return "its server has no state_dir"
        if resting is None:
            return USED_MEANWHILE
        row = await self._row(host, resting)
        if self.changes != changes or ladder.resting is not resting:
            return USED_MEANWHILE
        self.may_be_there = True
        await self.journal.rest_comes(self.program, row)
        return row.why_not

    async def _row(self, host: Host, resting: Resting) -> RestRow:
        snapshot = resting.snapshot
        if not (seal := await to_thread.run_sync(seal_of, snapshot)):
            return RestRow(f"snapshots of {snapshot.backend} end with their server", b"")
        try:
            state = await bounded(
                lambda: host.save(self.program),
                timeout_s=_SAVE_S,
                late=ToolServerError,
                doing="saving the environment's state",
            )
        except SostenutoError as error:
            return RestRow(str(error), b"")
        rest = Rest(snapshot=snapshot, seal=seal, shell=resting.shell, state=state)
        return RestRow("", rest.model_dump_json().encode())


def rest_of(
    row: RestRow | None, ended: Collection[str], unknown: Collection[str], seen: Collection[str]
) -> Rest:
    """What a program goes on from, or the ToolServerError that says why it cannot.

    `ended` and `unknown` are the calls that the journal has, `seen` those whose results the record has.
    """
    if row is None:
        raise ToolServerError("no snapshot of it was taken")
    if row.why_not:
        raise ToolServerError(row.why_not)
    if unknown:
        raise ToolServerError(f"call {min(unknown)!r} was under way")
    if lost := set(seen) - set(ended):
        raise ToolServerError(f"its record has the result of call {min(lost)!r}, and its snapshot is older")
    return Rest.model_validate_json(row.content)


def snapshots_of(left: Left) -> set[Snapshot]:
    """Those that programs can go on from."""
    return {Rest.model_validate_json(row.content).snapshot for row in left.rests.values() if not row.why_not}


async def verify_rests(journal: Journal, backend: str) -> None:
    """Of what programs of a server before go on from, let only that stand which is as it was written down."""
    rests = journal.left.rests
    for program, row in list(rests.items()):
        if row.why_not:
            continue
        rest = Rest.model_validate_json(row.content)
        if rest.snapshot.backend != backend or rest.seal != await to_thread.run_sync(seal_of, rest.snapshot):
            log.warning("the snapshot of program %s of a tool server before is not what it was", program)
            rests[program] = RestRow("its snapshot is gone, or is not what it was", b"")
