"""The command line of figures that come in parts, each a module `benchmarks.FAMILY_PART`."""

import argparse
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from benchmarks.telling import Telling, end_in_order

PARTS = {
    "engines": ("decode", "memory", "exactness", "fleet", "adapters", "speculation", "vllm"),
    "learning": ("methods", "trl", "distillation", "speed"),
    "publication": ("transfer", "delta", "pause"),
    "gateway": ("cost", "pressure", "fuzz", "schema", "clients", "conformance"),
}


def measure_parts(family: str) -> None:
    """Measure what was asked for; exit status 1 when a figure misses its target."""
    asked = _arguments(family)
    end_in_order()
    results = Path(__file__).parent / "results" / f"{family}.jsonl"
    tell = Telling(None if asked.quick else results)
    for part in asked.only or PARTS[family]:
        print(f"# {part}", file=sys.stderr, flush=True)
        # Loaded one by one: each sets up torch, or does without it.
        module = import_module(f"benchmarks.{family}_{part}")
        measure: Callable[..., None] = getattr(module, f"measure_{part}")
        measure(tell, quick=asked.quick)
    tell.end()


def _arguments(family: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=f"The figures of the {family}.")
    parser.add_argument("--only", nargs="+", choices=PARTS[family], help="these alone")
    parser.add_argument("--quick", action="store_true", help="less of it, and nothing is written to results/")
    return parser.parse_args()
