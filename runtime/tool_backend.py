"""The sandbox backend that a tool server's settings ask for."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from sostenuto.runtime.config import DockerSection, ToolServerSettings
from sostenuto.sandbox.choose import choose_backend
from sostenuto.sandbox.docker.backend import DockerBackend, DockerSettings
from sostenuto.sandbox.protocol import Backend

_CLOSE_S = 20.0


@asynccontextmanager
async def open_backend(settings: ToolServerSettings, root: Path) -> AsyncGenerator[Backend]:
    """The backend while the block runs; images that it made of templates go with it.

    Raises Unsupported when none works here, with the remedies.
    """
    backend = await choose_backend(
        root, preferred=settings.sandbox, unsafe=settings.unsafe, docker=docker_settings(settings.docker)
    )
    if not isinstance(backend, DockerBackend):
        yield backend
        return
    try:
        yield backend
    finally:
        with anyio.move_on_after(_CLOSE_S, shield=True):
            await backend.close()


def docker_settings(section: DockerSection) -> DockerSettings:
    """As the backend takes them."""
    return DockerSettings(
        image=section.image,
        socket=section.socket,
        runtime=section.runtime,
        checkpoints=section.checkpoints,
        disk_bytes=section.disk_bytes,
        uid=section.uid,
        starts=section.starts,
    )
