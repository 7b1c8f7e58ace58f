"""Services on 127.0.0.1 for remote tools of tests, and remote tools without a tool server around them."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
from aiohttp import web

from sostenuto.errors import lone_error
from sostenuto.tools.remote.declared import Remote
from sostenuto.tools.remote.services import Services
from sostenuto.tools.remote.tool import RemoteTool
from sostenuto.tools.secrets import Secrets

KEY = "s3cret-0123456789"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Service:
    """Answers with what `answers` holds, the last one again and again; remembers what it was asked."""

    answers: list[Handler]
    requests: list[tuple[str, str, str, str]] = field(default_factory=list[tuple[str, str, str, str]])
    """Method, path with query, body, X-Key."""
    url: str = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.text()
        self.requests.append((request.method, request.path_qs, body, request.headers.get("X-Key", "")))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return await answer(request)


@asynccontextmanager
async def listening(handler: Handler) -> AsyncGenerator[str]:
    """Answers whatever comes; its URL."""
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{site.port}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def service(*answers: Handler) -> AsyncGenerator[Service]:
    made = Service(list(answers))
    async with listening(made.handle) as made.url:
        yield made


def saying(text: str, status: int = 200, **headers: str) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(text=text, status=status, headers=named)

    return answer


async def hanging_up(request: web.Request) -> web.StreamResponse:
    """Close the connection when the request has come."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


@asynccontextmanager
async def remote_tools(
    *declared: Remote, taken: tuple[str, ...] = ()
) -> AsyncGenerator[dict[str, RemoteTool]]:
    with lone_error():
        async with anyio.create_task_group() as group:
            tools = await Services(Secrets({"KEY": KEY}), group).tools(declared, taken)
            yield {tool.schema.name: tool for tool in tools}
            group.cancel_scope.cancel()
