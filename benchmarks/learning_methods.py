"""Whether every method arrives where GRPO does: the quickstart's environment, from one warm start a seed.

Held-out success is told every few steps; docs/learning.png shows the curves.  What a step sees does not
depend on the machine, so the figures may be taken beside other work.
"""

import json
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import anyio

from benchmarks.figure import Tell
from sostenuto.runtime.jobs.events import Evaluated, JobEvent
from sostenuto.runtime.jobs.job import RLJob
from sostenuto.runtime.quickstart.job import default_config, quickstart_job, warm_model
from sostenuto.runtime.quickstart.recipe import Copying, Demonstrating, Gate, Recipe, Reinforcing
from sostenuto.runtime.runtime import Runtime
from sostenuto.trainer.algorithms import RECIPES, Algorithm

METHODS = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "gspo", "cispo", "sapo", "decoupled_ppo", "ppo")
SEEDS = (1, 2, 3)
ARRIVED = 0.9
_CURVES = Path(__file__).parent / "results" / "learning-curves.jsonl"
_PICTURE = Path(__file__).parent.parent / "docs" / "learning.png"
_EVERY = 5


@dataclass(frozen=True, slots=True)
class Point:
    """Held-out success, sampled at temperature 1."""

    method: str
    seed: int
    step: int
    success: float


def measure_methods(tell: Tell, *, quick: bool) -> None:
    seeds = SEEDS[:1] if quick else SEEDS
    methods = [name for name in METHODS[: 2 if quick else None] if name in RECIPES]
    points: list[Point] = []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            for curve in _curves(Path(folder), methods, seed, quick=quick):
                points += curve
                _tell(tell, curve)
    if not quick:
        _CURVES.write_text("".join(f"{json.dumps(vars_of(point))}\n" for point in points))
        draw(points, _PICTURE)


def vars_of(point: Point) -> dict[str, str | int | float]:
    return {name: getattr(point, name) for name in ("method", "seed", "step", "success")}


def _curves(folder: Path, methods: list[str], seed: int, *, quick: bool) -> Iterable[list[Point]]:
    recipe = _recipe(quick=quick)
    warm, _ = anyio.run(warm_model, folder / "models", recipe, seed, _quiet)
    for method in methods:
        job = _job(warm, recipe, seed, RECIPES[method])
        yield anyio.run(_trained, folder / method, job, method, seed)


def _recipe(*, quick: bool) -> Recipe:
    if not quick:
        return Recipe(held_out_tasks=200)
    return Recipe(
        copying=Copying(steps=5),
        demonstrating=Demonstrating(steps=5, most_steps=5, gate=Gate(lessons=10, answers=10)),
        reinforcing=Reinforcing(steps=2),
        held_out_tasks=10,
    )


def _job(model: Path, recipe: Recipe, seed: int, method: type[Algorithm]) -> RLJob:
    """So many programs a step, in groups of 8 where members are compared."""
    algorithm = method.model_validate({"group_size": 8})
    if not algorithm.compares_group:
        algorithm = algorithm.model_copy(update={"group_size": 1})
    groups = recipe.reinforcing.groups * 8 // algorithm.group_size
    return replace(
        quickstart_job(model, recipe, seed),
        algorithm=algorithm,
        groups_per_step=groups,
        eval_every=_EVERY,
    )


async def _trained(folder: Path, job: RLJob, method: str, seed: int) -> list[Point]:
    points: list[Point] = []
    async with Runtime(default_config(folder)) as runtime:
        handle = await runtime.submit(job)
        async for event in handle.events():
            if isinstance(event, Evaluated) and event.temperature > 0:
                points.append(Point(method, seed, event.step, event.reward))
                print(f"# {method}, seed {seed}, step {event.step}: {event.reward:.3f}", file=sys.stderr)
        await handle.result()
    return points


def _tell(tell: Tell, curve: list[Point]) -> None:
    last = curve[-1]
    name = f"{last.method}, seed {last.seed}"
    tell(f"{name}: held-out success after {last.step} steps", last.success, "share of tasks", f">= {ARRIVED}")
    arrived = [point.step for point in curve if point.success >= ARRIVED]
    if arrived:
        tell(f"{name}: steps to {ARRIVED}", arrived[0], "steps")


def _quiet(event: JobEvent) -> None:
    del event


def draw(points: list[Point], picture: Path) -> None:
    """Mean over seeds of each method, and the range between them."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = cast("tuple[Any, Any]", plt.subplots(figsize=(8, 4.5)))
    for method in dict.fromkeys(point.method for point in points):
        own = [point for point in points if point.method == method]
        steps = sorted({point.step for point in own})
        at = [[point.success for point in own if point.step == step] for step in steps]
        (line,) = axes.plot(steps, [sum(values) / len(values) for values in at], label=method)
        axes.fill_between(
            steps, [min(v) for v in at], [max(v) for v in at], alpha=0.1, color=line.get_color()
        )
    axes.axhline(ARRIVED, color="grey", linewidth=0.8, linestyle=":")
    axes.set_xlabel("step of 64 programs")
    axes.set_ylabel("held-out success, sampled")
    axes.legend(ncols=3, fontsize="small")
    figure.tight_layout()
    figure.savefig(picture, dpi=110)
    plt.close(figure)
