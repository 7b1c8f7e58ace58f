"""What the docker tests share: a backend on a live daemon, and what was left there.

A daemon is used when DOCKER_HOST or a usual socket has one and SOSTENUTO_DOCKER_IMAGE names a local image
with sh, bash and busybox; `.ci/docker` provides both.  Without, the tests are left out, unless
SOSTENUTO_REQUIRE names docker.
"""

import os
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from sandboxes import sandbox_root
from sostenuto.errors import Unsupported
from sostenuto.sandbox.docker.address import find_socket
from sostenuto.sandbox.docker.backend import DockerBackend, DockerSettings
from sostenuto.sandbox.docker.container import DockerSandbox
from sostenuto.sandbox.docker.labels import ROOT
from sostenuto.sandbox.docker.typed import Daemon
from sostenuto.sandbox.protocol import Blueprint, ShellResult

IMAGE = os.environ.get("SOSTENUTO_DOCKER_IMAGE", "")
_PATIENCE_S = 60.0


def _lacking() -> str:
    if os.environ.get("SOSTENUTO_REQUIRE") == "docker":
        return ""
    if not IMAGE:
        return "SOSTENUTO_DOCKER_IMAGE names no image; run them by .ci/docker"
    try:
        find_socket(None)
    except Unsupported as error:
        return str(error)
    return ""


needs_docker = [
    pytest.mark.docker,
    pytest.mark.skipif(bool(_lacking()), reason=f"no docker daemon: {_lacking()}"),
]


def backend_at(root: Path, **settings: object) -> DockerBackend:
    return DockerBackend(root, DockerSettings(**{"image": IMAGE, **settings}))  # pyright: ignore[reportArgumentType]


@contextmanager
def docker_root() -> Generator[Path]:
    """A root under which no container may be left on the daemon."""
    with sandbox_root() as root:
        try:
            yield root
            left = containers(root)
        finally:
            _clean(root)
        assert left == []


def _clean(root: Path):
    """The layers of a living process stay by right; those of this root have no use any more."""
    daemon = Daemon(find_socket(None))
    for container in containers(root):
        daemon.remove(container)
    for image in images(root):
        daemon.remove_image(image)


def containers(root: Path) -> list[str]:
    return [found.identity for found in Daemon(find_socket(None)).containers(f"{ROOT}={root}")]


def images(root: Path) -> list[str]:
    return [found.identity for found in Daemon(find_socket(None)).images(f"{ROOT}={root}")]


async def none_left(root: Path) -> bool:
    """Whether the containers of `root` are gone within seconds."""
    with anyio.move_on_after(_PATIENCE_S):
        while await anyio.to_thread.run_sync(containers, root):  # noqa: ASYNC110 - a daemon sets no event
            await anyio.sleep(0.05)
        return True
    return False


@asynccontextmanager
async def running(blueprint: Blueprint | None = None, **settings: object) -> AsyncGenerator[DockerSandbox]:
    with docker_root() as root:
        sandbox = await backend_at(root, **settings).start("tested", blueprint or Blueprint())
        try:
            yield sandbox
        finally:
            await sandbox.stop()


async def said(sandbox: DockerSandbox, command: str, timeout_s: float = 20) -> ShellResult:
    return await sandbox.shell(command, timeout_s=timeout_s)
