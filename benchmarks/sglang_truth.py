"""The SGLang adapter against a real SGLang server on CPU: what `make test-sglang` runs.

    python -m benchmarks.sglang_truth

1. The adapter's contract tests, on the real server.
2. Every body that the adapter's tests send, against SGLang's own types.
3. Programs of several turns on the real server, with weights that are published while they run.
4. On another one, a job that learns and publishes its weights.
Ends with status 1 when something of it fails.  Figures are printed as they come, one JSON object a line.
"""

import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import anyio
import anyio.to_thread

from benchmarks.engine_suites import job_passes, passes
from benchmarks.engine_suites import make_model as make_job_model
from benchmarks.figure import Tell
from benchmarks.sglang_environment import sglang_python
from benchmarks.sglang_server import make_model, serve
from benchmarks.telling import Telling, end_in_order
from sostenuto.runtime.engines.folder import WeightFolders
from sostenuto.runtime.engines.sglang.engine import SGLangEngine
from sostenuto.runtime.engines.sglang.transports import Disk
from sostenuto.runtime.engines.wire import CommitRequest, GenerateRequest, Sampling
from sostenuto.trainer.publication.manifest import Manifest
from sostenuto.trainer.publication.shared_memory import SharedMemorySender
from sostenuto.trainer.publication.snapshot import unique_tensors
from sostenuto.types import EngineId, ProgramId, Version

PROGRAMS, TURNS = 16, 6
PROMPT_TOKENS, TURN_TOKENS, RESULT_TOKENS = 64, 24, 16
TOOL_S = 0.1
"""The mean: with one time for all they would run and wait together, and no update would meet a turn."""
_CONTRACT = "tests/test_sglang_adapter.py"
_FAKED = [f"tests/test_sglang_{part}.py" for part in ("traps", "updates", "distributed", "bad_input")]


@dataclass(slots=True)
class Measured:
    """Of all programs of a run."""

    name: str
    prefilled: int = 0
    generated: int = 0
    turns: int = 0
    paused_s: list[float] = field(default_factory=list[float])
    mixed: int = 0
    """Turns with tokens of two versions."""


def main() -> None:
    end_in_order()
    python, telling = sglang_python(), Telling(None)

    def tell(name: str, value: float, unit: str, target: str | None = None) -> None:
        telling(f"sglang on CPU: {name}", value, unit, target)

    with tempfile.TemporaryDirectory() as folder:
        failed = asyncio.run(_measure(python, Path(folder), tell))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
        sys.exit(1)
    telling.end()


async def _measure(python: Path, place: Path, tell: Tell) -> list[str]:
    """The parts that failed."""
    failed: list[str] = []
    model = place / "model"
    make_model(model)
    began_s = time.monotonic()
    async with serve(python, model, place / "sglang.log") as url:
        tell("start of the server", time.monotonic() - began_s, "s")
        served = {"SOSTENUTO_SGLANG_URL": url, "SOSTENUTO_SGLANG_MODEL": str(model)}
        if not await passes(served, _CONTRACT):
            failed.append("contract tests on the real server")
        await _programs(url, model, place, tell)
    job_model = await anyio.to_thread.run_sync(make_job_model, place / "job", 0)
    async with serve(python, job_model, place / "sglang-job.log") as url:
        if not await job_passes("sglang", url, job_model, place):
            failed.append("a job on the real server")
    bodies = place / "bodies.jsonl"
    if not await passes({"SOSTENUTO_SGLANG_BODIES": str(bodies)}, _CONTRACT, *_FAKED):
        failed.append("contract tests on the fake server")
    if not await _check_bodies(python, bodies, tell):
        failed.append("bodies against SGLang's types")
    return failed


async def _check_bodies(python: Path, bodies: Path, tell: Tell) -> bool:
    environment = os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONWARNINGS": "ignore"}
    content = await anyio.Path(bodies).read_bytes()
    process = await anyio.run_process(
        [str(python), str(Path(__file__).with_name("sglang_bodies.py"))],
        input=content, check=False, env=environment, stdout=subprocess.PIPE, stderr=sys.stderr,
    )  # fmt: skip
    if process.returncode == 0:
        tell("bodies that SGLang's own types take", content.count(b"\n"), "bodies")
    return process.returncode == 0


