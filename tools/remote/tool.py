"""One remote tool, as the tool server calls it: within its time, and with a result whatever comes."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio
from pydantic import JsonValue

from sostenuto.tools.remote.arguments import read_arguments
from sostenuto.tools.schema import InvalidArguments
from sostenuto.tools.wire import ToolSchema
from sostenuto.types import ToolResult, ToolStatus

Ask = Callable[[dict[str, JsonValue], float], Awaitable[ToolResult]]
"""Arguments that were read, and when the call ends on the loop's clock, to what came of them."""


@dataclass(frozen=True, slots=True)
class RemoteTool:
    schema: ToolSchema
    ask: Ask

    async def call(self, arguments: str) -> ToolResult:
        """Run it; ToolServerError when its service does not work."""
        values = read_arguments(self.schema.name, arguments, self.schema.parameters)
        if isinstance(values, InvalidArguments):
            return ToolResult(ToolStatus.INVALID_ARGUMENTS, values.message)
        limit_s, started_s = self.schema.timeout_s, anyio.current_time()
        result = ToolResult(ToolStatus.TIMEOUT, f"[{self.schema.name} timed out after {limit_s:g} s]")
        with anyio.move_on_after(limit_s):
            result = await self.ask(values, started_s + limit_s)
        elapsed_s = anyio.current_time() - started_s
        return ToolResult(result.status, result.content, result.cut_bytes, elapsed_s)
