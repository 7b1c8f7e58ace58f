"""What an embedded engine is started with."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class EmbeddedSettings:
    """One engine process.  Checked by the process itself, which says what is wrong before it serves."""

    model: Path
    """Folder with config.json, tokenizer.json and *.safetensors."""
    socket: Path
    """Unix socket to serve on; made with mode 0600."""
    kv_tokens: int
    """KV of running and held programs together."""
    concurrency: int
    """Requests that decode together."""
    threads: int = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    version: str = "0.0"
    device: str = "cpu"
    speculation: Literal["prompt", "draft", "mtp"] | None = None
    """Where guesses at the next tokens come from."""
    draft_model: Path | None = None
    """Folder of the model that drafts."""
    draft_tokens: int = 8
    """Guesses for one request in one step, at most."""
    quantization: Literal["int8", "fp8", "nvfp4"] | None = None
    """How matrices are kept, by the rules of `trainer.quantization`; they compute in `dtype`."""
    lower_tokens: int = 0
    """Room below the pool, for KV of programs that are not expected back soon; 0: there is no lower tier."""
    lower_folder: Path | None = None
    """On a CPU the lower tier is a file without a name in this folder; None: beside the socket."""

    def arguments(self) -> list[str]:
        """The command line of `python -m sostenuto.runtime.engines.embedded`."""
        pairs = {
            "--model": self.model, "--socket": self.socket, "--kv-tokens": self.kv_tokens,
            "--concurrency": self.concurrency, "--threads": self.threads, "--dtype": self.dtype,
            "--version": self.version, "--device": self.device, "--speculation": self.speculation,
            "--draft-model": self.draft_model, "--draft-tokens": self.draft_tokens,
            "--quantization": self.quantization,
            "--lower-tokens": self.lower_tokens, "--lower-folder": self.lower_folder or self.socket.parent,
        }  # fmt: skip
        given = {name: value for name, value in pairs.items() if value is not None}
        return [text for name, value in given.items() for text in (name, str(value))]
