"""The command line of the figures of recovery."""

import argparse
import random
import sys
from pathlib import Path

import anyio

from benchmarks import models, outside
from benchmarks.bench import Bench
from benchmarks.recovery_cost import measure_cost
from benchmarks.recovery_quickstart import measure_quickstart
from benchmarks.recovery_torture import Small, Torture, open_folder
from benchmarks.telling import Telling

RESULTS = Path(__file__).parent / "results" / "recovery.jsonl"
_KILLS_OF_A_JOB = 8
_SPREAD = 0.6
"""Of what an undisturbed job takes: the longest time from one kill to the next."""
_KILLS_OF_A_QUICKSTART = 12


def main() -> None:
    """Measure what was asked for; exit status 1 when a figure misses its target."""
    asked = _arguments()
    tell = Telling(None if asked.quick else RESULTS)
    outside.adopt_orphans()
    for name in asked.only or [part for part in PARTS if part != "quickstart" or not asked.quick]:
        print(f"# {name}", file=sys.stderr, flush=True)
        anyio.run(PARTS[name], tell, asked)
    tell.end()


async def _torture(tell: Telling, asked: argparse.Namespace) -> None:
    torture = Torture(await _job(asked), random.Random(asked.seed))
    with open_folder() as folder:
        await torture.run_job(folder / "undisturbed", 0)
        torture.longest_s = max(torture.longest_s, _SPREAD * torture.walls_s[0])
        number, goal = 0, 6 if asked.quick else asked.kills
        while torture.kills.total() < goal:
            number += 1
            left = goal - torture.kills.total()
            await torture.run_job(folder / str(number), min(_KILLS_OF_A_JOB, left))
            print(f"# job {number}, {torture.kills.total()} kills", file=sys.stderr, flush=True)
        undisturbed_s, *disturbed_s = torture.walls_s
        lost_s = (sum(disturbed_s) - len(disturbed_s) * undisturbed_s) / torture.kills.total()
        tell("job_undisturbed", undisturbed_s, "s")
        tell("lost_per_kill", lost_s, "s")
        torture.tell(tell)


async def _cost(tell: Telling, asked: argparse.Namespace) -> None:
    await measure_cost(tell, await _job(asked))


async def _quickstart(tell: Telling, asked: argparse.Namespace) -> None:
    model = (await _job(asked)).model
    await measure_quickstart(tell, model, kills=_KILLS_OF_A_QUICKSTART, seed=asked.seed)


PARTS = {"torture": _torture, "cost": _cost, "quickstart": _quickstart}


async def _job(asked: argparse.Namespace) -> Small:
    bench = Bench(quick=asked.quick)
    model = Path(asked.model) if asked.model else await models.warm(bench)
    return Small(model, steps=8) if asked.quick else Small(model)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), help="these alone")
    parser.add_argument("--quick", action="store_true", help="few kills, and nothing is written to results/")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=7, help="of what is killed when")
    parser.add_argument("--model", help="folder of a warm-started model; none: the quickstart's is made")
    return parser.parse_args()
