"""What a running SGLang server says of itself, and what follows for the protocol."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sostenuto.errors import EngineError
from sostenuto.runtime.engines.wire import Capabilities, Feature

SUPPORTED = "0.5.23"
"""The version whose surface this adapter was read from."""

ALWAYS = frozenset({Feature.UPDATE, Feature.PAUSE, Feature.STREAM})
FLAGS = {
    Feature.HOLD: "start it with --enable-session-radix-cache",
    Feature.OFFLOAD: "SGLang has no call for it; --enable-hierarchical-cache moves KV by itself",
    Feature.SCORE: "use a version that returns input_token_logprobs",
    Feature.GRAMMAR: "start it with --grammar-backend xgrammar or llguidance, and with its tokenizer",
    Feature.KV_AGE: "ask an embedded engine; SGLang does not tell what version computed its KV",
    Feature.ADAPTERS: "ask an embedded engine; SGLang's own adapters are not spoken to",
    Feature.ROUTED_EXPERTS: "serve a mixture-of-experts model with --enable-return-routed-experts",
    Feature.TRUNCATION: "use a version with return_sampling_mask, and another sampling backend",
    Feature.TOP_LOGPROBS: "use a version that returns output_top_logprobs",
    Feature.PENALTIES: "use a version that takes penalties",
}
"""What to do about a feature that is missing."""


class _Said(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


class ModelInfo(_Said):
    """`GET /model_info`, as far as it is used."""

    model_path: str
    weight_version: str
    is_generation: bool


class InternalState(_Said):
    effective_max_running_requests_per_dp: int = Field(gt=0)


class ServerInfo(_Said):
    """`GET /server_info`, as far as it is used: resolved arguments, and what the scheduler says."""

    version: str
    max_total_num_tokens: int = Field(gt=0)
    max_req_input_len: int = Field(gt=0)
    internal_states: list[InternalState] = Field(min_length=1)
    startup_time: Any = None
    dp_size: int = 1
    tp_size: int = 1
    page_size: int | None = 1
    dtype: str = "auto"
    skip_tokenizer_init: bool = False
    disable_radix_cache: bool = False
    enable_session_radix_cache: bool = False
    enable_priority_scheduling: bool = False
    schedule_low_priority_values_first: bool = False
    incremental_streaming_output: bool = False
    enable_deterministic_inference: bool = False
    enable_return_routed_experts: bool = False
    enable_metrics: bool = False
    grammar_backend: str | None = None
    sampling_mask_max_tokens: int = 0

    @property
    def started(self) -> str:
        """Differs between two lives of a server."""
        return json.dumps(self.startup_time, sort_keys=True)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the model's own folder says; the server does not tell it."""

    architecture: str
    vocabulary_size: int
    experts_a_token: int


@dataclass(frozen=True, slots=True)
class Facts:
    """Of one life of a server."""

    server: ServerInfo
    model: ModelConfig
    name: str
    features: frozenset[Feature]
    is_tempered: bool = True
    """Its log-probabilities are of the distribution at the request's temperature."""
    missing: dict[Feature, str] = field(default_factory=dict[Feature, str])
    """What it lacks, and why as far as it said so."""

    @property
    def context_tokens(self) -> int:
        """Of a prompt and what is sampled after it: the server takes prompts below `max_req_input_len`."""
        return self.server.max_req_input_len

    def capabilities(self, version: str) -> Capabilities:
        server = self.server
        return Capabilities(
            model=self.name,
            architecture=self.model.architecture,
            vocabulary_size=self.model.vocabulary_size,
            context_tokens=self.context_tokens,
            kv_tokens=server.max_total_num_tokens,
            concurrency=server.internal_states[0].effective_max_running_requests_per_dp,
            shares_prefixes=not server.disable_radix_cache,
            block_tokens=server.page_size or 1,
            version=version,
            dtype=server.dtype,
            threads=server.tp_size,
            kind="sglang",
            features=self.features,
        )

    def remedy(self, feature: Feature) -> str:
        said = self.missing.get(feature, "")
        return f"{FLAGS[feature]}{f' (it said: {said})' if said else ''}"


def read_config(folder: Path) -> ModelConfig:
    """The served model's `config.json`; EngineError when it cannot be used."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
        return ModelConfig(
            architecture=config["architectures"][0],
            vocabulary_size=_text(config)["vocab_size"],
            experts_a_token=_text(config).get("num_experts_per_tok") or 0,
        )
    except (OSError, ValueError, KeyError, IndexError, TypeError, ValidationError) as error:
        raise EngineError(
            f"{path}: {type(error).__name__}: {error}; name the folder of the model that the engine serves"
        ) from error


def _text(config: dict[str, Any]) -> dict[str, Any]:
    """Models of several modalities keep the language model's part apart."""
    return config.get("text_config") or config
