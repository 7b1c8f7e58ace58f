"""Is the simulator true?  Real vLLM on CPU against its simulation, at four sizes of the pool.

    python -m benchmarks.vllm_truth                  from the runs that are recorded
    python -m benchmarks.vllm_truth --vllm PATH      measure again; PATH is the `vllm` command

The engine's profile is fitted at one size alone: calibration's probe gives its shape, the run at that size
(the mean of its rounds) its tempo.  For the others only the pool is changed.
"""

import argparse
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import aiohttp
import anyio
from pydantic import BaseModel

from benchmarks.figure import Figure
from benchmarks.vllm_client import MeasuredRun, measure
from benchmarks.vllm_model import make_model
from benchmarks.vllm_server import BLOCK_TOKENS, serve
from benchmarks.vllm_workload import (
    make_workload,
    usual_context_tokens,
    with_other_tool_times,
    working_set_tokens,
)
from sostenuto.runtime.calibration.calibrate import ProbeSettings, calibrate
from sostenuto.runtime.simulation.profile import EngineProfile, FleetProfile
from sostenuto.runtime.simulation.results import RunResult
from sostenuto.runtime.simulation.world import simulate
from sostenuto.scheduler.policies import make_policy

RECORDED = Path(__file__).parent / "results" / "vllm_runs.json"
FITTED = 662
BLOCKS = (FITTED, 1660, 828, 414)
_ROUNDS = 3
_FURTHEST_TEMPO, _HALVINGS = 3.0, 12
_SIMULATIONS, _TOOL_TIME_CHANGE = 16, 0.05
_MODEL = Path(__file__).parent.parent / ".cache" / "benchmarks" / "vllm-llama"


class Recorded(BaseModel):
    """What was measured."""

    profile: EngineProfile
    """Probed at the size that is fitted."""
    runs: list[MeasuredRun]


async def measure_all(vllm: Path, seed: int) -> Recorded:
    """A server for each size; their runs take turns, so that what slows the machine down slows all."""
    model, workload = make_model(_MODEL), make_workload(seed)
    async with AsyncExitStack() as stack:
        urls = {n: await stack.enter_async_context(serve(vllm, model, blocks=n)) for n in BLOCKS}
        settings = ProbeSettings(decode_context_tokens=usual_context_tokens(workload))
        recorded = Recorded(runs=[], profile=await calibrate(urls[FITTED], settings=settings))
        _say(recorded.profile.model_dump_json())
        for blocks, url in list(urls.items()) * _ROUNDS:
            await _forget(url)
            run = await measure(url, workload, blocks=blocks, seed=seed)
            recorded.runs.append(run)
            _say(
                f"{blocks} blocks: hit rate {run.hit_rate:.3f}, mean completion {run.mean_completion_s:.1f} s"
            )
    return recorded


async def _forget(url: str) -> None:
    async with aiohttp.ClientSession(url) as session, session.post("/reset_prefix_cache") as answer:
        answer.raise_for_status()


@dataclass(frozen=True, slots=True)
class Means:
    """Over all turns, and over all programs."""

    hit_rate: float
    completion_s: float


def measured(recorded: Recorded, blocks: int) -> Means:
    """Over the rounds."""
    runs = [run for run in recorded.runs if run.blocks == blocks]
    return Means(fmean(run.hit_rate for run in runs), fmean(run.mean_completion_s for run in runs))


def simulated(profile: EngineProfile, blocks: int, seed: int) -> Means:
    """Over simulations that differ by a little in their tool times.

    Near the knee the smallest difference decides whose KV is evicted, in simulation as in reality: what can
    be predicted is the mean.  One block of the pool is never used.
    """
    engine = profile.model_copy(update={"kv_tokens": (blocks - 1) * BLOCK_TOKENS})
    workload = make_workload(seed)
    variants = [with_other_tool_times(workload, number, _TOOL_TIME_CHANGE) for number in range(_SIMULATIONS)]
    means = [
        _means(simulate(make_policy("request-sticky"), v, FleetProfile(engine=engine))) for v in variants
    ]
    return Means(fmean(m.hit_rate for m in means), fmean(m.completion_s for m in means))


