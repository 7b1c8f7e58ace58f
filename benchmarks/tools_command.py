"""The command line of the figures of the tool server."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
from pydantic import JsonValue

from benchmarks.figure import Tell
from benchmarks.telling import Telling
from benchmarks.tools_docker import measure_docker
from benchmarks.tools_http import measure_http
from benchmarks.tools_layers import measure_layers
from benchmarks.tools_local import measure_local
from benchmarks.tools_queues import measure_queues
from benchmarks.tools_torture import torture

RESULTS = Path(__file__).parent / "results" / "tools.jsonl"
_CYCLES = 10_000
_DOCKER_CYCLES = 300


def _torture(tell: Tell, *, quick: bool) -> None:
    async def run() -> None:
        await torture(tell, cycles=100 if quick else _CYCLES)

    anyio.run(run)


def _torture_docker(tell: Tell, *, quick: bool) -> None:
    """With the daemon and the image that `.ci/docker` provides."""
    image = os.environ.get("SOSTENUTO_DOCKER_IMAGE", "python:3.12-slim")

    def tell_apart(name: str, value: float, unit: str, target: str | None = None) -> None:
        tell(f"docker_{name}", value, unit, target)

    async def run() -> None:
        settings: dict[str, JsonValue] = {"sandbox": "docker", "docker": {"image": image}}
        await torture(tell_apart, cycles=20 if quick else _DOCKER_CYCLES, settings=settings)

    anyio.run(run)


PARTS: dict[str, Callable[..., None]] = {
    "local": measure_local,
    "http": measure_http,
    "queues": measure_queues,
    "layers": measure_layers,
    "docker": measure_docker,
    "torture": _torture,
    "docker-torture": _torture_docker,
}


def main() -> None:
    """Measure what was asked for; exit status 1 when a figure misses its target."""
    asked = _arguments()
    tell = Telling(None if asked.quick else RESULTS)
    for name in asked.only or [part for part in PARTS if "docker" not in part]:
        print(f"# {name}", file=sys.stderr, flush=True)
        PARTS[name](tell, quick=asked.quick)
    tell.end()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), help="these alone; docker needs a daemon")
    parser.add_argument("--quick", action="store_true", help="less of it, and nothing is written to results/")
    return parser.parse_args()
