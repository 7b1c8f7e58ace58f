"""What the tests share that need the fake SGLang server in particular."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
from aiohttp import web
from anyio.abc import TaskGroup

from fakes_sglang import FakeSGLang, Handler
from sglang_servers import request
from sostenuto.runtime.engines.sglang.engine import Deadlines, SGLangEngine
from sostenuto.runtime.engines.wire import GenerateReply

HASTY = Deadlines(control_s=2.0, generate_s=3.0, update_s=2.0)
"""Where a deadline is the point; a busy machine keeps them, too."""
PROMPT = list(range(10, 30))


async def until_running(fake: FakeSGLang, requests: int) -> None:
    while len(fake.core.running) != requests:  # noqa: ASYNC110 - the fake steps by itself
        await anyio.sleep(0.002)


def answers(content: bytes, status: int = 200) -> Handler:
    async def handler(_request: web.Request) -> web.Response:
        return web.Response(body=content, status=status, content_type="application/json")

    return handler


async def never(_request: web.Request) -> web.Response:
    await anyio.sleep_forever()
    raise AssertionError


@asynccontextmanager
async def running(
    engine: SGLangEngine, fake: FakeSGLang, replies: list[GenerateReply], count: int = 8
) -> AsyncGenerator[TaskGroup]:
    """While `count` long requests are under way; all of them have ended after it."""

    async def ask(name: str) -> None:
        replies.append(await engine.generate(request(name, PROMPT, max_new_tokens=120)))

    async with anyio.create_task_group() as group:
        for i in range(count):
            group.start_soon(ask, f"r{i}")
        await until_running(fake, min(count, fake.core.concurrency))
        yield group
