"""What a publication is made of: an immutable version and every tensor of it, with checksums.

The sender (trainer process) writes the tensors into one file that both sides map, in shared memory
where it fits; the receiver (engine process) copies, checks and only then reports that it is prepared.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from sostenuto.errors import EngineError

DRAFT_PREFIX = "draft."
"""Of the names of a drafter's tensors."""

Selector = Literal["target", "draft", "all"]
"""The model's weights, those of what guesses its next tokens, or both."""


class TensorEntry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """Parameter name as in the model's state dict; tied parameters appear once."""
    dtype: str
    """As torch spells it, without the prefix: float32, bfloat16, ..."""
    shape: tuple[int, ...]
    offset: int = Field(ge=0)
    """First byte in the file, a multiple of 64."""
    nbytes: int = Field(ge=0)
    checksum: int = Field(ge=0)
    """zlib.crc32 of the bytes."""


class Manifest(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    version: str
    path: str
    """File to map; readable until the sender publishes again or ends."""
    nbytes: int = Field(ge=0)
    tensors: tuple[TensorEntry, ...]
    selector: Selector = "target"

    @property
    def of_model(self) -> "Manifest":
        """Without a drafter's part, for an engine that has none.  EngineError when it has no other."""
        if self.selector == "draft":
            raise EngineError(f"version {self.version} is of a drafter alone, and this engine has none")
        rest = tuple(entry for entry in self.tensors if not entry.name.startswith(DRAFT_PREFIX))
        return self if self.selector == "target" else self.model_copy(update={"tensors": rest})
