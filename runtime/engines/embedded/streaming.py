"""A turn as lines of JSON while it is sampled.

The engine keeps nothing for a reader and does nothing for it: what is new is looked up in the turn when
the reader can take it.  A slow one gets longer spans, and costs neither memory nor a step.
"""

import json
from collections.abc import Awaitable, Callable
from contextlib import suppress

import anyio
from aiohttp import web
from pydantic import BaseModel

from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.runtime.engines.embedded.turn import Turn
from sostenuto.runtime.engines.wire import REPLY_LINE, SPAN_LINE, GenerateReply

_JOIN_S = 0.05
"""Tokens of this long go together."""


async def streamed(
    request: web.Request, ask: Callable[[Callable[[Turn], None]], Awaitable[GenerateReply]]
) -> web.StreamResponse:
    """Answer with the spans of the turn that `ask` tells, and with its reply or refusal.

    What is refused before a token is there is raised.
    """
    told: list[Turn] = []
    outcome: list[GenerateReply | Refusal] = []
    over = anyio.Event()

    async def wait() -> None:
        try:
            outcome.append(await ask(told.append))
        except Refusal as refusal:
            outcome.append(refusal)
        over.set()

    lines = _Lines(request)
    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        try:
            while not over.is_set():
                with anyio.move_on_after(_JOIN_S):
                    await over.wait()
                await lines.write_new(told)
        except ConnectionError:  # nobody reads any more
            group.cancel_scope.cancel()
    if outcome:
        with suppress(ConnectionError):
            await lines.write_last(outcome[0])
    return lines.response


class _Lines:
    """What has been written of one turn."""

    def __init__(self, request: web.Request) -> None:
        self.response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        self._request = request
        self._tokens = 0

    async def write_new(self, told: list[Turn]) -> None:
        for span in told[0].spans_since(self._tokens) if told else []:
            await self._write(SPAN_LINE, span)
            self._tokens += len(span.token_ids)

    async def write_last(self, outcome: GenerateReply | Refusal) -> None:
        if isinstance(outcome, GenerateReply):
            await self._write(REPLY_LINE, outcome)
        elif not self.response.prepared:
            raise outcome
        else:
            await self.response.write(json.dumps(outcome.body()).encode() + b"\n")
        await self.response.write_eof()

    async def _write(self, begin: bytes, body: BaseModel) -> None:
        if not self.response.prepared:
            await self.response.prepare(self._request)
        await self.response.write(begin + body.model_dump_json().encode() + b"}\n")
