"""Where a run's programs get their environments: from a tool server of its own, or from several."""

import os
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass

from sostenuto.errors import ConfigError
from sostenuto.runtime.config import RemoteToolServer, RuntimeConfig, ToolServerSettings
from sostenuto.runtime.program import ToolServer
from sostenuto.runtime.run_directory import RunDirectory
from sostenuto.runtime.tool_fleet import Tell, open_fleet
from sostenuto.runtime.tool_keeper import Link, Linked, reached
from sostenuto.runtime.tool_process import new_owner, run_tool_server
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
    links = links_of(config) if config.tool_servers else [_ours(config.tool_server, run)]
    async with open_fleet(links) as fleet:
        yield OpenTools(fleet, fleet.isolation, fleet.limiting)


def links_of(config: RuntimeConfig) -> list[Link]:
    """How the servers are reached; ConfigError for one whose token is not there."""
    us = new_owner()
    return [
        _elsewhere(server, f"{us}-{index}", config.tool_server.lease_s)
        for index, server in enumerate(config.tool_servers)
    ]


def _elsewhere(server: RemoteToolServer, owner: str, lease_s: float) -> Link:
    token = os.environ.get(server.token_env, "")
    if not token:
        raise ConfigError(
            f"tool_servers: {server.url}: token_env: the environment variable {server.token_env} is not set; "
            "put the server's token there"
        )

    def client(epoch: int) -> ToolServerClient:
        return ToolServerClient(server.url, token, f"{owner}/{epoch}", lease_s=lease_s, ca_file=server.ca)

    return reached(server.url, client)


def _ours(settings: ToolServerSettings, run: RunDirectory) -> Link:
    """A process of this run, which is started again on what it left."""
    owner, sandboxes, log = new_owner(), run.path / "sandboxes", run.logs / "tool_server.log"

    @asynccontextmanager
    async def started(epoch: int) -> AsyncGenerator[Linked]:
        async with run_tool_server(settings, sandbox_root=sandboxes, log=log) as server:
            who = f"{owner}/{epoch}"
            async with ToolServerClient(server.url, server.token, who, lease_s=settings.lease_s) as client:
                yield Linked(client, server.ended, server.kill)

    return Link("of this run", started, settings.restarts)
