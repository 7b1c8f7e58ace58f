"""Tool servers of their own, started from the command line, and runs that use them."""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import islice
from pathlib import Path
from shutil import which

import anyio
import pytest
from typer.testing import CliRunner

from real_jobs import build_weights
from sandboxes import nothing_left, sandbox_root
from scripted import ENGINE, TINY, ScriptedEngine, children, specs_of, turns_of, write_tokenizer_folder
from sostenuto.envs.storeroom.demonstrations import demonstrate_in_full
from sostenuto.envs.storeroom.environment import Storeroom
from sostenuto.envs.storeroom.world import StoreroomTask, training_tasks
from sostenuto.errors import Blame, ConfigError
from sostenuto.records import Trajectory
from sostenuto.runtime.cli import app
from sostenuto.runtime.config import RuntimeConfig, load_toml, parse
from sostenuto.runtime.dispatcher import Dispatcher, open_dispatcher
from sostenuto.runtime.jobs.job import EvalJob
from sostenuto.runtime.program import ProgramSpec
from sostenuto.runtime.rendering.choice import open_renderer
from sostenuto.runtime.rendering.folder import ModelFolder
from sostenuto.runtime.run_directory import hold
from sostenuto.runtime.runtime import Runtime
from sostenuto.runtime.tools_opened import open_tools
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.tools.client import ToolServerClient
from sostenuto.types import Limits, Message

CLI = [sys.executable, "-c", "from sostenuto.runtime.cli import main; main()"]
VARIABLE = "SOSTENUTO_TOOL_TOKEN"
TOKEN = "a-token-of-24-characters"
WORLD = {f"p{index}": task for index, task in enumerate(islice(training_tasks(1), 8))}


def given(**variables: str) -> dict[str, str]:
    others = {name: value for name, value in os.environ.items() if name != VARIABLE}
    return {**others, **variables}


@contextmanager
def served(folder: Path, *options: str, **variables: str) -> Generator[tuple[subprocess.Popen[str], str]]:
    """`sostenuto tools serve` and its URL; killed if it is still there at the end."""
    folder.mkdir(exist_ok=True)
    folder.chmod(0o711)
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            [*CLI, "tools", "serve", *options],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=folder,
            env=given(**(variables or {VARIABLE: TOKEN})),
        )
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def refused(monkeypatch: pytest.MonkeyPatch, *options: str, **variables: str) -> str:
    """What a server that does not start says."""
    monkeypatch.delenv(VARIABLE, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, ["tools", "serve", *options])
    assert isinstance(result.exception, ConfigError)
    return str(result.exception)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_server_of_its_own_says_where_it_is_and_ends_cleanly(number: signal.Signals):
    with sandbox_root() as root, served(root / "one") as (process, url):
        async with ToolServerClient(url, TOKEN, "me") as client:
            supply = await client.supply()
            assert supply.backend in {"bubblewrap", "landlock"}
            assert supply.isolation
            assert supply.sandbox_memory_bytes is None
        process.send_signal(number)
        assert process.wait(20) == 0
        assert await nothing_left(root / "one" / "tool-server" / "sandboxes")


async def test_a_server_is_configured_by_a_file_and_by_options_that_go_before_it():
    with sandbox_root() as root:
        (root / "token").write_text(f"{TOKEN}\n")
        (root / "server.toml").write_text(
            f'token_file = "{root / "token"}"\nstate_dir = "nowhere"\ncpus = 1.5\n'
            "memory_bytes = 2000\nsandbox_memory_bytes = 1000\n"
        )
        options = ("--config", str(root / "server.toml"), "--state-dir", "kept")
        with served(root / "one", *options, NOTHING="") as (_, url):
            async with ToolServerClient(url, TOKEN, "me") as client:
                supply = await client.supply()
        assert (supply.cpus, supply.memory_bytes, supply.sandbox_memory_bytes) == (1.5, 2000, 1000)
        assert (root / "one" / "kept").is_dir()
        assert not (root / "one" / "nowhere").exists()


def test_a_server_that_cannot_be_started_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert f"the environment variable {VARIABLE} holds no token" in refused(monkeypatch)
    assert "openssl rand" in refused(monkeypatch, **{VARIABLE: "short"})
    assert "token_file: nothing cannot be read" in refused(monkeypatch, "--token-file", "nothing")
    assert "tools serve: port: Input should be less than" in refused(monkeypatch, "--port", "70000")
    Path("server.toml").write_text("sandbox_rot = 1\n")
    assert "did you mean 'sandbox_root'" in refused(monkeypatch, "--config", "server.toml")


def test_remote_servers_are_told_apart_and_belong_to_nobody(tmp_path: Path):
    file = tmp_path / "job.toml"
    file.write_text('[[tool_servers]]\nurl = "https://a:1"\ntoken_en = "A"\n')
    with pytest.raises(ConfigError, match=r"unknown key 'tool_servers.0.token_en'; did you mean 'token_env'"):
        load_toml(file, RuntimeConfig)
    with pytest.raises(ConfigError, match=r"tool_servers\.0\.url"):
        parse({"tool_servers": [{"url": "a:1"}]}, RuntimeConfig, where="job")
    with pytest.raises(ConfigError, match="http://a:1 is there twice"):
        parse({"tool_servers": [{"url": "http://a:1"}] * 2}, RuntimeConfig, where="job")
    local = {"tool_server": {"hosts": 2}, "tool_servers": [{"url": "http://a:1"}]}
    with pytest.raises(ConfigError, match=r"tool_server\.hosts is of a server that the runtime starts"):
        parse(local, RuntimeConfig, where="job")


