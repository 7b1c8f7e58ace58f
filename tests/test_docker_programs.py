"""Programs whose sandboxes are containers, through a tool server of its own."""

from pathlib import Path

import pytest
from pydantic import BaseModel

from dockers import IMAGE, containers, docker_root, images, needs_docker
from sostenuto.envs.environment import Environment
from sostenuto.envs.registry import environment_ref
from sostenuto.envs.workspace import SandboxSpec
from sostenuto.errors import SandboxError
from sostenuto.runtime.config import DockerSection, ToolServerSettings
from sostenuto.runtime.tool_process import launch_tool_server
from sostenuto.types import Episode, ProgramId, SandboxRung

pytestmark = needs_docker

A, B = ProgramId("a"), ProgramId("b")


class Task(BaseModel):
    pass


class InContainer(Environment[Task]):
    sandbox = SandboxSpec(files={"note": "kept"}, memory_bytes=64 << 20)

    async def reset(self, task: Task) -> str:
        return await self.sandbox.shell("cat note; cat /proc/1/comm")

    async def reward(self, episode: Episode) -> float:
        return 1.0


class WithoutImage(InContainer):
    sandbox = SandboxSpec(image="there-is-none:never")


def settings(warm: int = 0) -> ToolServerSettings:
    return ToolServerSettings(sandbox="docker", docker=DockerSection(image=IMAGE), warm=warm)


@pytest.mark.parametrize("warm", [0, 1])
async def test_a_program_lives_in_a_container_that_comes_back_from_every_rung(tmp_path: Path, warm: int):
    with docker_root() as root:
        async with launch_tool_server(settings(warm), sandbox_root=root, log=tmp_path / "log") as server:
            client = server.client
            prepared = await client.prepare(A, environment_ref(InContainer), {})
            assert prepared.messages[-1].content.startswith("kept")
            await client.shell(A, "mkdir d && cd d && export NAME=x && echo 2 >new")
            for rung in (SandboxRung.PAUSED, SandboxRung.SNAPSHOTTED):
                assert (await client.move(A, rung)).rung is rung
                assert (await client.shell(A, "echo $NAME; cat new; cat ../note")).output == "x\n2\nkept"
            await client.release(A)
        assert containers(root) == []
        assert images(root) == []


async def test_an_image_that_is_not_there_is_a_failure_of_the_infrastructure(tmp_path: Path):
    with docker_root() as root:
        async with launch_tool_server(settings(), sandbox_root=root, log=tmp_path / "log") as server:
            with pytest.raises(SandboxError, match="there-is-none:never"):
                await server.client.prepare(B, environment_ref(WithoutImage), {}, timeout_s=60)
