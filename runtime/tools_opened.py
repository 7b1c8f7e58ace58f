"""Where a run's programs get their environments: from a tool server of its own, or from several."""

import os
import secrets as randomness
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass

from sostenuto.errors import ConfigError
from sostenuto.runtime.config import RemoteToolServer, RuntimeConfig
from sostenuto.runtime.program import ToolServer
from sostenuto.runtime.run_directory import RunDirectory
from sostenuto.runtime.tool_fleet import Link, Tell, open_fleet
from sostenuto.runtime.tool_process import launch_tool_server
from sostenuto.scheduler.actions import ToolServerJoined
from sostenuto.tools.client import ToolServerClient


@dataclass(frozen=True, slots=True)
class OpenTools:
    server: ToolServer
    isolation: str
    """What sandboxes are separated by, for people."""
    limiting: Callable[[Tell], AbstractContextManager[None]]
    """Tells, within the block, what sandboxes may take together, whenever that changes."""


@asynccontextmanager
async def open_tools(config: RuntimeConfig, run: RunDirectory) -> AsyncGenerator[OpenTools]:
    """The servers that the configuration names, else one of our own, while the block runs."""
    if config.tool_servers:
        async with open_fleet(links_of(config)) as fleet:
            yield OpenTools(fleet, fleet.isolation, fleet.limiting)
        return
    settings = config.tool_server
    limits = ToolServerJoined(memory_bytes=settings.sandbox_memory_bytes)
    async with launch_tool_server(
        settings, sandbox_root=run.path / "sandboxes", log=run.logs / "tool_server.log"
    ) as launched:
        yield OpenTools(launched.client, launched.isolation, lambda tell: _told_once(tell, limits))


def links_of(config: RuntimeConfig) -> list[Link]:
    """How the servers are reached; ConfigError for one whose token is not there."""
    us = f"runtime-{os.getpid()}-{randomness.token_hex(4)}"
    return [
        _link(server, f"{us}-{index}", config.tool_server.lease_s)
        for index, server in enumerate(config.tool_servers)
    ]


def _link(server: RemoteToolServer, owner: str, lease_s: float) -> Link:
    token = os.environ.get(server.token_env, "")
    if not token:
        raise ConfigError(
            f"tool_servers: {server.url}: token_env: the environment variable {server.token_env} is not set; "
            "put the server's token there"
        )

    def client(epoch: int) -> ToolServerClient:
        return ToolServerClient(server.url, token, f"{owner}/{epoch}", lease_s=lease_s, ca_file=server.ca)

    return Link(server.url, client)


@contextmanager
def _told_once(tell: Tell, limits: ToolServerJoined) -> Generator[None]:
    tell(limits)
    yield
