"""Whether an engine can serve a job: its model is the job's, and its context is long enough."""

from dataclasses import dataclass

from sostenuto.errors import EngineError
from sostenuto.runtime.engines.wire import Capabilities
from sostenuto.runtime.rendering.folder import ModelFolder
from sostenuto.types import EngineId, Version


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a job needs of every engine."""

    model: str
    """Its folder, for people."""
    vocabulary_size: int
    tokenizer_size: int
    architectures: tuple[str, ...]
    """Empty: the folder does not say."""
    version: Version
    """What the weights of the folder are called."""
    total_tokens: int | None = None
    """Of one program; None: whatever the engines take."""

    @classmethod
    def of(cls, folder: ModelFolder, version: Version, total_tokens: int | None) -> "Requirements":
        named = folder.config.get("architectures") or ()
        return cls(
            model=str(folder.path),
            vocabulary_size=folder.vocabulary_size,
            tokenizer_size=folder.tokenizer_size,
            architectures=tuple(str(name) for name in named),
            version=version,
            total_tokens=total_tokens,
        )

    def check(self, engine_id: EngineId, facts: Capabilities, *, promised_tokens: int = 0) -> None:
        """EngineError for an engine that does not suit; `promised_tokens`: the context programs count on."""
        where = f"engine {engine_id}: capabilities"
        if self.architectures and facts.architecture and facts.architecture not in self.architectures:
            raise EngineError(
                f"{where}: it serves a {facts.architecture} ({facts.model}), and the job's model "
                f"{self.model} is a {' or '.join(self.architectures)}; start it with the job's model"
            )
        texts = facts.tokenizer_size or self.tokenizer_size
        if (facts.vocabulary_size, texts) != (self.vocabulary_size, self.tokenizer_size):
            raise EngineError(
                f"{where}: it has a vocabulary of {facts.vocabulary_size} rows and {texts} tokens, and the "
                f"job's model {self.model} has {self.vocabulary_size} and {self.tokenizer_size}; start it "
                "with the job's model"
            )
        needed = max(self.total_tokens or 0, promised_tokens)
        if facts.context_tokens < needed:
            raise EngineError(
                f"{where}: its context is {facts.context_tokens} tokens, and the job's programs may have "
                f"{needed}; start it with a longer context, or lower limits.total_tokens"
            )
