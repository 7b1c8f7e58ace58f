"""What a job cannot begin or go on with: each is refused with cause and remedy, and nothing else is hurt."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic import JsonValue

from fakes_training import Number, Parity, numbers
from scripted import TINY, says, specs_of, staged, write_tokenizer_folder
from sostenuto.envs.environment import Environment
from sostenuto.errors import ConfigError, EngineError
from sostenuto.runtime.config import RuntimeConfig, ToolServerSettings
from sostenuto.runtime.jobs.job import EvalJob
from sostenuto.runtime.runtime import Runtime
from sostenuto.tools.decorator import tool
from sostenuto.types import Episode


class Rewarded(Environment[Number]):
    """A base for what is wrong in one respect."""

    async def reset(self, task: Number) -> str:
        return str(task.number)

    async def reward(self, episode: Episode) -> float:
        return 0.0


class Unrewarded(Environment[Number]):
    async def reset(self, task: Number) -> str:
        return str(task.number)


def untyped() -> type[Environment[Any]]:
    class Untyped(Rewarded):
        @tool  # pyright: ignore[reportUnknownArgumentType]
        async def look(self, where) -> str:  # noqa: ANN001  # pyright: ignore[reportMissingParameterType, reportUnknownParameterType]
            """Look somewhere."""
            return str(where)  # pyright: ignore[reportUnknownArgumentType]

    return Untyped


def twice() -> type[Environment[Any]]:
    class Twice(Rewarded):
        @tool
        async def look(self) -> str:
            """Look."""
            return ""

        @tool(name="look")
        async def see(self) -> str:
            """See."""
            return ""

    return Twice


def a_job(
    model: Path, env: type[Environment[Any]] = Parity, options: dict[str, JsonValue] | None = None
) -> EvalJob:
    return EvalJob(env=env, model=model, tasks=numbers(1), temperatures=(1.0,), options=options or {})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer_folder(tmp_path_factory.mktemp("model"), TINY)


def without(model: Path, name: str, target: Path) -> Path:
    folder = shutil.copytree(model, target)
    (folder / name).unlink()
    return folder


def with_config(model: Path, target: Path, file: str, changes: dict[str, JsonValue]) -> Path:
    folder = target if target == model else shutil.copytree(model, target)
    config = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(config | changes))
    return folder


async def test_a_job_that_cannot_run_is_refused_at_once_and_the_runtime_goes_on(tmp_path: Path, model: Path):
    bare = with_config(model, tmp_path / "bare", "tokenizer_config.json", {"chat_template": None})
    jobs: list[tuple[Callable[[], EvalJob], str]] = [
        (lambda: a_job(model, Unrewarded), "Unrewarded has no `reward`; write `async def reward"),
        (lambda: a_job(model, untyped()), "where"),
        (lambda: a_job(model, twice()), "two tools are called 'look': look and see; rename one"),
        (lambda: a_job(tmp_path / "nowhere"), "nowhere is not a folder; give a local folder"),
        (lambda: a_job(without(model, "tokenizer.json", tmp_path / "a")), r"tokenizer.json: missing; "),
        (lambda: a_job(bare), "no chat template"),
        (lambda: a_job(model, options={"size": 1}), "no option 'size'"),
    ]
    async with Runtime(RuntimeConfig(directory=tmp_path / "run")) as runtime:
        for make, said in jobs:
            with pytest.raises(ConfigError, match=said):
                await runtime.submit(make())
        with pytest.raises(ConfigError, match=r"in use by pid \d+; wait for it to end or choose another"):
            async with Runtime(RuntimeConfig(directory=tmp_path / "run")):
                pass
        await _weights_of_the_wrong_shape(runtime, model, tmp_path)
        assert runtime.ledger.submitted == 0


async def _weights_of_the_wrong_shape(runtime: Runtime, model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model, tmp_path / "shaped")
    command = [sys.executable, "-m", "sostenuto.trainer.build", "--folder", str(folder), "--seed", "1"]
    subprocess.run(command, check=True, capture_output=True)  # noqa: ASYNC221 - nothing else runs
    with_config(folder, folder, "config.json", {"intermediate_size": 96})
    handle = await runtime.submit(a_job(folder))
    says = r"weights do not fit .*down_proj\.weight is \(.*\), not \(.*96\).*save config.json and weights"
    with pytest.raises(EngineError, match=says):
        await handle.result()


async def test_a_port_in_use_is_named_with_the_remedy(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = ToolServerSettings(port=port)
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} is in use; choose another, or 0"):
            async with Runtime(RuntimeConfig(directory=tmp_path, tool_server=settings)):
                pass


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "none.toml"], "error: none.toml: No such file or directory; give the path of a TOML file"),
        (["eval", "bad.toml"], "error: bad.toml is not valid TOML: "),
        (["quickstart", "--directory", "bad.toml/run"], "error: run directory bad.toml/run: Not a directory"),
        (["status", "."], "error: no journal at journal.db; is this a run directory?"),
    ],
)
def test_the_command_line_says_what_is_wrong_in_one_line(tmp_path: Path, arguments: list[str], said: str):
    (tmp_path / "bad.toml").write_text("[[[")
    command = [sys.executable, "-c", "from sostenuto.runtime.cli import main; main()", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Generator[Path]:
    """A disk of 80 MiB, for whoever may mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


async def test_a_disk_that_is_full_is_named_before_anything_starts(small_disk: Path):
    fill(small_disk, leave_bytes=1 << 20)
    with pytest.raises(ConfigError, match=r"\d MiB free on its disk, at least 64 MiB are needed; free some"):
        async with Runtime(RuntimeConfig(directory=small_disk / "run")):
            pass


async def test_a_disk_that_fills_up_ends_the_run_by_name(small_disk: Path, model: Path):
    refused = pytest.raises(ConfigError, match=r"the journal cannot be written: .*; is the disk full")
    with refused:
        async with staged(small_disk / "run", model, lambda _: [says("yes")]) as stage:
            done = await stage.play(specs_of(Parity, {"before": Number(number=1)}))
            assert done["before"].reward is not None
            fill(small_disk, leave_bytes=0)
            for index in range(1000):
                await stage.play(specs_of(Parity, {f"after{index}": Number(number=1)}))


def fill(place: Path, *, leave_bytes: int) -> None:
    """Others go on writing meanwhile, so that what was free a moment ago may not be free any more."""
    with (place / "ballast").open("wb") as file:
        for _ in range(100):
            disk = os.statvfs(place)
            wanted = disk.f_bavail * disk.f_frsize - leave_bytes
            if wanted <= 0:
                break
            with suppress(OSError):
                os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, wanted)
