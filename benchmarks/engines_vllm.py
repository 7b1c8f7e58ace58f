"""The embedded engine beside a real vLLM on CPU: how fast both decode, and programs of several turns.

SmolLM2-135M in bfloat16, one thread of computation each, the same requests over HTTP.  What each spends is
the processor time of its whole tree of processes, so that others on the machine count little.  The programs
ask vLLM request by request, as a client without a scheduler does; then they run with our scheduler on the
embedded engine, and with our scheduler on the same vLLM.  Every pool has the same number of tokens.
"""

from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import aiohttp
import anyio
import psutil
from anyio import to_thread

from benchmarks.engines_decode import MODEL
from benchmarks.figure import Tell
from benchmarks.vllm_client import measure
from benchmarks.vllm_environment import vllm_command
from benchmarks.vllm_server import BLOCK_TOKENS, serve
from benchmarks.vllm_workload import Conversation, make_workload, working_set_tokens
from sostenuto.runtime.bench.live.run import replay
from sostenuto.runtime.engines.client import launch_embedded
from sostenuto.runtime.engines.embedded.settings import EmbeddedSettings
from sostenuto.runtime.engines.protocol import Engine
from sostenuto.runtime.engines.terms import Terms
from sostenuto.runtime.engines.vllm.engine import Served, VllmEngine
from sostenuto.runtime.engines.vllm.transports import Disk
from sostenuto.runtime.engines.wire import GenerateRequest
from sostenuto.runtime.models import resolve_model
from sostenuto.runtime.simulation.plan import Workload
from sostenuto.scheduler.policies import make_policy
from sostenuto.types import EngineId

_CONTEXT = 448
_STEPS = 64
_BATCHES = (1, 8, 32)
_ROUNDS = 3
_PRESSURE = 1.5
_FLAGS = (
    "--scheduling-policy",
    "priority",
    "--enable-scale-out",
    "--logprobs-mode",
    "processed_logprobs",
)

Ask = Callable[[list[int], int], Coroutine[None, None, None]]
"""Sample exactly so many tokens after a context."""


@dataclass(slots=True)
class _Side:
    """An engine's server, and its processes."""

    ask: Ask
    processes: list[psutil.Process]
    rates: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    """Tokens per processor second, by batch."""

    def spent_s(self) -> float:
        times = [process.cpu_times() for process in self.processes]
        return sum(time.user + time.system for time in times)


def measure_vllm(tell: Tell, *, quick: bool) -> None:
    """Both engines side by side in one run; the first time vLLM's environment is built."""
    anyio.run(_measure, tell, quick, vllm_command())


async def _measure(tell: Tell, quick: bool, vllm: Path) -> None:
    model = await resolve_model(MODEL)
    workload = make_workload(1)
    blocks = round(working_set_tokens(workload) / _PRESSURE / BLOCK_TOKENS)
    before = set(psutil.Process().children())
    served = serve(vllm, model, blocks=blocks, dtype="bfloat16", flags=_FLAGS)
    async with served as url:
        theirs = _tree(before)
        await _decoding(tell, url, theirs, model, quick=quick)
        await _programs(tell, url, model, workload, blocks, rounds=1 if quick else _ROUNDS)


def _tree(before: set[psutil.Process]) -> list[psutil.Process]:
    """Every process that was started since, with all below it."""
    new = [process for process in psutil.Process().children() if process not in before]
    return new + [below for process in new for below in process.children(recursive=True)]


async def _decoding(tell: Tell, url: str, theirs: list[psutil.Process], model: Path, *, quick: bool) -> None:
    """The engines take turns at each batch."""
    before = set(psutil.Process().children())
    async with _embedded(model, _BATCHES[-1] * 1024) as engine, _http(url) as session:
        sides = {
            "embedded engine": _Side(_of_engine(engine), _tree(before)),
            "vLLM": _Side(_of_vllm(session), theirs),
        }
        for batch in _BATCHES[:2] if quick else _BATCHES:
            for number in range(1 if quick else _ROUNDS):
                for side in sides.values():
                    rate = await _decode(side, batch, seed=number * 100)
                    side.rates.setdefault(batch, []).append(rate)
            for name, side in sides.items():
                tell(f"decode at batch {batch}, {name}", median(side.rates[batch]), "tokens per cpu-second")
            pairs = zip(*(side.rates[batch] for side in sides.values()), strict=True)
            ratio = median(ours / other for ours, other in pairs)
            tell(f"decode over vLLM at batch {batch}", ratio, "", ">= 1.1" if batch == _BATCHES[-1] else None)


