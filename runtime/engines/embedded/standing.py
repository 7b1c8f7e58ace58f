"""What an engine says of itself: what it can do, and how it stands."""

from dataclasses import dataclass

from sostenuto.runtime.engines.embedded.lower import LowerTier
from sostenuto.runtime.engines.embedded.model import Model
from sostenuto.runtime.engines.embedded.pool import Pool
from sostenuto.runtime.engines.embedded.publications import Publications
from sostenuto.runtime.engines.embedded.speculation.speculator import Speculator
from sostenuto.runtime.engines.wire import Capabilities, Feature, Load, Speculation
from sostenuto.types import Version


@dataclass(slots=True)
class Counters:
    """Since the start."""

    prefilled_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    updates: int = 0
    busy_s: float = 0.0
    pause_s: float = 0.0


def capabilities_of(
    model: Model,
    pool: Pool,
    lower: LowerTier | None,
    *,
    version: Version,
    threads: int,
    features: frozenset[Feature],
) -> Capabilities:
    return Capabilities(
        model=model.name,
        architecture=model.architecture,
        vocabulary_size=model.vocabulary_size,
        tokenizer_size=model.tokenizer_size,
        context_tokens=model.context_tokens,
        kv_tokens=pool.kv_tokens,
        concurrency=pool.concurrency,
        shares_prefixes=False,
        version=str(version),
        dtype=str(model.shape.dtype).removeprefix("torch."),
        threads=threads,
        quantization=model.quantization,
        weight_bytes=model.weight_bytes,
        features=features,
        lower_tokens=lower.tokens if lower else 0,
        lower_tokens_s=lower.tokens_s if lower else 0.0,
    )


def load_of(
    counters: Counters, pool: Pool, lower: LowerTier | None, *, waiting: int, speculation: Speculation | None
) -> Load:
    kept = pool.kept
    return Load(
        running=len(pool.running),
        waiting=waiting,
        used_kv_tokens=pool.used,
        held_kv_tokens=kept.held_tokens,
        held_programs=len(kept.programs),
        cached_kv_tokens=kept.idle_tokens,
        lower_kv_tokens=lower.used_tokens if lower else 0,
        lower_programs=len(lower.entries) if lower else 0,
        prefilled_tokens=counters.prefilled_tokens,
        cached_tokens=counters.cached_tokens,
        generated_tokens=counters.generated_tokens,
        updates=counters.updates,
        busy_s=counters.busy_s,
        pause_s=counters.pause_s,
        evicted_programs=pool.evicted_programs,
        speculation=speculation,
    )


def speculation_of(speculator: Speculator | None, weights: Publications) -> Speculation | None:
    """None where nothing is guessed."""
    return speculator and speculator.load(weights.drafter.version if weights.drafter else None)
