"""What a running vLLM server says of itself, and what follows for the protocol."""

import json
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from sostenuto.errors import EngineError
from sostenuto.runtime.engines.wire import Capabilities, Feature

KNOWN_RELEASES = ("0.32.", "0.33.")
"""Whose surface this adapter was read from."""
UNLABELLED = "default"
"""What vLLM calls the weights that it was started with."""

TIED_ON_CPU = (
    "on a CPU it keeps the old output layer of a model with tied embeddings; serve one whose "
    "tie_word_embeddings is false"
)
DEV_MODE = "start it with VLLM_SERVER_DEV_MODE=1"
FLAGS = {
    Feature.HOLD: "vLLM keeps what was used last (--enable-prefix-caching), and promises nothing",
    Feature.OFFLOAD: "vLLM has no call for it; a KV connector moves KV by itself",
    Feature.SCORE: "start it with --enable-scale-out, and a --max-logprobs above 0",
    Feature.UPDATE: DEV_MODE,
    Feature.PAUSE: DEV_MODE,
    Feature.STREAM: "start it with --enable-scale-out",
    Feature.TRUNCATION: "start it with --logprobs-mode processed_logprobs",
    Feature.PENALTIES: "start it with --logprobs-mode processed_logprobs",
    Feature.GRAMMAR: "start it with --logprobs-mode processed_logprobs, and with its tokenizer",
    Feature.KV_AGE: "ask an embedded engine; vLLM does not tell what version computed its KV",
    Feature.ADAPTERS: "ask an embedded engine; vLLM's own adapters are not spoken to",
    Feature.TOP_LOGPROBS: "start it with a --max-logprobs above 1",
    Feature.ROUTED_EXPERTS: "serve a mixture-of-experts model with --enable-return-routed-experts",
}
"""What to do about a feature that is missing."""


class Route(StrEnum):
    """How tokens are sampled."""

    TOKENS = "/inference/v1/generate"
    COMPLETIONS = "/v1/completions"
    """Where the first is not served.  It tells no version, and spans of tokens only whole."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the model's own folder says."""

    architecture: str
    vocabulary_size: int
    is_tied: bool
    """Its output layer is its embedding."""


@dataclass(frozen=True, slots=True)
class Server:
    """What is told by routes that sample nothing."""

    release: str
    name: str
    """Of the served model."""
    root: str
    """What it was started with: a folder, or a name."""
    context_tokens: int
    kv_tokens: int
    block_tokens: int
    concurrency: int
    shares_prefixes: bool
    has_controls: bool
    """Pause, updates, flush."""
    dtype: str
    ranks: int
    most_logprobs: int
    """At one position."""
    on_cpu: bool
    is_chunked: bool
    """Whether it computes prompts in parts."""
    started: float
    """Differs between two lives of a server."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Of one life of a server."""

    server: Server
    model: ModelConfig
    route: Route
    features: frozenset[Feature]
    is_processed: bool = True
    """Its log-probabilities are those of the distribution that is drawn from."""
    has_priorities: bool = True
    missing: dict[str, str] = field(default_factory=dict[str, str])
    """What it lacks, and what to do about it."""

    @property
    def context_tokens(self) -> int:
        return self.server.context_tokens

    @property
    def takes_seeds(self) -> bool:
        """On a CPU vLLM dies of a seeded request whose prompt it computes in parts."""
        return not (self.server.on_cpu and self.server.is_chunked)

    @property
    def takes_updates(self) -> bool:
        """On a CPU vLLM computes with a copy of the output layer, and renews no tied one."""
        return self.server.has_controls and not (self.server.on_cpu and self.model.is_tied)

    def capabilities(self, version: str) -> Capabilities:
        server = self.server
        return Capabilities(
            model=server.name,
            architecture=self.model.architecture,
            vocabulary_size=self.model.vocabulary_size,
            context_tokens=server.context_tokens,
            kv_tokens=server.kv_tokens,
            concurrency=server.concurrency,
            shares_prefixes=server.shares_prefixes,
            block_tokens=server.block_tokens,
            version=version,
            dtype=server.dtype,
            threads=server.ranks,
            kind="vllm",
            features=self.features,
        )

    def remedy(self, feature: Feature) -> str:
        return self.missing.get(feature, FLAGS[feature])


def read_config(folder: Path) -> ModelConfig:
    """The served model's `config.json`; EngineError when it cannot be used."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
        tied = bool(_text(config).get("tie_word_embeddings", False))
        return ModelConfig(config["architectures"][0], _text(config)["vocab_size"], tied)
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise EngineError(
            f"{path}: {type(error).__name__}: {error}; name the folder of the model that the engine serves"
        ) from error


def _text(config: dict[str, Any]) -> dict[str, Any]:
    """Models of several modalities keep the language model's part apart."""
    return config.get("text_config") or config
