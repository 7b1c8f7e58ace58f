"""What a publication is made of: an immutable version, every tensor of it with a checksum, and its transport.

A sender (trainer process) makes the bytes available and describes them; a receiver (engine process) fetches
and checks them, and only then reports that it is prepared.
"""

import zlib
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from sostenuto.errors import EngineError

DRAFT_PREFIX = "draft."
"""Of the names of a drafter's tensors."""

Selector = Literal["target", "draft", "all"]
"""The model's weights, those of what guesses its next tokens, or both."""

Transport = Literal["shared_memory", "disk", "disk_delta", "broadcast", "point_to_point"]
"""How the bytes get from a sender to the receivers."""


class TensorEntry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """Parameter name as in the model's state dict; tied parameters appear once."""
    dtype: str
    """As torch spells it, without the prefix: float32, bfloat16, ..."""
    shape: tuple[int, ...]
    offset: int = Field(ge=0)
    """First byte in the file."""
    nbytes: int = Field(ge=0)
    checksum: int = Field(ge=0)
    """zlib.crc32 of the bytes."""


class Delta(BaseModel):
    """What a version is a change of."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: str
    base_digest: int
    changed: int = Field(ge=0)
    """Elements."""
    full: str
    """File of the version where the deltas begin."""
    deltas: tuple[str, ...]
    """Files that lead from there to this version; the last one is on `base`."""


class Source(BaseModel):
    """Where receivers call for the bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str
    port: int = Field(gt=0)
    key: str
    """Who has it may call."""
    deadline_s: float = Field(gt=0)
    """How long either side may keep the other waiting."""
    gather_s: float = Field(default=0.0, ge=0)
    """How long the sender waits for more receivers after the first one."""
    bucket_bytes: int = Field(default=16 << 20, gt=0)
    """What is sent at a time."""


class Shard(BaseModel):
    """What one rank has of a version."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: Source
    boxes: dict[str, tuple[tuple[int, int], ...]]
    """By tensor, in each dimension: the first index and the one behind the last."""


class Manifest(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    version: str
    path: str
    """File to map; readable until the sender has published a few times more, or ends."""
    nbytes: int = Field(ge=0)
    tensors: tuple[TensorEntry, ...]
    selector: Selector = "target"
    transport: Transport = "shared_memory"
    resident: bool = False
    """The file lies in memory and is never written again: it may be served from where it lies."""
    delta: Delta | None = None
    """Of disk_delta: `path` has what changed, and `offset` of a tensor means nothing."""
    source: Source | None = None
    """Of broadcast, which has no `path`."""
    shards: tuple[Shard, ...] = ()
    """Of point_to_point: who has what, first rank first."""

    @property
    def digest(self) -> int:
        """Differs between two publications whose tensors differ."""
        told = "".join(f"{entry.name} {entry.checksum} " for entry in self.tensors)
        return zlib.crc32(told.encode())

    @property
    def of_model(self) -> "Manifest":
        """Without a drafter's part, for an engine that has none.  EngineError when it has no other."""
        if self.selector == "draft":
            raise EngineError(f"version {self.version} is of a drafter alone, and this engine has none")
        rest = tuple(entry for entry in self.tensors if not entry.name.startswith(DRAFT_PREFIX))
        return self if self.selector == "target" else self.model_copy(update={"tensors": rest})
