"""Agents on the gateway and the same agents on the engine itself, with and without pressure on KV.

The engine is the embedded one, with a small random model.  Through the gateway a program's KV is held and
given up by the scheduler; on the engine itself each turn is a request of its own, and the engine keeps what
it has room for, least recently used out first.
"""

import random
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import anyio

from benchmarks.figure import Tell
from benchmarks.gateway_stand import gateway_on
from sostenuto.runtime.bench.live.model import random_model
from sostenuto.runtime.engines.client import EngineClient, launch_embedded
from sostenuto.runtime.engines.embedded.settings import EmbeddedSettings
from sostenuto.runtime.engines.wire import GenerateRequest
from sostenuto.runtime.quickstart.tokenizer import tokenizer_material, train_tokenizer
from sostenuto.types import EngineId

_PROGRAMS, _TURNS = 16, 8
_PROMPT, _OUTPUT, _RESULT = 600, 24, 64
_GAP_S = (0.5, 2.0)
_PRESSURE = 1.5
_VOCABULARY = 512
_ROUNDS = 2
"""Each place is taken by so many programs, one after the other."""

Sample = Callable[[str, list[int]], Awaitable[list[int]]]
"""(program, context) to the tokens of a turn."""


@dataclass(slots=True)
class Done:
    programs: int = 0
    prefilled: int = 0
    cached: int = 0


def measure_pressure(tell: Tell, *, quick: bool) -> None:
    anyio.run(_measure, tell, quick)


async def _measure(tell: Tell, quick: bool) -> None:
    peak = _PROGRAMS * (_PROMPT + _TURNS * (_OUTPUT + _RESULT))
    with tempfile.TemporaryDirectory(prefix="sostenuto-pressure-") as folder:
        tokenizer = train_tokenizer(tokenizer_material(1))
        model = await random_model(Path(folder) / "model", tokenizer=tokenizer)
        for name, pool, target in (
            (f"working set {_PRESSURE} x the pool", round(peak / _PRESSURE), ">= 1.5"),
            ("a pool for all", 2 * peak, ">= 0.95"),
        ):
            through = await _rate(tell, f"{name}: through the gateway", model, pool, quick, gateway=True)
            direct = await _rate(tell, f"{name}: on the engine itself", model, pool, quick, gateway=False)
            tell(
                f"{name}: completed programs a minute, gateway over engine", through / direct, "ratio", target
            )


async def _rate(tell: Tell, name: str, model: Path, pool: int, quick: bool, *, gateway: bool) -> float:
    """Completed programs a minute."""
    with tempfile.TemporaryDirectory(prefix="sostenuto-engine-") as folder:
        socket = Path(folder) / "engine.sock"
        settings = EmbeddedSettings(model=model, socket=socket, kv_tokens=pool, concurrency=_PROGRAMS)
        async with launch_embedded(settings, engine_id=EngineId("e")) as engine:
            began_s = time.perf_counter()
            async with _sampling(engine, model, socket, gateway=gateway) as sample:
                rounds = 1 if quick else _ROUNDS
                async with anyio.create_task_group() as group:
                    for place in range(_PROGRAMS):
                        group.start_soon(_place, sample, place, rounds)
            took_s = time.perf_counter() - began_s
            load = await engine.load()
    rate = _PROGRAMS * rounds / took_s * 60
    hit = load.cached_tokens / max(1, load.cached_tokens + load.prefilled_tokens)
    tell(f"{name}, completed programs a minute", rate, "1/min")
    tell(f"{name}, prefix hit rate", hit, "share")
    return rate


@asynccontextmanager
async def _sampling(
    engine: EngineClient, model: Path, socket: Path, *, gateway: bool
) -> AsyncGenerator[Sample]:
    if not gateway:

        async def alone(program: str, context: list[int]) -> list[int]:
            name = f"{program}/{len(context)}"
            reply = await engine.generate(
                GenerateRequest(
                    request_id=name, program_id=name, token_ids=context, max_new_tokens=_OUTPUT, hold=False
                )
            )
            return reply.token_ids

        yield alone
        return
    async with gateway_on(model, socket) as stand, aiohttp.ClientSession() as http:

        async def through(program: str, context: list[int]) -> list[int]:
            body = {"token_ids": context, "sampling_params": {"max_tokens": _OUTPUT, "ignore_eos": True}}
            url = f"{stand.url}/p/{program}/inference/v1/generate"
            last = len(context) >= _PROMPT + (_TURNS - 1) * (_OUTPUT + _RESULT)
            headers = {"X-Program-Final": "true"} if last else {}
            headers["X-Program-Id"] = program
            async with http.post(url, json=body, headers=headers) as response:
                said = await response.json()
                if response.status != 200:
                    raise RuntimeError(str(said))
            tokens: list[int] = said["choices"][0]["token_ids"]
            return tokens

        yield through


async def _place(sample: Sample, place: int, rounds: int) -> None:
    for number in range(rounds):
        drawn = random.Random(place * 1000 + number)
        context = [drawn.randrange(_VOCABULARY) for _ in range(_PROMPT)]
        for turn in range(_TURNS):
            context += await sample(f"{place}-{number}", context)
            if turn + 1 < _TURNS:
                await anyio.sleep(drawn.uniform(*_GAP_S))
                context += [drawn.randrange(_VOCABULARY) for _ in range(_RESULT)]