async def _programs(url: str, model: Path, place: Path, tell: Tell) -> None:
    """All programs at once, and again while versions are published in both ways."""
    transport = Disk(WeightFolders(place / "weights", model))
    async with SGLangEngine(EngineId("e0"), url, model=model, transport=transport) as engine:
        served = Version.parse((await engine.capabilities()).version)
        alone, updated = Measured("alone"), Measured("updated")
        alone_s = await _run(engine, alone, [])
        with closing(SharedMemorySender()) as sender:
            # Before they run: they may be fast.
            published = await anyio.to_thread.run_sync(_published, sender, model, served)
            updated_s = await _run(engine, updated, published)
    least = PROGRAMS * (PROMPT_TOKENS + (TURNS - 1) * (RESULT_TOKENS + 1))
    tell("turns that ended", alone.turns + updated.turns, "turns", f"== {2 * PROGRAMS * TURNS}")
    tell("programs a minute", 60 * PROGRAMS / alone_s, "1/min")
    tell("tokens sampled", alone.generated / alone_s, "1/s")
    tell("tokens prefilled over the unavoidable", alone.prefilled / least, "ratio", "<= 1.1")
    tell("programs a minute while two versions are published", 60 * PROGRAMS / updated_s, "1/min")
    tell("stood still: continue, keep", updated.paused_s[0], "s")
    tell("stood still: recompute, drop", updated.paused_s[1], "s")
    tell("turns with tokens of two versions", updated.mixed, "turns", ">= 1")


async def _run(engine: SGLangEngine, measured: Measured, published: list[Manifest]) -> float:
    """How long all programs took, in seconds; with two versions that the engine gets on the way."""
    began_s = time.monotonic()
    async with anyio.create_task_group() as group:
        for number in range(PROGRAMS):
            group.start_soon(_program, engine, number, measured)
        if published:
            group.start_soon(_update_twice, engine, published, measured)
    return time.monotonic() - began_s


async def _program(engine: SGLangEngine, number: int, measured: Measured) -> None:
    draw = random.Random(f"{measured.name} {number}")
    name, tokens = f"{measured.name}-{number}", [draw.randrange(64) for _ in range(PROMPT_TOKENS)]
    for turn in range(TURNS):
        request = GenerateRequest(
            request_id=f"{name}-{turn}", program_id=name, token_ids=tokens, max_new_tokens=TURN_TOKENS,
            sampling=Sampling(seed=number),
        )  # fmt: skip
        reply = await engine.generate(request)
        measured.turns += 1
        measured.prefilled += reply.prefilled_tokens
        measured.generated += len(reply.token_ids)
        measured.mixed += len(reply.versions) > 1
        tokens = [*tokens, *reply.token_ids, *(draw.randrange(64) for _ in range(RESULT_TOKENS))]
        await anyio.sleep(draw.uniform(0, 2 * TOOL_S))
    await engine.release(ProgramId(name))


async def _update_twice(engine: SGLangEngine, published: list[Manifest], measured: Measured) -> None:
    ways = ((0.2, "continue", "keep"), (0.5, "recompute", "drop"))
    for manifest, (turns, running, held) in zip(published, ways, strict=True):
        await engine.prepare_update(manifest)
        while measured.turns < turns * PROGRAMS * TURNS:  # noqa: ASYNC110 - the programs say nothing else
            await anyio.sleep(0.01)
        request = {"version": manifest.version, "running": running, "held": held}
        committed = await engine.commit_update(CommitRequest.model_validate(request))
        measured.paused_s.append(committed.pause_s)


def _published(sender: SharedMemorySender, model: Path, served: Version) -> list[Manifest]:
    """The next two versions: other weights for the model, as a trainer publishes them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = cast("Any", AutoConfig).from_pretrained(model)
    manifests: list[Manifest] = []
    for version in (served.next(), served.next().next()):
        module = cast("Any", AutoModelForCausalLM).from_config(config)
        manifests.append(sender.publish(version, unique_tensors(module.state_dict())))
    return manifests


if __name__ == "__main__":
    main()
