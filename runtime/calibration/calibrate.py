"""`calibrate`: the profile of a running engine, found by asking it for tokens.

The engine has to be otherwise idle.  Fresh prompts give the rate of prefill, cached ones the time between
tokens by batch size, short prompts among decoding requests how far the two hide behind each other.
"""

import itertools
import random
from collections.abc import Awaitable, Callable, Sequence
from statistics import median
from typing import TypeVarTuple, Unpack

import anyio
from pydantic import BaseModel, ConfigDict, Field

from sostenuto.runtime.calibration.fit import (
    Prefill,
    PrefillSample,
    chunk_of,
    fit_prefill,
    itl_of,
    overlap_of,
)
from sostenuto.runtime.calibration.limits import Limits
from sostenuto.runtime.calibration.probe import Probed, open_engine
from sostenuto.runtime.simulation.profile import EngineProfile, OnRelease

Prompts = Sequence[Sequence[int]]
Asked = TypeVarTuple("Asked")

_FIRST_ID, _LAST_ID = 16, 255
"""Token ids that every vocabulary has."""
_HELD_SHARES = (0.25, 0.5, 0.75)
"""Of the longest prompt: what the engine holds when more is appended."""
_LONG_CHUNK = 0.9
"""Of the longest prompt: a chunk that large is taken as no limit."""


class ProbeSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    batches: tuple[int, ...] = Field(default=(1, 2, 4, 8, 16), min_length=1)
    """Requests that decode together; those which the engine does not run together are left out."""
    decode_tokens: int = Field(default=48, ge=16)
    """Output by which the two bursts of a batch size differ."""
    decode_context_tokens: int | None = Field(default=None, gt=0)
    """Context of the requests that decode: give what is usual, as the time between tokens depends on it.
    None: half of the longest."""
    prefill_sizes: int = Field(default=6, ge=3)
    """Prompt lengths, each twice the one before, up to the longest."""
    repeats: int = Field(default=5, gt=0)
    """Of every measurement; the median counts."""
    seed: int = 0


async def calibrate(
    url: str, *, model: str | None = None, api_key: str | None = None, settings: ProbeSettings | None = None
) -> EngineProfile:
    """Probe the engine at `url`; EngineError when it does not answer or its pool is not known."""
    async with open_engine(url, model=model, api_key=api_key) as engine:
        return await calibrate_engine(engine, settings or ProbeSettings())


async def calibrate_engine(engine: Probed, settings: ProbeSettings) -> EngineProfile:
    return await _Calibration(engine, await engine.limits(), settings).profile()


