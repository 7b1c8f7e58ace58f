"""A container with a list reaches the servers on it through our proxy, and nothing else by any way."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from dockers import IMAGE, backend_at, containers, docker_root, needs_docker, none_left, said
from networks import died, local_server, own_address, proxies, proxies_now
from sostenuto.envs.environment import Environment
from sostenuto.envs.registry import environment_ref
from sostenuto.envs.workspace import SandboxSpec
from sostenuto.errors import SandboxError
from sostenuto.runtime.config import DockerSection, ToolServerSettings
from sostenuto.runtime.tool_process import launch_tool_server
from sostenuto.sandbox.docker.container import DockerSandbox
from sostenuto.sandbox.protocol import Blueprint
from sostenuto.types import Episode, ProgramId, SandboxRung

pytestmark = [
    *needs_docker,
    pytest.mark.skipif(os.geteuid() != 0, reason="a list needs rights over the network of containers"),
]


async def got(sandbox: DockerSandbox, url: str) -> str:
    """What wget, which knows the proxy by its variable alone, comes to."""
    return (await said(sandbox, f"wget -q -S -O - {shlex.quote(url)} 2>&1")).output


async def tunnelled(sandbox: DockerSandbox, place: str) -> str:
    """The first line of the answer to CONNECT."""
    ask = f"printf 'CONNECT {place} HTTP/1.1\\r\\n\\r\\n' | nc -w 20 127.0.0.1 3128 | head -1"
    return (await said(sandbox, ask)).output


async def test_a_container_reaches_the_listed_server_and_no_other():
    with docker_root() as root, local_server() as port, local_server("0.0.0.0") as other:
        backend = backend_at(root)
        sandbox = await backend.start("x", Blueprint(network=(f"127.0.0.1:{port}", "metadata.example")))
        assert "hello /a" in await got(sandbox, f"http://127.0.0.1:{port}/a")
        assert "200" in await tunnelled(sandbox, f"127.0.0.1:{port}")
        for host in ("127.0.0.1", own_address(), "192.0.2.1", "169.254.169.254"):
            refusal = await got(sandbox, f"http://{host}:{other}/")
            assert "403" in refusal, host
            assert f"127.0.0.1:{port}, metadata.example" in refusal
            assert "403" in await tunnelled(sandbox, f"{host}:{other}")
            direct = (await said(sandbox, f"nc -w 5 {host} {other} </dev/null 2>&1")).output
            assert "unreachable" in direct or "refused" in direct, (host, direct)
        assert "inet" not in (await said(sandbox, "ip addr show 2>&1 | grep -v '127.0.0.1\\|::1'")).output
        await sandbox.stop()
        assert proxies() == []


async def test_a_list_stays_through_pause_and_snapshot():
    with docker_root() as root, local_server() as port:
        backend = backend_at(root)
        blueprint = Blueprint(network=(f"127.0.0.1:{port}",))
        sandbox = await backend.start("x", blueprint)
        await sandbox.pause()
        await sandbox.resume()
        assert "hello" in await got(sandbox, f"http://127.0.0.1:{port}/")
        snapshot = await sandbox.snapshot()
        fork = await backend.start("fork", blueprint, snapshot=snapshot)
        await sandbox.stop()
        assert "hello" in await got(fork, f"http://127.0.0.1:{port}/")
        await fork.stop()
        await backend.forget(snapshot)
        alone = await backend.start("alone", Blueprint())
        assert "refused" in (await said(alone, "nc 127.0.0.1 3128 2>&1")).output
        await alone.stop()
        await backend.close()


async def test_a_proxy_that_died_is_infrastructure():
    with docker_root() as root, local_server() as port:
        backend = backend_at(root)
        sandbox = await backend.start("x", Blueprint(network=(f"127.0.0.1:{port}",)))
        (proxy,) = await proxies_now()
        os.kill(proxy, 9)
        await died(proxy)
        with pytest.raises(SandboxError, match="proxy of this sandbox's network has ended"):
            await said(sandbox, "true")
        await sandbox.stop()


_OWNER = """
import sys, time, anyio
from pathlib import Path
from dockers import backend_at
from networks import proxies_now
from sostenuto.sandbox.protocol import Blueprint

async def main():
    kept.append(await backend_at(Path(sys.argv[1])).start("x", Blueprint(network=("example.org",))))
    print(*await proxies_now(), flush=True)
    time.sleep(1000)

kept = []
anyio.run(main)
"""


async def test_the_proxy_of_an_owner_that_was_killed_ends_with_its_containers():
    with docker_root() as root:
        environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(sys.path)}
        owner = subprocess.Popen(  # noqa: ASYNC220 - it is to be killed, not to be waited for
            [sys.executable, "-c", _OWNER, str(root)], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert owner.stdout is not None
        proxy = os.pidfd_open(int(owner.stdout.readline()))
        owner.kill()
        owner.communicate()
        await ended(proxy)
        assert await none_left(root)
        await backend_at(root).reclaim()


async def ended(handle: int):
    import anyio

    with anyio.fail_after(20):
        await anyio.wait_readable(handle)
    os.close(handle)


class Task(BaseModel):
    port: int


class Reaching(Environment[Task]):
    sandbox = SandboxSpec(network=("*.example.org",), memory_bytes=64 << 20)

    async def reset(self, task: Task) -> str:
        return await self.sandbox.shell(f"wget -S -O - http://127.0.0.1:{task.port}/ 2>&1; true")

    async def reward(self, episode: Episode) -> float:
        return 1.0


@pytest.mark.parametrize("warm", [0, 1])
async def test_a_program_is_told_what_its_list_refuses(tmp_path: Path, warm: int):
    settings = ToolServerSettings(sandbox="docker", docker=DockerSection(image=IMAGE), warm=warm)
    with docker_root() as root:
        async with launch_tool_server(settings, sandbox_root=root, log=tmp_path / "log") as server:
            a = ProgramId("a")
            prepared = await server.client.prepare(a, environment_ref(Reaching), {"port": 1})
            told = "is not in this sandbox's network list: *.example.org"
            assert told in prepared.messages[-1].content
            assert (await server.client.move(a, SandboxRung.SNAPSHOTTED)).rung is SandboxRung.SNAPSHOTTED
            again = await server.client.shell(a, "wget -S -O - http://example.com/ 2>&1; true")
            assert told in again.output
            await server.client.release(a)
        assert containers(root) == []


async def test_a_probe_says_whether_a_list_can_be_kept():
    with docker_root() as root:
        probe = await backend_at(root).probe()
    assert probe.details["network"] == "none, or the servers of a list"