async def _decode(side: _Side, batch: int, *, seed: int) -> float:
    """Of a batch whose contexts are computed: what it takes beyond the first token."""
    prompts = [_prompt(seed + number) for number in range(batch)]
    await _all(side, prompts, 1)
    first_s = await _all(side, prompts, 1)
    return batch * _STEPS / (await _all(side, prompts, 1 + _STEPS) - first_s)


async def _all(side: _Side, prompts: list[list[int]], tokens: int) -> float:
    """Processor seconds."""
    before_s = side.spent_s()
    async with anyio.create_task_group() as group:
        for prompt in prompts:
            group.start_soon(side.ask, prompt, tokens)
    return side.spent_s() - before_s


def _prompt(seed: int) -> list[int]:
    workload = make_workload(seed)
    return Conversation(workload.programs[0], seed).token_ids[:_CONTEXT]


def _of_engine(engine: Engine) -> Ask:
    count = iter(range(1 << 30))

    async def ask(context: list[int], tokens: int) -> None:
        name = f"r{next(count)}"
        request = GenerateRequest(
            request_id=name, program_id=name, token_ids=context, max_new_tokens=tokens, hold=False
        )
        reply = await engine.generate(request)
        assert len(reply.token_ids) == tokens

    return ask


def _of_vllm(session: aiohttp.ClientSession) -> Ask:
    async def ask(context: list[int], tokens: int) -> None:
        body = {
            "model": "truth", "prompt": context, "max_tokens": tokens, "ignore_eos": True, "temperature": 1,
            "return_token_ids": True,
        }  # fmt: skip
        async with session.post("/v1/completions", json=body) as answer:
            answer.raise_for_status()
            said = await answer.json()
        assert len(said["choices"][0]["token_ids"]) == tokens

    return ask


async def _programs(
    tell: Tell, url: str, model: Path, workload: Workload, blocks: int, *, rounds: int
) -> None:
    """Completed programs a minute; the three ways take turns."""
    rates: dict[str, list[float]] = {"vLLM request by request": [], "embedded": [], "scheduler on vLLM": []}
    for number in range(1, rounds + 1):
        await _forget(url)
        run = await measure(url, workload, blocks=blocks, seed=number)
        last_s = max(turns[-1].ended_s for turns in run.turns.values())
        rates["vLLM request by request"].append(len(workload.programs) / last_s * 60)
        tell(f"programs, vLLM request by request: hit rate, round {number}", run.hit_rate, "share")
        async with _embedded(model, blocks * BLOCK_TOKENS) as engine:
            rates["embedded"].append(await _replayed(engine, workload, number))
        await _forget(url)
        async with _adapter(url, model) as engine:
            rates["scheduler on vLLM"].append(await _replayed(engine, workload, number))
    for name, values in rates.items():
        tell(f"programs a minute, {name}", median(values), "1/min")
    plain = rates.pop("vLLM request by request")
    for name, values in rates.items():
        ratio = median(ours / theirs for ours, theirs in zip(values, plain, strict=True))
        tell(f"programs a minute, {name} over vLLM request by request", ratio, "ratio", ">= 1.3")


async def _replayed(engine: Engine, workload: Workload, seed: int) -> float:
    policy = make_policy("sostenuto")
    run = await replay(policy, workload, {EngineId("e"): engine}, seed=seed)
    failed = [program.failed for program in run.programs if program.failed]
    assert not failed, failed
    return len(run.programs) / run.makespan_s * 60


@asynccontextmanager
async def _embedded(model: Path, kv_tokens: int) -> AsyncGenerator[Engine]:
    with TemporaryDirectory(prefix="sostenuto-vllm-") as folder:
        settings = EmbeddedSettings(
            model=model, socket=Path(folder) / "engine.sock", kv_tokens=kv_tokens, concurrency=32,
            dtype="bfloat16",
        )  # fmt: skip
        async with launch_embedded(settings, engine_id=EngineId("embedded")) as engine:
            yield engine


@asynccontextmanager
async def _adapter(url: str, model: Path) -> AsyncGenerator[Engine]:
    with TemporaryDirectory(prefix="sostenuto-vllm-") as folder:
        transport = await to_thread.run_sync(Disk, Path(folder), model)
        served = Served(terms=Terms(start_is_known=True))
        engine = VllmEngine(EngineId("vllm"), url, model=model, transport=transport, served=served)
        async with engine:
            yield engine


@asynccontextmanager
async def _http(url: str) -> AsyncGenerator[aiohttp.ClientSession]:
    timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
        yield session


async def _forget(url: str) -> None:
    async with _http(url) as session, session.post("/reset_prefix_cache") as answer:
        answer.raise_for_status()
