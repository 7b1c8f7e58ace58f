"""The command line of the scheduling figures."""

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks import scheduling_costs, scheduling_policies
from benchmarks.scheduling_cells import ORDERS, Runs
from benchmarks.telling import Telling

RESULTS = Path(__file__).parent / "results" / "scheduling.jsonl"
POLICIES = {
    "below": scheduling_policies.measure_below_the_knee,
    "past": scheduling_policies.measure_past_the_knee,
    "throughput": scheduling_policies.measure_throughput,
    "prefetch": scheduling_policies.measure_prefetch,
}
COSTS = {"events": scheduling_costs.measure_events, "speed": scheduling_costs.measure_speed}


def main() -> None:
    """Measure what was asked for; exit status 1 when a figure misses its target."""
    asked = _arguments()
    tell = Telling(None if asked.quick else RESULTS)
    with tempfile.TemporaryDirectory(prefix="sostenuto-bench-") as folder:
        runs = Runs(Path(folder), ORDERS[:1] if asked.quick else ORDERS, asked.workers)
        for name in asked.only or [*COSTS, *POLICIES]:
            print(f"# {name}", file=sys.stderr, flush=True)
            if name in COSTS:
                COSTS[name](tell, quick=asked.quick)
            else:
                POLICIES[name](runs, tell)
    tell.end()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[*COSTS, *POLICIES], help="these alone")
    parser.add_argument("--quick", action="store_true", help="one order, and nothing is written to results/")
    parser.add_argument("--workers", type=int, default=2, help="processes that simulate")
    return parser.parse_args()
