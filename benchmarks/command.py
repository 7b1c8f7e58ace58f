"""The command line of the foundation's figures."""

import argparse
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import anyio

from benchmarks import code_size, cost, exactness, leftovers, outside, overlap, quickstarts
from benchmarks.bench import Bench
from benchmarks.figure import keep
from sostenuto.errors import lone_error

Measure = Callable[[Bench], Awaitable[None]]

RESULTS = Path(__file__).parent / "results" / "foundation.jsonl"
MEASURES: dict[str, Measure] = {
    "size": code_size.measure,
    "logprobs": exactness.measure_logprobs,
    "prefill": exactness.measure_prefill,
    "tokens": exactness.measure_tokens,
    "cost": cost.measure,
    "leftovers": leftovers.measure,
    "overlap": overlap.measure,
}
LONG: dict[str, Measure] = {"quickstart": quickstarts.measure}
"""Many minutes each; only when they are asked for."""


def main() -> None:
    """Measure what was asked for; exit status 1 when a figure misses its target."""
    asked = _arguments()
    names: list[str] = asked.only or [*MEASURES, *(LONG if asked.quickstart else ())]
    bench = Bench(quick=asked.quick, seeds=tuple(asked.seeds))
    outside.adopt_orphans()
    anyio.run(_measure, bench, names)
    missed = [figure for figure in bench.figures if not figure.is_met]
    for figure in missed:
        print(f"# missed: {figure.name} is {figure.value:g}, not {figure.target}", file=sys.stderr)
    sys.exit(1 if missed else 0)


async def _measure(bench: Bench, names: Sequence[str]) -> None:
    for name in names:
        print(f"# {name}", file=sys.stderr, flush=True)
        with lone_error():
            await {**MEASURES, **LONG}[name](bench)
        if not bench.quick:
            keep(bench.figures, RESULTS)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[*MEASURES, *LONG], help="these alone")
    parser.add_argument("--quick", action="store_true", help="small sizes, nothing is written to results/")
    parser.add_argument("--quickstart", action="store_true", help="the quickstarts too, many minutes")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="of the quickstarts")
    return parser.parse_args()
