"""What a running engine says of itself: its pool, its blocks, how much it batches.  Parsing only."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sostenuto.errors import ConfigError, EngineError

_CACHE_CONFIG = re.compile(r"^vllm:cache_config_info\{(?P<labels>[^}]*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')

Answer = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Pool:
    kv_tokens: int
    block_tokens: int
    chunk_tokens: int | None = None
    """None: the engine does not say; so for `concurrency`."""
    concurrency: int | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    model: str
    context_tokens: int
    """The longest that a request can become."""
    pool: Pool


def vllm_pool(metrics: str, server_info: Answer | None) -> Pool | None:
    """From `/metrics` and, where it is served, `/server_info`; None when it is another engine.

    One block is never used.
    """
    found = _CACHE_CONFIG.search(metrics)
    if found is None:
        return None
    labels = dict(_LABEL.findall(found["labels"]))
    block, blocks = _number(labels, "block_size"), _number(labels, "num_gpu_blocks")
    if block is None or blocks is None:
        raise EngineError(f"/metrics: cache_config_info gives no block_size and num_gpu_blocks: {labels}")
    config: dict[str, Answer] = (server_info or {}).get("vllm_config") or {}
    batching: Answer = config.get("scheduler_config") or {}
    chunk, concurrency = batching.get("max_num_batched_tokens"), batching.get("max_num_seqs")
    return Pool((blocks - 1) * block, block, chunk, concurrency)


def _number(labels: Mapping[str, str], name: str) -> int | None:
    text = labels.get(name, "")
    return int(text) if text.isdecimal() else None


def sglang_pool(server_info: Answer) -> Pool:
    tokens = server_info.get("max_total_num_tokens")
    if not isinstance(tokens, int):
        raise EngineError("/server_info gives no max_total_num_tokens: the size of the pool is not known")
    chunk = server_info.get("chunked_prefill_size") or 0
    page, concurrency = server_info.get("page_size") or 1, server_info.get("max_running_requests")
    return Pool(tokens, page, chunk if chunk > 0 else None, concurrency)


def served_model(models: Answer, wanted: str | None) -> Answer:
    """Its entry in `/v1/models`; without a name the only one."""
    known: dict[str, Answer] = {served["id"]: served for served in models["data"]}
    if wanted is None and len(known) == 1:
        return next(iter(known.values()))
    if wanted not in known:
        raise ConfigError(f"model: the engine serves {', '.join(known)}; name one of them")
    return known[wanted]
