"""One MCP server, as the tool server knows it: started, asked what it offers, restarted when it ends.

- There is one session, which all programs share.
- A server that ended is started again, each time after a longer pause until it has worked for a while.
- A call that was under way when the server ended fails as infrastructure, and says that nobody knows how far
  it came: it is not made again.
"""

from logging import getLogger
from math import inf

import anyio
from pydantic import JsonValue

from sostenuto.errors import ConfigError, ToolServerError, nearest
from sostenuto.tools.remote import mcp_sdk
from sostenuto.tools.remote.declared import McpServer
from sostenuto.tools.remote.tool import Ask
from sostenuto.tools.secrets import Secrets
from sostenuto.tools.wire import ToolSchema
from sostenuto.types import ToolResult

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
STEADY_S = 60.0
"""A session that lasted so long is not held against the next one."""

log = getLogger(__name__)


class McpConnection:
    """Lives while its `run` does."""

    def __init__(self, server: McpServer, secrets: Secrets) -> None:
        """ConfigError for a secret that was not given, Unsupported where the library is missing."""
        self._server = server
        where = f"McpServer {server.name!r}"
        self._place = mcp_sdk.Place(
            server.url,
            tuple(server.command),
            {name: secrets.fill(text, f"{where}: header {name}") for name, text in server.headers.items()},
            {name: secrets.fill(t, f"{where}: variable {name}") for name, t in server.environment.items()},
        )
        mcp_sdk.check_installed()
        self._session: mcp_sdk.Session | None = None
        self._offers: tuple[mcp_sdk.Offer, ...] = ()
        self._why = "it has not started yet"
        self._changed = anyio.Event()

    async def run(self) -> None:
        """Keep a session with the server, until cancelled."""
        pause_s = FIRST_PAUSE_S
        while True:
            began_s = anyio.current_time()
            await self._hold()
            log.warning(
                "MCP server %s: %s; starting it again in %.1f s", self._server.name, self._why, pause_s
            )
            steady = anyio.current_time() - began_s > STEADY_S
            await anyio.sleep(FIRST_PAUSE_S if steady else pause_s)
            pause_s = FIRST_PAUSE_S if steady else min(LONGEST_PAUSE_S, 2 * pause_s)

    async def tools(self, declared: McpServer) -> tuple[ToolSchema, ...]:
        """What the server offers of what the declaration allows, under the server's own names."""
        await self._connected(declared.start_s)
        offered = {offer.name: offer for offer in self._offers}
        for name in declared.allow or ():
            if name not in offered:
                hint = nearest(name, list(offered))
                raise ConfigError(f"McpServer {declared.name!r}: allow: it offers no tool {name!r}; {hint}")
        allowed = offered if declared.allow is None else declared.allow
        return tuple(
            ToolSchema(
                name=name,
                description=offered[name].description,
                parameters=offered[name].parameters,
                timeout_s=declared.timeout_s,
                output_bytes=declared.output_bytes,
                limits=declared.limits,
            )
            for name in allowed
        )

    def asking(self, name: str) -> Ask:
        """How a tool of the server is called, by the server's own name."""

        async def ask(values: dict[str, JsonValue], ends_s: float) -> ToolResult:
            session = await self._connected(ends_s - anyio.current_time())
            try:
                return await session.call(name, values)
            except mcp_sdk.Ended as error:
                raise ToolServerError(
                    f"{name}: the MCP server {self._server.name} ended while the call was under way, and how "
                    f"far it came is unknown: {error}"
                ) from error

        return ask

    async def _hold(self) -> None:
        """Start one session, and return when it is over or did not come to be."""
        started = False
        try:
            with anyio.fail_after(self._server.start_s) as starting:
                async with mcp_sdk.connect(self._place) as session:
                    self._offers = await session.offers()
                    starting.deadline, started = inf, True
                    self._tell(session)
                    await session.ended.wait()
                    # Its end takes a while, and whoever asks meanwhile waits for the next one.
                    self._session, self._why = None, session.epitaph()
        except TimeoutError:
            self._why = f"it did not say within {self._server.start_s:g} s what it offers"
        except ToolServerError as error:
            self._why = str(error)
        if started:
            self._session = None
        else:
            self._tell(None)

    def _tell(self, session: mcp_sdk.Session | None) -> None:
        """Wake those who wait for a session: it is there, or the attempt failed."""
        self._session = session
        self._changed.set()
        self._changed = anyio.Event()

    async def _connected(self, limit_s: float) -> mcp_sdk.Session:
        """The session; ToolServerError when the next attempt to start one fails, or takes too long."""
        if self._session is None or self._session.ended.is_set():
            with anyio.move_on_after(min(limit_s, self._server.start_s)):
                await self._changed.wait()
        if self._session is None or self._session.ended.is_set():
            raise ToolServerError(f"MCP server {self._server.name} does not run: {self._why}")
        return self._session
