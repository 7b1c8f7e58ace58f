"""The command line of the figures of the gateway."""

import argparse
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from benchmarks.telling import Telling

RESULTS = Path(__file__).parent / "results" / "gateway.jsonl"
PARTS = ("cost", "pressure", "fuzz", "schema", "clients")


def main() -> None:
    """Measure what was asked for; exit status 1 when a figure misses its target."""
    asked = _arguments()
    tell = Telling(None if asked.quick else RESULTS)
    for name in asked.only or PARTS:
        print(f"# {name}", file=sys.stderr, flush=True)
        # Loaded one by one: not each needs torch.
        measure: Callable[..., None] = getattr(import_module(f"benchmarks.gateway_{name}"), f"measure_{name}")
        measure(tell, quick=asked.quick)
    tell.end()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, help="these alone")
    parser.add_argument("--quick", action="store_true", help="less of it, and nothing is written to results/")
    return parser.parse_args()
