"""A small MCP server for tests: over its pipes, or on 127.0.0.1 at the port that is its argument."""

import os
import signal
import sys

import anyio
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ImageContent

server = MCPServer("example")


@server.tool()
def search(query: str, limit: int = 3) -> str:
    """Search the archive."""
    return f"{limit} of {query}"


@server.tool()
def whoami() -> str:
    """Say who runs here, and with what key."""
    return f"{os.getpid()} {os.environ.get('API_KEY')} {os.environ.get('PRIVATE')}"


@server.tool()
async def wait(seconds: float) -> str:
    """Wait."""
    await anyio.sleep(seconds)
    return "waited"


@server.tool()
def fail(why: str) -> str:
    """Fail."""
    raise ToolError(why)


@server.tool()
def die() -> str:
    """End the process."""
    sys.stderr.write("about to die\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


@server.tool()
def picture() -> ImageContent:
    """Draw."""
    return ImageContent(type="image", data="AAAA", mime_type="image/png")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
