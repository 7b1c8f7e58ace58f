"""Episodes of a model in a storeroom, run as anyone would run them, with the engine's socket tapped."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from benchmarks.bench import Bench
from benchmarks.wiretap import Exchange, Wiretap
from sostenuto.envs.storeroom.environment import Storeroom
from sostenuto.envs.storeroom.world import held_out_tasks
from sostenuto.records import Trajectory
from sostenuto.runtime.jobs.job import EvalJob
from sostenuto.runtime.journal import read_journal
from sostenuto.runtime.quickstart.job import default_config
from sostenuto.runtime.run_directory import RunDirectory
from sostenuto.runtime.runtime import Runtime

_NO_OPTIONS: Mapping[str, JsonValue] = {}


@dataclass(frozen=True, slots=True)
class Episodes:
    """Records from the journal, and what crossed the engine's socket, by program."""

    records: list[Trajectory]
    exchanges: dict[str, list[Exchange]]


async def sample(
    bench: Bench,
    model: Path,
    tasks: int,
    *,
    environment: type[Storeroom] = Storeroom,
    options: Mapping[str, JsonValue] = _NO_OPTIONS,
    temperatures: tuple[float, ...] = (1.0,),
    kv_tokens: int | None = None,
) -> Episodes:
    """Run so many held-out tasks once at each temperature, and read the run's journal."""
    tap = Wiretap()
    job = EvalJob(
        env=environment,
        options=options,
        model=model,
        tasks=held_out_tasks(tasks, seed=1),
        temperatures=temperatures,
        limits=bench.recipe.limits,
    )
    with bench.run_directory() as folder:
        config = default_config(folder)
        if kv_tokens is not None:
            engine = config.engine.model_copy(update={"kv_tokens": kv_tokens})
            config = config.model_copy(update={"engine": engine})
        async with Runtime(config, tap=tap) as runtime:
            await (await runtime.submit(job)).result()
        with read_journal(RunDirectory(folder).journal) as journal:
            return Episodes(list(journal.trajectories()), tap.exchanges())