def _means(run: RunResult) -> Means:
    cached, sent = (sum(p.cached_tokens for p in run.programs), sum(p.context_tokens for p in run.programs))
    return Means(cached / sent, fmean(p.completion_s for p in run.programs))


def fitted(recorded: Recorded) -> EngineProfile:
    """The probed profile at the tempo of the runs: the machine is not equally fast all the time."""
    wanted_s, seed = measured(recorded, FITTED).completion_s, recorded.runs[0].seed
    fast, slow = 1 / _FURTHEST_TEMPO, _FURTHEST_TEMPO
    for _ in range(_HALVINGS):
        middle = (fast + slow) / 2
        took_s = simulated(slowed(recorded.profile, middle), FITTED, seed).completion_s
        fast, slow = (middle, slow) if took_s < wanted_s else (fast, middle)
    return slowed(recorded.profile, fast)


def slowed(profile: EngineProfile, factor: float) -> EngineProfile:
    """Everything that the engine does takes `factor` times as long."""
    times = {
        "prefill_tokens_s": profile.prefill_tokens_s / factor,
        "prefill_s_per_token_squared": profile.prefill_s_per_token_squared * factor,
        "itl_s": tuple((n, seconds * factor) for n, seconds in profile.itl_s),
        "request_s": profile.request_s * factor,
    }
    return profile.model_copy(update=times)


def compare(recorded: Recorded) -> list[Figure]:
    """Each size's figures, then the worst of those that were not fitted."""
    profile, seed = fitted(recorded), recorded.runs[0].seed
    tempo = profile.request_s / recorded.profile.request_s
    figures = [Figure("vllm_tempo_of_runs_to_probe", tempo, "ratio")]
    hits: list[float] = []
    times: list[float] = []
    for blocks in BLOCKS:
        real, predicted = measured(recorded, blocks), simulated(profile, blocks, seed)
        figures += _of_one_size(recorded, blocks, real, predicted)
        if blocks != FITTED:
            hits.append(abs(predicted.hit_rate - real.hit_rate))
            times.append(abs(predicted.completion_s / real.completion_s - 1))
    return [
        *figures,
        Figure("simulator_hit_rate_error", max(hits), "share", "<= 0.07"),
        Figure("simulator_completion_error", max(times), "ratio", "<= 0.15"),
    ]


def _of_one_size(recorded: Recorded, blocks: int, real: Means, predicted: Means) -> list[Figure]:
    ratio = working_set_tokens(make_workload(recorded.runs[0].seed)) / ((blocks - 1) * BLOCK_TOKENS)
    rounds_s = [run.mean_completion_s for run in recorded.runs if run.blocks == blocks]
    spread = (max(rounds_s) - min(rounds_s)) / real.completion_s
    at = f"at_{ratio:.2f}"
    return [
        Figure(f"vllm_hit_rate_measured_{at}", real.hit_rate, "share"),
        Figure(f"vllm_hit_rate_simulated_{at}", predicted.hit_rate, "share"),
        Figure(f"vllm_completion_measured_{at}", real.completion_s, "s"),
        Figure(f"vllm_completion_simulated_{at}", predicted.completion_s, "s"),
        Figure(f"vllm_completion_spread_of_rounds_{at}", spread, "ratio"),
    ]


def main() -> None:
    """Exit status 1 when a figure misses its target."""
    parser = argparse.ArgumentParser(description="The simulator against real vLLM on CPU.")
    parser.add_argument("--vllm", type=Path, help="measure again with this `vllm` command")
    parser.add_argument("--seed", type=int, default=1, help="of the workload, with --vllm")
    parser.add_argument("--recorded", type=Path, default=RECORDED, help="the file of measured runs")
    asked = parser.parse_args()
    if asked.vllm:
        recorded = anyio.run(measure_all, asked.vllm, asked.seed)
        asked.recorded.write_text(recorded.model_dump_json(indent=1))
    figures = compare(Recorded.model_validate_json(asked.recorded.read_text()))
    for figure in figures:
        print(figure.line())
    sys.exit(0 if all(figure.is_met for figure in figures) else 1)


def _say(text: str) -> None:
    print(f"# {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
