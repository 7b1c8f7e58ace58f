"""`GET /metrics` of vLLM, as far as it is used: a few gauges and counters out of some hundred lines."""

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from sostenuto.errors import EngineError

_PREFIX = "vllm:"
_SUMMED = {
    "running": "num_requests_running",
    "waiting": "num_requests_waiting",
    "prompt_tokens": "prompt_tokens_total",
    "cached_tokens": "prompt_tokens_cached_total",
    "generated_tokens": "generation_tokens_total",
}
"""Over the engine's data-parallel parts."""
_USAGE = "kv_cache_usage_perc"
STARTED = "process_start_time_seconds"


@dataclass(frozen=True, slots=True)
class Metrics:
    """Requests now, tokens since the start."""

    running: int
    waiting: int
    prompt_tokens: int
    """Computed and found."""
    cached_tokens: int
    generated_tokens: int
    usage: float
    """Share of the pool that requests run on, the mean over the parts."""
    started: float
    """When the server's process began; 0 where it is not told."""


def read_metrics(text: str, where: str) -> Metrics:
    """EngineError when it is no text of metrics, or not vLLM's."""
    values = _values(text, where)
    if missing := [name for name in (*_SUMMED.values(), _USAGE) if _PREFIX + name not in values]:
        raise EngineError(
            f"{where}: answered without {_PREFIX}{missing[0]}; start it without --disable-log-stats, "
            "with a version that the adapter knows"
        )
    sums = {field: int(sum(values[_PREFIX + name])) for field, name in _SUMMED.items()}
    usage = values[_PREFIX + _USAGE]
    return Metrics(**sums, usage=sum(usage) / len(usage), started=sum(values.get(STARTED, ())))


def _values(text: str, where: str) -> Mapping[str, list[float]]:
    """By the name of the sample."""
    wanted = {STARTED, *(_PREFIX + name for name in (*_SUMMED.values(), _USAGE))}
    lines = [line for line in text.splitlines() if line.partition("{")[0].partition(" ")[0] in wanted]
    found: dict[str, list[float]] = {}
    try:
        for family in text_string_to_metric_families("\n".join([*lines, ""])):
            for sample in family.samples:
                found.setdefault(sample.name, []).append(float(sample.value))
    except ValueError as error:
        raise EngineError(f"{where}: answered with metrics that cannot be read: {error}") from error
    return found
