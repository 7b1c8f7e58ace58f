"""What the dispatcher needs of an engine.  Every call raises EngineError at its deadline.

What an engine cannot do is missing from the `features` of its capabilities, and raises EngineError.
"""

from typing import Protocol

from sostenuto.runtime.engines.wire import (
    Capabilities,
    CommitReply,
    CommitRequest,
    GenerateReply,
    GenerateRequest,
    Load,
    PauseMode,
    ScoreReply,
    ScoreRequest,
    Spans,
)
from sostenuto.trainer.publication.manifest import Manifest
from sostenuto.types import ProgramId


class Engine(Protocol):
    """One inference engine replica, spoken to in token ids."""

    async def capabilities(self) -> Capabilities: ...

    async def load(self) -> Load: ...

    async def generate(self, request: GenerateRequest, *, spans: Spans | None = None) -> GenerateReply:
        """Sample one turn.  A cancelled call aborts the request in the engine.

        `spans` is called with tokens as they come; all of them are in the reply, too.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End one request early; its `generate` answers with the tokens it has."""
        ...

    async def release(self, program_id: ProgramId) -> None:
        """Give up the KV of a program.  Idempotent."""
        ...

    async def offload(self, program_id: ProgramId) -> None:
        """Move a program's held KV to the lower tier; its next `generate` finds it there.  Idempotent."""
        ...

    async def restore(self, program_id: ProgramId) -> None:
        """Bring it back ahead of its turn, when there is room.  Idempotent."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Let new requests wait; returns when those that run are as the mode says.  Idempotent."""
        ...

    async def resume(self) -> None:
        """Go on.  Idempotent."""
        ...

    async def score(self, request: ScoreRequest) -> ScoreReply: ...

    async def prepare_update(self, manifest: Manifest) -> None:
        """Copy and verify the new weights beside the old; decoding goes on."""
        ...

    async def commit_update(self, request: CommitRequest) -> CommitReply:
        """Swap to the prepared version between two steps."""
        ...

    async def abandon_update(self, version: str) -> None: ...

    async def flush(self) -> None: ...
