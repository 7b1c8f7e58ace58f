"""Finding out what a running vLLM can do: from what it says, and with a few small requests where a flag is
no proof.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field

from sostenuto.errors import ConfigError, EngineError
from sostenuto.runtime.calibration.limits import served_model, vllm_pool
from sostenuto.runtime.engines.http import Answer, EngineHttp, HttpRefusal
from sostenuto.runtime.engines.sameness import check_same_model
from sostenuto.runtime.engines.vllm.bodies import Place, generate_body, score_body
from sostenuto.runtime.engines.vllm.facts import (
    KNOWN_RELEASES,
    TIED_ON_CPU,
    Facts,
    Route,
    Server,
    read_config,
)
from sostenuto.runtime.engines.vllm.metrics import read_metrics
from sostenuto.runtime.engines.vllm.replies import Gathered, Scored
from sostenuto.runtime.engines.wire import Feature, GenerateRequest, ScoreRequest

_REFUSED = (400, 403, 404, 405, 422, 500, 501)
_DEFAULT_LOGPROBS, _DEFAULT_CONCURRENCY = 20, 256
"""vLLM's own defaults, where it does not tell."""
_TRIAL = {"request_id": "trial", "program_id": "trial", "token_ids": [1, 2, 3], "max_new_tokens": 1}
_TRIED_TOP = 4
_APART = 1e-3
"""Log-probabilities that differ by less do not tell a temperature."""

_log = logging.getLogger(__name__)