async def test_a_token_that_is_not_there_is_asked_for(tmp_path: Path):
    servers = [{"url": "http://127.0.0.1:1", "token_env": "NO_SUCH_TOKEN"}]
    config = parse({"tool_servers": servers}, RuntimeConfig, where="job")
    with hold(tmp_path) as run, pytest.raises(ConfigError, match="variable NO_SUCH_TOKEN is not set"):
        async with open_tools(config, run):
            pass


def built(folder: Path) -> Path:
    """A tiny model with weights."""
    write_tokenizer_folder(folder, TINY)
    return build_weights(folder)


def certified(folder: Path) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 and its key."""
    if which("openssl") is None:
        pytest.skip("no openssl here, which makes the certificate of this test")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
         "-keyout", key, "-out", certificate, "-days", "1", "-subj", "/CN=tests",
         "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return certificate, key


async def test_a_whole_job_runs_on_a_server_that_speaks_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, TOKEN)
    model = built(tmp_path / "model")
    certificate, key = certified(tmp_path)
    options = ("--tls-certificate", str(certificate), "--tls-key", str(key))
    job = EvalJob(
        env=Storeroom, model=model, tasks=list(WORLD.values())[:2], temperatures=(1.0,),
        limits=Limits(turns=2, turn_tokens=6),
    )  # fmt: skip
    with sandbox_root() as root, served(root / "one", *options) as (_, url):
        servers = {"tool_servers": [{"url": url, "ca": str(certificate)}]}
        config = parse({"directory": tmp_path / "run", **servers}, RuntimeConfig, where="job")
        async with Runtime(config) as runtime:
            result = await (await runtime.submit(job)).result()
            assert result.ledger.outcomes == {"evaluated": 2}
        async with ToolServerClient(url, TOKEN, "me", ca_file=certificate) as client:
            state = await client.state()
            assert (state.programs, state.counters["prepared"]) == ((), 2)


async def test_a_run_uses_several_servers_and_outlives_one_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(VARIABLE, TOKEN)
    before = children()
    with sandbox_root() as root, served(root / "one") as (_, one), served(root / "two") as (dying, two):
        async with running_on(tmp_path, one, two) as (dispatcher, engine):

            async def die() -> None:
                await programs_act(two)
                dying.kill()

            done = await play(dispatcher, WORLD, die)
            lost = {name: t.outcome for name, t in done.items() if t.outcome is not None}
            assert 0 < len(lost) < len(WORLD)
            for outcome in lost.values():
                assert outcome.blame is Blame.INFRASTRUCTURE
                assert two in outcome.reason
            assert all(t.reward == 1.0 for name, t in done.items() if name not in lost)
            later = await play(dispatcher, {f"{name}-later": WORLD[name] for name in lost}, None)
            assert all(trajectory.reward == 1.0 for trajectory in later.values())
            assert engine.held == {}
        async with ToolServerClient(one, TOKEN, "me") as client:
            assert (await client.state()).programs == ()
        assert await nothing_left(root / "one" / "tool-server" / "sandboxes")
    assert children() - before == set()


@asynccontextmanager
async def running_on(folder: Path, *urls: str) -> AsyncGenerator[tuple[Dispatcher, ScriptedEngine]]:
    """A scripted engine and the dispatcher of a run on these servers."""
    config = RuntimeConfig.model_validate(
        {"tool_servers": [{"url": url} for url in urls], "tool_server": {"lease_s": 1.0}}
    )
    renderer = open_renderer(ModelFolder.open(write_tokenizer_folder(folder)))
    engine = ScriptedEngine(renderer, right)
    engine.decode_s = 0.3
    with hold(folder / "run") as run:
        async with (
            open_tools(config, run) as tools,
            open_dispatcher(SchedulerSettings(), {ENGINE: engine}, tools.server, renderer) as dispatcher,
        ):
            assert tools.isolation
            with tools.limiting(dispatcher.limit):
                yield dispatcher, engine


def right(program: str) -> Sequence[Message]:
    return turns_of(demonstrate_in_full(WORLD[program.removesuffix("-later")]))


async def play(
    dispatcher: Dispatcher,
    world: Mapping[str, StoreroomTask],
    meanwhile: Callable[[], Coroutine[None, None, None]] | None,
) -> dict[str, Trajectory]:
    done: dict[str, Trajectory] = {}

    async def run(spec: ProgramSpec) -> None:
        done[spec.id] = await dispatcher.run(spec)

    async with anyio.create_task_group() as group:
        for spec in specs_of(Storeroom, world):
            group.start_soon(run, spec)
        if meanwhile is not None:
            group.start_soon(meanwhile)
    return done


async def programs_act(url: str) -> None:
    """Until a program of the server was prepared."""
    async with ToolServerClient(url, TOKEN, "who") as client:
        with anyio.fail_after(60):
            while not (await client.state()).counters["prepared"]:  # noqa: ASYNC110
                await anyio.sleep(0.02)
