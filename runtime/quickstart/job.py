"""The quickstart: a small model is built, warm-started, and taught by reward to use its tools."""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

import anyio

from sostenuto.envs.storeroom.environment import Storeroom
from sostenuto.envs.storeroom.world import held_out_tasks, training_tasks
from sostenuto.errors import TrainerError, lone_error
from sostenuto.runtime.config import EngineSettings, RuntimeConfig, ToolServerSettings
from sostenuto.runtime.jobs.events import JobResult, WarmStartChecked
from sostenuto.runtime.jobs.job import RLJob
from sostenuto.runtime.jobs.workshop import Say
from sostenuto.runtime.quickstart.folder import write_folder
from sostenuto.runtime.quickstart.recipe import ModelShape, Recipe
from sostenuto.runtime.quickstart.tokenizer import tokenizer_material, train_tokenizer
from sostenuto.runtime.quickstart.warm import WarmStarter
from sostenuto.runtime.rendering.choice import open_renderer
from sostenuto.runtime.rendering.folder import ModelFolder
from sostenuto.runtime.runtime import Runtime
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.trainer.client import TrainerClient
from sostenuto.trainer.retention import check_checkpoint, checkpoints
from sostenuto.trainer.settings import LearnerSettings
from sostenuto.types import Version

_CHECKED = "warm.json"


@dataclass(frozen=True, slots=True)
class QuickstartResult:
    warm_start: WarmStartChecked
    warm_start_s: float
    job: JobResult


async def quickstart(
    config: RuntimeConfig,
    say: Say,
    *,
    seed: int = 1,
    recipe: Recipe | None = None,
    shuffle_rewards: bool = False,
    resumes: bool = False,
) -> QuickstartResult:
    """Build, warm-start and train, reporting to `say`; everything of it lies in the run directory.

    `resumes`: go on with one that was cut off there.
    """
    recipe = recipe or Recipe()
    with lone_error():
        async with Runtime(config) as runtime:
            path = runtime.directory.path
            began_s = anyio.current_time()
            warm = _warmed(path / "models", seed) if resumes else None
            folder, checked = warm or await warm_model(path / "models", recipe, seed, say)
            warm_s = anyio.current_time() - began_s
            job = replace(quickstart_job(folder, recipe, seed), shuffle_rewards=shuffle_rewards)
            job = await (runtime.resume(job, or_begin=True) if resumes else runtime.submit(job))
            async for event in job.events():
                say(event)
            return QuickstartResult(checked, warm_s, await job.result())


def default_config(directory: Path, *, unsafe: bool = False) -> RuntimeConfig:
    """What suits two cores: one thread for each process, and room for all groups in flight."""
    return RuntimeConfig(
        directory=directory,
        engine=EngineSettings(kv_tokens=64 * 256, concurrency=64),
        tool_server=ToolServerSettings(unsafe=unsafe),
        scheduler=SchedulerSettings(live_programs=96, prepare_ahead=16),
    )


async def warm_model(root: Path, recipe: Recipe, seed: int, say: Say) -> tuple[Path, WarmStartChecked]:
    """A warm-started model as a Hugging Face folder under `root`, and what its gate has shown."""
    fresh = await fresh_model(root / f"fresh-{seed}", recipe.model, seed)
    folder = ModelFolder.open(fresh)
    renderer = open_renderer(folder)
    async with TrainerClient() as trainer:
        await trainer.open(fresh, LearnerSettings(), seed=seed)
        checked = await WarmStarter(recipe, folder, renderer, trainer, seed).run(say)
        notes = {_CHECKED: json.dumps(asdict(checked)).encode()}
        return await trainer.save(root / f"warm-{seed}", Version(0, 0), notes=notes), checked


def _warmed(root: Path, seed: int) -> tuple[Path, WarmStartChecked] | None:
    """What `warm_model` has made before; None when it did not come to its end."""
    for _, folder in checkpoints(root / f"warm-{seed}"):
        check_checkpoint(folder)
        return folder, WarmStartChecked(**json.loads((folder / _CHECKED).read_text()))
    return None


async def fresh_model(folder: Path, shape: ModelShape, seed: int) -> Path:
    """Write the quickstart's tokenizer and random weights into `folder`."""
    await anyio.to_thread.run_sync(_write, folder, shape, seed)
    command = [sys.executable, "-m", "sostenuto.trainer.build", "--folder", str(folder), "--seed", str(seed)]
    done = await anyio.run_process(command, check=False, stderr=subprocess.PIPE)
    if done.returncode:
        raise TrainerError(f"the quickstart's model was not built: {done.stderr.decode(errors='replace')}")
    return folder


def _write(folder: Path, shape: ModelShape, seed: int) -> None:
    write_folder(folder, train_tokenizer(tokenizer_material(seed)), shape)


def quickstart_job(folder: Path, recipe: Recipe, seed: int) -> RLJob:
    """What is taught by reward, from a warm-started model."""
    plan = recipe.reinforcing
    # Far more worlds than a run can use, so none comes twice.
    worlds = plan.steps * plan.groups * 4
    return RLJob(
        name=f"quickstart-{seed}",
        env=Storeroom,
        model=folder,
        tasks=list(islice(training_tasks(seed), worlds)),
        eval_tasks=held_out_tasks(recipe.held_out_tasks, seed),
        limits=recipe.limits,
        steps=plan.steps,
        groups_per_step=plan.groups,
        max_staleness=plan.staleness,
        algorithm=plan.algorithm,
        learner=LearnerSettings(schedule=plan.schedule),
        seed=seed,
    )