class _Said(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class _Version(_Said):
    version: str


class _Models(_Said):
    data: list[dict[str, Any]] = Field(min_length=1)


class _ServerInfo(_Said):
    vllm_config: dict[str, dict[str, Any] | Any]


async def look(http: EngineHttp, model: str | None, *, any_release: bool) -> Server:
    """What it says of itself.  `model`: its name there; None: the only one."""
    release = await _release(http, any_release=any_release)
    models = await http.get("/v1/models")
    try:
        served = served_model(models.read(_Models).model_dump(), model)
    except (ConfigError, KeyError) as error:
        raise EngineError(f"{models.where}: {error}") from error
    answer = await http.get("/metrics")
    text = answer.text()
    info = await _optional(http, "/server_info", {"config_format": "json"})
    config = info.read(_ServerInfo).vllm_config if info else {}
    pool = vllm_pool(text, {"vllm_config": config})
    if pool is None:
        raise EngineError(f"{answer.where}: answered without vllm:cache_config_info; is it vLLM?")
    return Server(
        release=release,
        name=served["id"],
        root=str(served.get("root") or served["id"]),
        context_tokens=min(served.get("max_model_len") or pool.kv_tokens, pool.kv_tokens),
        kv_tokens=pool.kv_tokens,
        block_tokens=pool.block_tokens,
        concurrency=pool.concurrency or _DEFAULT_CONCURRENCY,
        shares_prefixes='enable_prefix_caching="False"' not in text,
        has_controls=await _optional(http, "/is_paused") is not None,
        dtype=str(_config(config, "model_config").get("dtype", "auto")).removeprefix("torch."),
        ranks=_config(config, "parallel_config").get("world_size", 1),
        most_logprobs=_config(config, "model_config").get("max_logprobs", _DEFAULT_LOGPROBS),
        on_cpu=_config(config, "device_config").get("device") == "cpu",
        is_chunked=_config(config, "scheduler_config").get("enable_chunked_prefill", True),
        started=read_metrics(text, answer.where).started,
    )


async def try_out(http: EngineHttp, server: Server, folder: Path, *, within_s: float) -> Facts:
    """Ask it for a few tokens; `within_s` for each request, the first of which may compile."""
    return await _Trials(http, server, folder, within_s).facts()


@dataclass(slots=True)
class _Trials:
    http: EngineHttp
    server: Server
    folder: Path
    within_s: float

    async def facts(self) -> Facts:
        server = self.server
        check_same_model(server.root, self.folder, self.http.where("/v1/models"))
        facts = await self._route(Facts(server, read_config(self.folder), Route.TOKENS, frozenset()))
        facts = replace(facts, has_priorities=await self._refusal(facts, {"priority": 1}) is None)
        facts = replace(facts, is_processed=await self._is_processed(facts))
        refusal = await self._refusal(facts, {"sampling": {"grammar": {"regex": "[0-9]"}}})
        can = {
            Feature.STREAM: True,
            Feature.UPDATE: facts.takes_updates,
            Feature.PAUSE: server.has_controls,
            Feature.TOP_LOGPROBS: server.most_logprobs > 1,
            Feature.TRUNCATION: facts.is_processed,
            Feature.PENALTIES: facts.is_processed,
            Feature.GRAMMAR: facts.is_processed and refusal is None,
            Feature.SCORE: await self._scores(facts),
            Feature.ROUTED_EXPERTS: (await self._ask(facts)).experts is not None,
        }
        facts = replace(
            facts,
            features=frozenset(feature for feature, it_can in can.items() if it_can),
            missing=_missing(facts, refusal),
        )
        self._tell(facts, await self._tells_cached(facts))
        return facts

    async def _scores(self, facts: Facts) -> bool:
        if facts.route is not Route.TOKENS:
            return False
        body = score_body(ScoreRequest(token_ids=[1, 2, 3], start=1), facts, _place())
        try:
            answer = await self.http.post(Route.TOKENS, body, within_s=self.within_s)
        except HttpRefusal as refusal:
            self._raise_other(refusal)
            return False
        answer.read(Scored)
        return True

    async def _route(self, facts: Facts) -> Facts:
        try:
            await self._ask(facts)
        except HttpRefusal as refusal:
            if refusal.status not in (403, 404, 405):
                raise
        else:
            return facts
        facts = replace(facts, route=Route.COMPLETIONS)
        await self._ask(facts)
        return facts

    async def _is_processed(self, facts: Facts) -> bool:
        """At half the temperature log-probabilities are twice as far apart."""
        top = min(_TRIED_TOP, self.server.most_logprobs - 1)
        if top < 2:
            return False
        spreads: list[float] = []
        for temperature in (1.0, 0.5):
            asked = {"sampling": {"temperature": temperature}, "top_logprobs": top}
            gathered = await self._ask(facts, asked)
            values = [value for _, value in gathered.top[0]]
            spreads.append(max(values) - min(values))
        if spreads[0] < _APART:
            where = self.http.where(facts.route)
            _log.warning("%s: its log-probabilities are too even to tell a temperature by", where)
            return False
        return spreads[1] > 1.5 * spreads[0]

    async def _tells_cached(self, facts: Facts) -> bool:
        usage = (await self._ask(facts)).usage
        return usage is not None and usage.prompt_tokens_details is not None

    async def _refusal(self, facts: Facts, asked: Mapping[str, object]) -> str | None:
        """What it says against such a request; None: nothing."""
        try:
            await self._ask(facts, asked)
        except HttpRefusal as refusal:
            self._raise_other(refusal)
            return refusal.said or f"answered {refusal.status}"
        return None

    async def _ask(self, facts: Facts, asked: Mapping[str, object] = MappingProxyType({})) -> Gathered:
        """Sample a token in a request with these fields."""
        request = GenerateRequest.model_validate({**_TRIAL, **asked})
        where = self.http.where(facts.route)
        gathered = Gathered(where, request, served="", telling=None, sent_s=0.0)
        body = generate_body(request, facts, _place())
        await self.http.stream(facts.route, body, gathered.take, within_s=self.within_s)
        if not gathered.token_ids:
            raise EngineError(f"{where}: sampled nothing when it was tried; look into the engine's log")
        return gathered

    def _raise_other(self, refusal: HttpRefusal) -> None:
        """A trial may be refused; an engine may not be broken."""
        if refusal.status not in _REFUSED:
            raise refusal

    def _tell(self, facts: Facts, tells_cached: bool) -> None:
        lacking = [
            f"{feature} ({facts.remedy(feature)})" for feature in Feature if feature not in facts.features
        ]
        if not facts.has_priorities:
            lacking.append("priorities (start it with --scheduling-policy priority)")
        if not facts.takes_seeds:
            lacking.append("seeds (start it with --no-enable-chunked-prefill)")
        if not tells_cached:
            lacking.append("counts of cached tokens (start it with --enable-prompt-tokens-details)")
        if facts.route is Route.COMPLETIONS:
            lacking.append("versions by token (start it with --enable-scale-out)")
        _log.info("%s: vLLM %s lacks %s", self.http.where("try"), self.server.release, "; ".join(lacking))


async def _release(http: EngineHttp, *, any_release: bool) -> str:
    try:
        release = (await http.get("/version")).read(_Version).version
    except HttpRefusal as refusal:
        if refusal.status in (404, 405):
            raise EngineError(
                f"{http.where('/version')}: is not served; is this vLLM's address?"
            ) from refusal
        raise
    if not any_release and not release.startswith(KNOWN_RELEASES):
        known = " and ".join(f"{known}x" for known in KNOWN_RELEASES)
        raise EngineError(
            f"{http.where('/version')}: it is vLLM {release}, and this adapter knows {known}; "
            "install one of those, or allow any release"
        )
    return release


async def _optional(http: EngineHttp, route: str, query: dict[str, str] | None = None) -> Answer | None:
    """None where the server has no such route."""
    try:
        return await http.get(route, query=query)
    except HttpRefusal as refusal:
        if refusal.status in (404, 405):
            return None
        raise


def _missing(facts: Facts, grammar: str | None) -> dict[str, str]:
    """What is lacking for another reason than the usual one."""
    missing: dict[str, str] = {}
    if grammar and facts.is_processed:
        missing[Feature.GRAMMAR] = grammar
    if facts.server.has_controls and not facts.takes_updates:
        missing[Feature.UPDATE] = TIED_ON_CPU
    return missing


def _config(config: dict[str, Any], name: str) -> dict[str, Any]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}  # pyright: ignore[reportUnknownVariableType]


def _place() -> Place:
    return Place(request_id=f"trial-{uuid4().hex}", salt=uuid4().hex)
