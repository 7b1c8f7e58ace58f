"""What a running server can do: by its own word, and by small requests where that is no proof."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from sostenuto.errors import EngineError
from sostenuto.runtime.engines.http import EngineHttp, HttpRefusal
from sostenuto.runtime.engines.sglang.facts import (
    ALWAYS,
    SUPPORTED,
    Facts,
    ModelInfo,
    ServerInfo,
    read_config,
)
from sostenuto.runtime.engines.sglang.names import Names
from sostenuto.runtime.engines.sglang.replies import Generated
from sostenuto.runtime.engines.wire import Feature

_PROMPT = [1, 2, 3]
_NOT_ITS_FAULT = (401, 403, 404, 503)
"""Refusals that say nothing of a feature."""
_TOP = 8
_SAME = 1e-3
"""Of log-probabilities that are all the same nothing can be told."""

_log = logging.getLogger(__name__)


async def look(http: EngineHttp) -> tuple[ModelInfo, ServerInfo]:
    """What it is, at no cost; EngineError when it is not what this adapter speaks to."""
    model = (await http.get("/model_info")).read(ModelInfo)
    server = (await http.get("/server_info")).read(ServerInfo)
    if not model.is_generation:
        raise EngineError(
            f"{http.where('/model_info')}: it does not generate; start it with a language model"
        )
    if server.dp_size != 1:
        raise EngineError(
            f"{http.where('/server_info')}: it has {server.dp_size} data-parallel ranks, which do not take "
            "updates; start one server for each instead of --dp-size"
        )
    return model, server


async def try_out(
    http: EngineHttp, server: ServerInfo, names: Names, folder: Path, *, within_s: float
) -> Facts:
    """Small requests, one for each feature; the server has to run.  The first of a kind make it compile."""
    model = await anyio.to_thread.run_sync(read_config, folder)
    await _check_runs(http)
    if server.version != SUPPORTED:
        _log.warning(
            "%s: SGLang %s; the adapter was read from %s and relies on its own requests",
            http.engine_id, server.version, SUPPORTED,
        )  # fmt: skip
    trial = _Trial(http, names, within_s)
    facts = Facts(server=server, model=model, name=folder.name, features=ALWAYS)
    facts = replace(facts, is_tempered=await trial.is_tempered())
    for feature, extra in _extras(server, model.experts_a_token).items():
        facts = await _with(facts, feature, trial, extra)
    if not server.enable_session_radix_cache:
        return facts
    session_id = names.of("trial")
    await trial.ask({"session_id": session_id})
    await http.post("/close_session", {"session_id": session_id})
    return replace(facts, features=facts.features | {Feature.HOLD})


def _extras(server: ServerInfo, experts_a_token: int) -> dict[Feature, dict[str, Any] | None]:
    """What a request asks for to try a feature; None: its own word says that it has it not."""
    has_grammar = server.grammar_backend not in (None, "none") and not server.skip_tokenizer_init
    mask = {"return_sampling_mask": True, "sampling_params": {"top_k": 2, "top_p": 0.9}}
    routed = {"return_routed_experts": True}
    return {
        Feature.TOP_LOGPROBS: {"top_logprobs_num": 2},
        Feature.SCORE: {"logprob_start_len": 0, "sampling_params": {"max_new_tokens": 0}},
        Feature.PENALTIES: {"sampling_params": {"presence_penalty": 0.5, "frequency_penalty": 0.5}},
        Feature.TRUNCATION: mask if server.sampling_mask_max_tokens else None,
        Feature.GRAMMAR: {"sampling_params": {"regex": "[ab]"}} if has_grammar else None,
        Feature.ROUTED_EXPERTS: routed if server.enable_return_routed_experts and experts_a_token else None,
    }


async def _with(facts: Facts, feature: Feature, trial: "_Trial", extra: dict[str, Any] | None) -> Facts:
    """The facts after one trial; a refusal is a feature that is missing."""
    if extra is None:
        return replace(facts, missing=facts.missing | {feature: ""})
    try:
        answer = await trial.ask(extra)
    except HttpRefusal as refusal:
        if refusal.status in _NOT_ITS_FAULT:
            raise
        return replace(facts, missing=facts.missing | {feature: refusal.said})
    if not _has(feature, answer):
        return replace(facts, missing=facts.missing | {feature: "the answer does not have it"})
    return replace(facts, features=facts.features | {feature})


def _has(feature: Feature, answer: Generated) -> bool:
    said = answer.meta_info
    if said.finish_reason is None or said.finish_reason.type == "abort":
        return False
    evidence = {
        Feature.TOP_LOGPROBS: said.output_top_logprobs,
        Feature.SCORE: said.input_token_logprobs,
        Feature.TRUNCATION: said.output_token_sampling_logprobs,
        Feature.ROUTED_EXPERTS: said.routed_experts,
    }
    return feature not in evidence or bool(evidence[feature])


async def _check_runs(http: EngineHttp) -> None:
    """EngineError while it is paused: a request would wait, and its weights may be half of two versions."""
    try:
        await http.get("/ready")
    except HttpRefusal as refusal:
        if refusal.status == 404:
            return
        raise EngineError(
            f"{http.where('/ready')}: it is paused or unwell ({refusal.status}); when nobody updates its "
            "weights, send POST /continue_generation {}, else start it again"
        ) from refusal


class _Trial:
    """One-token requests."""

    def __init__(self, http: EngineHttp, names: Names, within_s: float) -> None:
        self._http = http
        self._names = names
        self._within_s = within_s

    async def ask(self, extra: dict[str, Any]) -> Generated:
        params = {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True}
        body = {
            "rid": self._names.of("trial"),
            "input_ids": _PROMPT,
            "return_logprob": True,
            **extra,
            "sampling_params": params | extra.get("sampling_params", {}),
        }
        answer = (await self._http.post("/generate", body, within_s=self._within_s)).read(Generated)
        if not answer.meta_info.weight_versions:
            where = self._http.where("/generate")
            raise EngineError(f"{where}: it does not say which version a token is of; use SGLang {SUPPORTED}")
        return answer

    async def is_tempered(self) -> bool:
        """Whether the gaps between log-probabilities shrink with the temperature, as those of samples do."""
        cold, warm = [await self._gaps(temperature) for temperature in (1.0, 2.0)]
        tokens = cold.keys() & warm.keys()
        kept = sum(abs(cold[token] - warm[token]) for token in tokens)
        halved = sum(abs(cold[token] / 2 - warm[token]) for token in tokens)
        return halved < kept or sum(map(abs, cold.values())) < _SAME

    async def _gaps(self, temperature: float) -> dict[int, float]:
        """Log-probabilities of the most probable tokens, less that of the first."""
        params = {"sampling_params": {"temperature": temperature}, "top_logprobs_num": _TOP}
        answer = await self.ask(params)
        row = (answer.meta_info.output_top_logprobs or [[]])[0] or []
        values = {token: value for value, token, _ in row if value is not None}
        best = max(values.values(), default=0.0)
        return {token: value - best for token, value in values.items()}
