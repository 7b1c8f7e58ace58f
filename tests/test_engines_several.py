"""Several embedded engines at full stack: processes that are killed, added and removed while a job runs."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
import psutil
import pytest

from fakes_training import Parity, numbers
from real_jobs import build_weights
from scripted import TINY, children, write_tokenizer_folder
from sostenuto.errors import ConfigError
from sostenuto.runtime.config import EngineEntry, EngineSettings, RuntimeConfig
from sostenuto.runtime.engine_view import EngineView
from sostenuto.runtime.jobs.events import StepTrained
from sostenuto.runtime.jobs.job import RLJob
from sostenuto.runtime.journal import read_journal
from sostenuto.runtime.runtime import Runtime
from sostenuto.trainer.algorithms import GRPO
from sostenuto.types import Limits, OutcomeKind, Version

CLI = [sys.executable, "-c", "from sostenuto.runtime.cli import main; main()"]
LIMITS = Limits(turns=2, turn_tokens=6)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tokenizer_folder(tmp_path_factory.mktemp("model"), TINY)
    return build_weights(folder)


def engines_below() -> list[int]:
    """Pids of engine processes, in the order in which they were started."""
    module = "sostenuto.runtime.engines.embedded"
    below = psutil.Process().children(recursive=True)
    found = sorted((p for p in below if module in p.cmdline()), key=lambda p: (p.create_time(), p.pid))
    return [process.pid for process in found]


async def until(runtime: Runtime, holds: Callable[[dict[str, EngineView]], bool]) -> dict[str, EngineView]:
    """The view of the fleet once it is as it should be."""
    views: dict[str, EngineView] = {}
    with anyio.fail_after(60):
        while not holds(views):
            await anyio.sleep(0.1)
            views = {view.id: view for view in await runtime.engines()}
    return views


@pytest.mark.timeout(400)
async def test_a_job_on_three_engines_goes_on_while_they_are_killed_removed_and_added(
    tmp_path: Path, model: Path
):
    before = children()
    config = RuntimeConfig(directory=tmp_path, engine=EngineSettings(replicas=3))
    job = RLJob(
        name="rl", env=Parity, model=model, tasks=numbers(64), steps=10_000, groups_per_step=2,
        algorithm=GRPO(group_size=2, zero_spread="keep"), limits=LIMITS, save_every=10_000,
    )  # fmt: skip
    async with Runtime(config) as runtime:
        handle = await runtime.submit(job)
        async for event in handle.events():
            if isinstance(event, StepTrained):
                break
        assert len(engines_below()) == 3
        os.kill(engines_below()[0], signal.SIGKILL)
        views = await until(runtime, lambda views: any(view.restarts for view in views.values()))
        (killed,) = [view.id for view in views.values() if view.restarts]
        views = await until(runtime, lambda views: has_sampled(views.get(killed)))
        number = Version.parse(views[killed].version).number
        assert number > 0
        assert {view.kind for view in views.values()} == {"embedded"}
        shown = await shown_by_the_command(tmp_path)
        assert sorted(shown) == ["rl-engine-0", "rl-engine-1", "rl-engine-2"]
        assert shown[killed].restarts == 1
        await _engines_are_removed_and_added(runtime)
        handle.cancel()
        with pytest.raises(Exception, match="was cancelled"):
            await handle.result()
        assert await runtime.engines() == []
    assert children() == before
    with read_journal(tmp_path / "journal.db") as reader:
        statistics = reader.ledger().statistics()
        kinds = {t.outcome.kind for t in reader.trajectories() if t.outcome is not None}
    assert statistics.closes
    assert OutcomeKind.FAILED not in kinds
    assert not [outcome for outcome in statistics.outcomes if outcome.startswith("failed")]


def has_sampled(view: EngineView | None) -> bool:
    """It has sampled turns since it was started last."""
    return view is not None and view.state == "serving" and view.token_s is not None


async def shown_by_the_command(run: Path) -> dict[str, EngineView]:
    done = await anyio.run_process([*CLI, "engines", str(run), "--json"])
    lines = done.stdout.decode().splitlines()
    return {view.id: view for view in map(EngineView.model_validate_json, lines)}


async def _engines_are_removed_and_added(runtime: Runtime) -> None:
    with pytest.raises(ConfigError, match="'other' is not there; there are engine-0, engine-1, engine-2"):
        await runtime.remove_engine("other")
    with pytest.raises(ConfigError, match="id 'engine-1' is empty or there already"):
        await runtime.add_engine(EngineEntry(id="engine-1"))
    await runtime.remove_engine("engine-1", within_s=10)
    assert [view.id for view in await runtime.engines()] == ["rl-engine-0", "rl-engine-2"]
    assert len(engines_below()) == 2
    await runtime.add_engine(EngineEntry(id="late", kv_tokens=8192, concurrency=4))
    views = await until(runtime, lambda views: has_sampled(views.get("rl-late")))
    assert (views["rl-late"].kv_tokens, views["rl-late"].concurrency) == (8192, 4)
    assert Version.parse(views["rl-late"].version).number > 0


def test_a_run_that_nobody_holds_has_no_engines(tmp_path: Path):
    done = subprocess.run([*CLI, "engines", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"error: {tmp_path}: no runtime holds it; its engines are gone with their runtime\n"
