"""The services behind the remote tools of a tool server's environments, connected when first needed."""

from collections.abc import Collection, Sequence
from typing import cast

import anyio
from anyio.abc import TaskGroup, TaskStatus

from sostenuto.errors import ConfigError
from sostenuto.tools.remote.declared import HttpTool, McpServer, Remote
from sostenuto.tools.remote.http import HttpCaller, HttpClient
from sostenuto.tools.remote.mcp import McpConnection
from sostenuto.tools.remote.tool import RemoteTool
from sostenuto.tools.secrets import Secrets
from sostenuto.tools.wire import ToolSchema

_MOST_NAME_CHARS = 64


class Services:
    """Their connections live in tasks of `group`, and end with it."""

    def __init__(self, secrets: Secrets, group: TaskGroup) -> None:
        self._secrets = secrets
        self._group = group
        self._http: HttpClient | None = None
        self._servers: dict[str, McpConnection] = {}
        self._opening = anyio.Lock()

    async def tools(self, declared: Sequence[Remote], taken: Collection[str]) -> tuple[RemoteTool, ...]:
        """The tools that are declared, none under a name that is taken.

        ConfigError for what cannot be declared together or names a secret that is not here, Unsupported for
        MCP without its library, ToolServerError for a server that does not say what it offers.
        """
        found: dict[str, RemoteTool] = {}
        for one in declared:
            if isinstance(one, HttpTool):
                new = {one.name: await self._http_tool(one)}
            else:
                new = await self._mcp_tools(one, {*taken, *found})
            if clash := (new.keys() & {*taken, *found}):
                raise ConfigError(f"two tools are called {min(clash)!r}; rename one of them")
            found |= new
        return tuple(found.values())

    async def _http_tool(self, declared: HttpTool) -> RemoteTool:
        async with self._opening:
            if self._http is None:
                self._http = cast("HttpClient", await self._group.start(_hold_http))
        schema = ToolSchema(
            name=declared.name,
            description=declared.description,
            parameters=declared.schema,
            timeout_s=declared.timeout_s,
            idempotent=declared.may_repeat,
            output_bytes=declared.output_bytes,
            limits=declared.limits,
        )
        return RemoteTool(schema, HttpCaller(declared, self._http, self._secrets).ask)

    async def _mcp_tools(self, declared: McpServer, taken: Collection[str]) -> dict[str, RemoteTool]:
        connection = self._connection(declared)
        tools: dict[str, RemoteTool] = {}
        for schema in await connection.tools(declared):
            name = schema.name
            if name in taken:
                name = f"{declared.name}_{name}"[:_MOST_NAME_CHARS]
            tools[name] = RemoteTool(schema.model_copy(update={"name": name}), connection.asking(schema.name))
        return tools

    def _connection(self, declared: McpServer) -> McpConnection:
        """One for all environments that declare the same server, whatever they do with its tools."""
        key = repr((declared.url, declared.command, declared.headers, declared.environment))
        if key not in self._servers:
            self._servers[key] = McpConnection(declared, self._secrets)
            self._group.start_soon(self._servers[key].run)
        return self._servers[key]


async def _hold_http(*, task_status: TaskStatus[HttpClient]) -> None:
    async with HttpClient() as client:
        task_status.started(client)
        await anyio.sleep_forever()
