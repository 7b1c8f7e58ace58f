"""One request to the tool server, from its first byte to an answer, over as many connections as it takes."""

import io
import os
import secrets
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from ssl import SSLContext

import aiohttp
import anyio
from pydantic import ValidationError
from yarl import URL

from sostenuto.errors import SostenutoError, ToolServerError
from sostenuto.tools.archived import PIECE_BYTES
from sostenuto.tools.refused import Unreachable, WrongToken, raised
from sostenuto.tools.wire import Refusal

REPEAT_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class Ask:
    method: str
    path: str
    body: bytes | Path = b""
    """A file is sent in pieces."""
    timeout_s: float = 30.0
    repeat_s: float = 0.0
    """How long to go on after the connection was lost for the first time; 0: not at all."""
    into: Path | None = None
    """The file that the answer becomes, in pieces."""


class Sender:
    """Sends any number of requests at the same time, between `open` and `close`."""

    def __init__(self, url: str, headers: dict[str, str], tls: SSLContext | bool) -> None:
        self._url = url
        self._headers = headers
        self._tls = tls
        self.gone = ""
        """Why the server does not answer any more, once somebody knows: every request then says so."""

    async def open(self) -> None:
        # Deadlines are ours, and a turn of every program may be waiting here at once.
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0, ssl=self._tls),
            timeout=aiohttp.ClientTimeout(total=None),
        )

    async def close(self) -> None:
        await self._session.close()

    async def send(self, ask: Ask) -> bytes:
        """The body of the answer, or the error that the answer is or that kept it away."""
        try:
            with anyio.fail_after(ask.timeout_s):
                return await self._send_again(ask)
        except TimeoutError:
            raise ToolServerError(
                f"{ask.method} {ask.path}: no answer from {self._url} within {ask.timeout_s:g} s"
            ) from None

    async def _send_again(self, ask: Ask) -> bytes:
        give_up_s: float | None = None
        while True:
            if self.gone:
                raise ToolServerError(f"{ask.method} {ask.path}: {self.gone}")
            try:
                return await self._send_once(ask)
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                lost = error
            now_s = anyio.current_time()
            give_up_s = now_s + ask.repeat_s if give_up_s is None else give_up_s
            # Also before giving up: whoever watches the server may know more by then.
            await anyio.sleep(REPEAT_PAUSE_S)
            if self.gone or now_s + REPEAT_PAUSE_S > give_up_s:
                reason = self.gone or f"connection to {self._url} lost: {lost}"
                raise Unreachable(f"{ask.method} {ask.path}: {reason}") from lost

    async def _send_once(self, ask: Ask) -> bytes:
        url = URL(self._url + ask.path, encoded=True)
        async with self._session.request(ask.method, url, data=_body(ask.body)) as response:
            if response.status >= 400:
                raise _refused(ask, response.status, await response.read())
            if ask.into is None:
                return await response.read()
            await _save(response, ask.into)
            return b""


def _body(content: bytes | Path) -> bytes | io.BytesIO | AsyncGenerator[bytes]:
    """In pieces when it is large, so that others have their turns while it is sent."""
    if isinstance(content, Path):
        return _pieces(content)
    return content if len(content) <= PIECE_BYTES else io.BytesIO(content)


async def _pieces(path: Path) -> AsyncGenerator[bytes]:
    async with await anyio.open_file(path, "rb") as file:
        while piece := await file.read(PIECE_BYTES):
            yield piece


async def _save(response: aiohttp.ClientResponse, path: Path) -> None:
    """Under another name until it is complete."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        async with await anyio.open_file(draft, "xb") as file:
            async for piece in response.content.iter_chunked(PIECE_BYTES):
                await file.write(piece)
        os.replace(draft, path)  # noqa: PTH105 - at once, as `anyio.Path` would not
    finally:
        with suppress(FileNotFoundError):
            draft.unlink()


def strange(ask: Ask, error: ValidationError) -> ToolServerError:
    return ToolServerError(f"{ask.method} {ask.path}: the answer is not what was agreed: {error}")


def _refused(ask: Ask, status: int, answer: bytes) -> SostenutoError:
    if status == 401:
        return WrongToken(f"{ask.method} {ask.path}: the server does not know our bearer token")
    try:
        return raised(Refusal.model_validate_json(answer))
    except ValidationError:
        return ToolServerError(
            f"{ask.method} {ask.path}: status {status}: {answer[:200].decode(errors='replace')}"
        )
