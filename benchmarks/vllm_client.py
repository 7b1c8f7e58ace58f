"""Runs the programs against a live engine, each on its own, and writes down every turn."""

import re
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import anyio
from pydantic import BaseModel

from benchmarks.vllm_workload import Conversation
from sostenuto.runtime.simulation.plan import Plan, Workload

_COUNTERS = ("prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total")


class MeasuredTurn(BaseModel):
    """Times in seconds of the run's clock."""

    sent_s: float
    ended_s: float
    prompt_tokens: int
    cached_tokens: int


class MeasuredRun(BaseModel):
    """All programs at one size of the pool."""

    blocks: int
    seed: int
    turns: dict[str, list[MeasuredTurn]] = {}
    """By program."""
    counters: dict[str, float] = {}
    """What the engine counted during the run."""

    @property
    def hit_rate(self) -> float:
        turns = [turn for program in self.turns.values() for turn in program]
        return sum(turn.cached_tokens for turn in turns) / sum(turn.prompt_tokens for turn in turns)

    @property
    def mean_completion_s(self) -> float:
        return sum(turns[-1].ended_s for turns in self.turns.values()) / len(self.turns)


async def measure(url: str, workload: Workload, *, blocks: int, seed: int) -> MeasuredRun:
    """All programs begin at once; no cap but the engine's own."""
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
        before = await _counters(session)
        run = _Run(session, seed, anyio.current_time())
        async with anyio.create_task_group() as group:
            for plan in workload.programs:
                group.start_soon(run.program, plan)
        after = await _counters(session)
    counters = {name: after[name] - before[name] for name in _COUNTERS}
    turns = {str(plan.id): run.turns[plan.id] for plan in workload.programs}
    return MeasuredRun(blocks=blocks, seed=seed, turns=turns, counters=counters)


@dataclass(slots=True)
class _Run:
    session: aiohttp.ClientSession
    seed: int
    begin_s: float
    turns: dict[str, list[MeasuredTurn]] = field(default_factory=dict[str, list[MeasuredTurn]])

    async def program(self, plan: Plan) -> None:
        conversation = Conversation(plan, self.seed)
        measured = self.turns[plan.id] = []
        for turn in plan.turns:
            sent_s = self._now_s()
            answer = await self._ask(conversation.token_ids, turn.output_tokens)
            measured.append(
                MeasuredTurn(
                    sent_s=sent_s,
                    ended_s=self._now_s(),
                    prompt_tokens=answer["usage"]["prompt_tokens"],
                    cached_tokens=answer["usage"]["prompt_tokens_details"]["cached_tokens"],
                )
            )
            conversation.token_ids += answer["choices"][0]["token_ids"]
            if turn.tool is not None:
                await anyio.sleep(turn.tool_s)
                conversation.add_result(turn.result_tokens)

    async def _ask(self, token_ids: list[int], output_tokens: int) -> dict[str, Any]:
        body = {
            "model": "truth", "prompt": token_ids, "max_tokens": output_tokens, "ignore_eos": True,
            "temperature": 0, "return_token_ids": True,
        }  # fmt: skip
        async with self.session.post("/v1/completions", json=body) as answer:
            answer.raise_for_status()
            return await answer.json()

    def _now_s(self) -> float:
        return anyio.current_time() - self.begin_s


async def _counters(session: aiohttp.ClientSession) -> dict[str, float]:
    async with session.get("/metrics") as answer:
        text = await answer.text()
    found = {name: re.search(rf"^vllm:{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE) for name in _COUNTERS}
    return {name: float(match[1]) if match else 0.0 for name, match in found.items()}
