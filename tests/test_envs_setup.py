"""An environment's set-up commands and health check, from its declaration to its programs."""

from pathlib import Path

import pytest
from pydantic import BaseModel

from fakes_tools import TOKEN, config
from sandboxes import backend_of, entries, sandbox_root
from sostenuto.envs.environment import Environment
from sostenuto.envs.pool import WorkerPool
from sostenuto.envs.registry import environment_ref
from sostenuto.envs.testing import so_test
from sostenuto.envs.workspace import SandboxSpec
from sostenuto.errors import ConfigError, SandboxError
from sostenuto.tools.client import ToolServerClient
from sostenuto.tools.secrets import Secrets
from sostenuto.tools.server import listen
from sostenuto.tools.setup import Setup
from sostenuto.types import Episode, ProgramId


class Nothing(BaseModel):
    pass


class Built(Environment[Nothing]):
    sandbox = SandboxSpec(
        files={"Makefile": "made:\n\techo built >made\n"},
        setup=("mkdir -p lib", "make 2>/dev/null || echo built >made"),
        setup_timeout_s=30,
        health="test -f made && test -d lib",
    )

    async def reset(self, task: Nothing) -> str:
        return (await self.sandbox.read("made")).strip()

    async def reward(self, episode: Episode) -> float:
        return 1.0


class Unfit(Built):
    sandbox = SandboxSpec(health="echo not yet; exit 4")


async def test_programs_of_an_environment_start_over_what_its_commands_made(tmp_path: Path):
    ref = environment_ref(Built)
    with sandbox_root() as root:
        changes = {"sandbox_root": str(root), "state_dir": tmp_path}
        async with (
            WorkerPool() as hosts,
            listen(config(**changes), backend_of("bubblewrap", root), hosts, Secrets({})) as url,
            ToolServerClient(url, TOKEN, "me") as client,
        ):
            assert (await hosts.describe(ref)).setup == Setup(
                tuple(Built.sandbox.setup), 30, "test -f made && test -d lib"
            )
            for name in ("a", "b"):
                prepared = await client.prepare(ProgramId(name), ref, {})
                assert prepared.messages[-1].content == "built"
            state = await client.state()
            assert state.counters["layers_built"] == state.counters["layer_hits"] == 1
            with pytest.raises(SandboxError, match="exited with 4; its output ends with:\nnot yet"):
                await client.prepare(ProgramId("c"), environment_ref(Unfit), {})
        assert entries(root) == []


async def test_an_author_tries_them_without_a_server():
    async with so_test(Built, Nothing()) as program:
        assert program.messages[-1].content == "built"
    with pytest.raises(SandboxError, match="not yet"):
        async with so_test(Unfit, Nothing()):
            pass


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"setup": "make"}, "setup is one str, 'make'; give a tuple of commands"),
        ({"setup_timeout_s": 0}, "setup_timeout_s is 0; give a positive number of seconds"),
    ],
)
def test_a_set_up_that_cannot_be_is_refused_when_it_is_written(options: dict[str, object], said: str):
    with pytest.raises(ConfigError, match=said):
        SandboxSpec(**options)  # pyright: ignore[reportArgumentType]
