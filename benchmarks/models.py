"""The models that are measured with, built once and kept in .cache/."""

from itertools import islice
from pathlib import Path

from benchmarks.bench import Bench
from sostenuto.envs.declaration import declaration
from sostenuto.envs.storeroom.demonstrations import demonstrate_in_full
from sostenuto.envs.storeroom.environment import Storeroom
from sostenuto.envs.storeroom.world import training_tasks
from sostenuto.runtime.quickstart.job import warm_model
from sostenuto.runtime.rendering.choice import open_renderer
from sostenuto.runtime.rendering.demonstration import demonstrate
from sostenuto.runtime.rendering.folder import ModelFolder
from sostenuto.trainer.client import TrainerClient
from sostenuto.trainer.samples import Sample, demonstration
from sostenuto.trainer.settings import LearnerSettings, Schedule
from sostenuto.types import Version

_SEED = 1
_STEPS = 150
_BATCH = 16
_VERSION = Version(0, 0)


async def warm(bench: Bench) -> Path:
    """The quickstart's model after its warm start: it takes shortcuts, and is wrong more often than right."""
    folder = bench.models / f"warm-{_SEED}" / f"version-{_VERSION}"
    if not folder.is_dir():
        folder, _ = await warm_model(bench.models, bench.recipe, _SEED, bench.follow)
    return folder


async def competent(bench: Bench) -> Path:
    """The same taught, by imitation, to find, read and calculate every time: three tool calls an episode."""
    folder = bench.models / "competent" / f"version-{_VERSION}"
    if folder.is_dir():
        return folder
    taught_from = await warm(bench)
    samples = iter(_demonstrations(taught_from))
    async with TrainerClient() as trainer:
        await trainer.open(taught_from, LearnerSettings(), seed=_SEED)
        await trainer.reset_optimizer(Schedule(learning_rate=1e-3, shape="linear", total_steps=_STEPS))
        for _ in range(_STEPS):
            await trainer.fit(list(islice(samples, _BATCH)))
        return await trainer.save(folder.parent, _VERSION)


def _demonstrations(folder: Path) -> list[Sample]:
    renderer = open_renderer(ModelFolder.open(folder))
    tools = tuple(declared.tool.schema for declared in declaration(Storeroom).tools.values())
    tasks = islice(training_tasks(_SEED), _STEPS * _BATCH)
    return [
        demonstration(shown.token_ids, shown.mask)
        for task in tasks
        for shown in demonstrate(renderer, demonstrate_in_full(task), tools)
    ]