class _Calibration:
    def __init__(self, engine: Probed, limits: Limits, settings: ProbeSettings) -> None:
        self._engine = engine
        self._limits = limits
        self._settings = settings
        self._random = random.Random(settings.seed)
        most = limits.pool.concurrency or max(settings.batches)
        self._batches = [n for n in settings.batches if n <= most] or [1]
        self._wanted = settings.decode_context_tokens or limits.context_tokens // 2
        self._decoded = [self._fresh(self._wanted) for _ in range(self._batches[-1])]

    async def profile(self) -> EngineProfile:
        await self._burst(self._prompts(self._batches[-1]), 2)
        prefill = fit_prefill([*await self._fresh_prefills(), *await self._appended_prefills()])
        itl_s = [(n, await self._itl(n)) for n in self._batches]
        overlap = await self._overlap(prefill, *itl_s[len(itl_s) // 2])
        pool = self._limits.pool
        return EngineProfile(
            name=self._limits.model,
            kv_tokens=pool.kv_tokens,
            block_tokens=pool.block_tokens,
            concurrency=pool.concurrency or EngineProfile.model_fields["concurrency"].default,
            prefill_tokens_s=prefill.tokens_s,
            prefill_s_per_token_squared=prefill.s_per_token_squared,
            chunk_tokens=pool.chunk_tokens or await self._chunk(prefill, itl_s[0][1], overlap),
            overlap=overlap,
            itl_s=tuple(itl_s),
            request_s=prefill.fixed_s,
            on_release=OnRelease.IGNORE,
        )

    async def _fresh_prefills(self) -> list[PrefillSample]:
        lengths = [self._longest >> halvings for halvings in range(self._settings.prefill_sizes)]
        return [PrefillSample(n, n, await self._median(self._appended_s, (), n)) for n in lengths if n]

    async def _appended_prefills(self) -> list[PrefillSample]:
        """Short ends of prompts whose beginning the engine holds, in whole blocks."""
        block, samples = self._limits.pool.block_tokens, list[PrefillSample]()
        for share in _HELD_SHARES:
            held = self._fresh(int(self._longest * share) // block * block)
            new = min(len(held) // 4, self._longest - len(held))
            if new:
                await self._engine.generate([*held, *self._fresh(new)], 1)
                elapsed_s = await self._median(self._appended_s, held, new)
                samples.append(PrefillSample(new, len(held) + new, elapsed_s))
        return samples

    async def _appended_s(self, held: Sequence[int], tokens: int) -> float:
        return await self._engine.generate([*held, *self._fresh(tokens)], 1)

    async def _itl(self, batch: int) -> float:
        """Even the shorter burst is long enough for the whole batch to decode together."""
        prompts, more = self._prompts(batch), self._settings.decode_tokens
        await self._burst(prompts, 1)
        short_s = await self._median(self._burst, prompts, batch + 1)
        long_s = await self._median(self._burst, prompts, batch + 1 + more)
        return itl_of(short_s, long_s, more)

    async def _overlap(self, prefill: Prefill, batch: int, itl_s: float) -> float:
        """Prompts that take as long as a step of decoding, one after the other, while a batch decodes."""
        prompts, tokens = self._prompts(batch), self._settings.decode_tokens
        await self._burst(prompts, 1)
        length = min(max(1, round(prefill.tokens_in(itl_s))), self._longest)
        count = tokens // 4
        alone_s = await self._median(self._burst, prompts, tokens)
        held_up_s = await self._median(self._held_up, prompts, count, length)
        return overlap_of(held_up_s - alone_s, count, prefill.marginal_s(length), itl_s)

    async def _held_up(self, prompts: Prompts, count: int, length: int) -> float:
        ends: list[float] = []
        async with anyio.create_task_group() as group:
            group.start_soon(self._one_by_one, count, length)
            ends.append(await self._burst(prompts, self._settings.decode_tokens))
        return ends[0]

    async def _median(self, measure: Callable[[Unpack[Asked]], Awaitable[float]], *asked: *Asked) -> float:
        return median([await measure(*asked) for _ in range(self._settings.repeats)])

    async def _one_by_one(self, count: int, length: int) -> None:
        for _ in range(count):
            await self._engine.generate(self._fresh(length), 1)

    async def _chunk(self, prefill: Prefill, itl_s: float, overlap: float) -> int:
        """From the first gap in one request's decoding when the longest prompt comes."""
        longest = self._longest
        pieces: Sequence[float] = ()
        async with anyio.create_task_group() as group:
            group.start_soon(self._one_by_one, 1, longest)
            pieces = await self._engine.stream(self._decoded[0], self._settings.decode_tokens)
        gaps = (later - sooner for sooner, later in itertools.pairwise(pieces))
        gap_s = next((gap for gap in gaps if gap > 2 * itl_s), 0.0)
        tokens = chunk_of(gap_s, prefill, itl_s, overlap) if gap_s else longest
        return longest if tokens > _LONG_CHUNK * longest else tokens

    async def _burst(self, prompts: Prompts, output_tokens: int) -> float:
        """Seconds until the last of them is done."""
        ends: list[float] = []

        async def one(prompt: Sequence[int]) -> None:
            ends.append(await self._engine.generate(prompt, output_tokens))

        async with anyio.create_task_group() as group:
            for prompt in prompts:
                group.start_soon(one, prompt)
        return max(ends)

    def _prompts(self, batch: int) -> Prompts:
        """As many, as long as was asked for or as the pool has room for at once."""
        pool = self._limits.pool
        room = pool.kv_tokens // batch - self._settings.decode_tokens - batch - 2 * pool.block_tokens
        return [prompt[: max(1, room)] for prompt in self._decoded[:batch]]

    @property
    def _longest(self) -> int:
        return min(self._limits.context_tokens, self._limits.pool.kv_tokens) - 1

    def _fresh(self, tokens: int) -> list[int]:
        return self._random.choices(range(_FIRST_ID, _LAST_ID), k=tokens)
