"""The proxy at one door: HTTP CONNECT and plain HTTP, to the servers of one list.

- What is refused is answered with 403 and the list, also in the reason, which clients show for CONNECT.
- The address that was checked is the one that is connected to: nothing is resolved twice.
- After CONNECT bytes are passed on unseen.  A plain request goes on with the host that was checked, one for
  each connection.
"""

import asyncio
import socket
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

import anyio

from sostenuto.sandbox.egress.allowed import Address, AllowList, canonical, split_port

_HEAD_S = 30.0
_RESOLVE_S = 20.0
_CONNECT_S = 20.0
_CHUNK_BYTES = 1 << 16
_MOST_AT_ONCE = 256
"""Connections of one sandbox."""
_NAMED = 20
"""Entries of a list that a refusal names."""
_OF_ONE_HOP = ("connection", "host", "keep-alive", "proxy-authorization", "proxy-connection", "upgrade")


class _Refused(Exception):  # noqa: N818 - reads as the fact it states
    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass(frozen=True, slots=True)
class _Request:
    """What the first lines of a connection ask for."""

    host: str
    port: int
    onwards: bytes
    """What the server is sent first; nothing of CONNECT."""

    @property
    def place(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Proxy:
    """Serves the connections that come through one door."""

    def __init__(self, allowed: AllowList) -> None:
        self._allowed = allowed
        self._open = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its first byte to its end; raises nothing."""
        self._open += 1
        try:
            with _broken_off():
                await self._serve(reader, writer)
        finally:
            self._open -= 1
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self._open > _MOST_AT_ONCE:
                raise _Refused(503, f"this sandbox has {_MOST_AT_ONCE} connections already")
            request = await _read(reader)
            far_reader, far_writer = await self._connect(request)
        except _Refused as refusal:
            writer.write(_answer(refusal))
            await writer.drain()
            return
        try:
            if request.onwards:
                far_writer.write(request.onwards)
            else:
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            async with anyio.create_task_group() as group:
                group.start_soon(_pass_on, reader, far_writer)
                group.start_soon(_pass_on, far_reader, writer)
        finally:
            far_writer.close()

    async def _connect(self, request: _Request) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if not self._allowed.allows(request.host, request.port):
            raise _Refused(403, f"{request.place} is not in this sandbox's network list: {self._names()}")
        said = "it has no address"
        for address in await _resolve(request):
            if not self._allowed.allows_address(address, request.port):
                raise _Refused(
                    403,
                    f"{request.place} leads to {address}, which is guarded (this machine, a whole network, "
                    f"metadata of a cloud) and not in this sandbox's network list: {self._names()}",
                )
            try:
                with anyio.fail_after(_CONNECT_S):
                    return await asyncio.open_connection(str(address), request.port)
            except (OSError, TimeoutError) as error:
                said = str(error) or f"no answer within {_CONNECT_S:.0f} s"
        raise _Refused(502, f"{request.place} cannot be reached: {said}")

    def _names(self) -> str:
        entries = self._allowed.entries
        more = f" and {len(entries) - _NAMED} more" if len(entries) > _NAMED else ""
        return ", ".join(entries[:_NAMED]) + more


async def _read(reader: asyncio.StreamReader) -> _Request:
    try:
        with anyio.fail_after(_HEAD_S):
            head = await reader.readuntil(b"\r\n\r\n")
    except TimeoutError as error:
        raise _Refused(408, f"no request within {_HEAD_S:.0f} s") from error
    except asyncio.LimitOverrunError as error:
        raise _Refused(431, "the head of the request is too large") from error
    first, *fields = head[:-4].decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise _Refused(400, "no request of HTTP/1; this is a proxy for HTTP and CONNECT")
    return _connect_to(words[1]) if words[0] == "CONNECT" else _plain(words[0], words[1], fields)


def _connect_to(authority: str) -> _Request:
    host, port = split_port(authority)
    if host is None or port is None:
        raise _Refused(400, "CONNECT needs HOST:PORT")
    return _Request(canonical(host), port, b"")


def _plain(method: str, target: str, fields: list[str]) -> _Request:
    try:
        url = urlsplit(target)
        host, port = url.hostname, url.port or 80
    except ValueError:
        host, port, url = None, 0, urlsplit("")
    if url.scheme.lower() != "http" or not host:
        raise _Refused(400, "a proxy is asked for http://HOST/PATH, or by CONNECT")
    path = (url.path or "/") + (f"?{url.query}" if url.query else "")
    authority = url.netloc.rpartition("@")[2]
    kept = [field for field in fields if field.partition(":")[0].strip().lower() not in _OF_ONE_HOP]
    lines = [f"{method} {path} HTTP/1.1", f"Host: {authority}", *kept, "Connection: close", "", ""]
    return _Request(canonical(host), port, "\r\n".join(lines).encode("latin-1"))


async def _resolve(request: _Request) -> list[Address]:
    try:
        with anyio.fail_after(_RESOLVE_S):
            found = await asyncio.get_running_loop().getaddrinfo(
                request.host, request.port, type=socket.SOCK_STREAM
            )
    except (OSError, UnicodeError, TimeoutError) as error:
        raise _Refused(502, f"{request.host} cannot be resolved: {error}") from error
    return [ip_address(str(place[0]).partition("%")[0]) for *_, place in found]


def _answer(refusal: _Refused) -> bytes:
    said = str(refusal).encode("ascii", "replace")
    return (
        b"HTTP/1.1 %d %s\r\nContent-Type: text/plain\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s\n"
        % (refusal.status, said, len(said) + 1, said)
    )


async def _pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(_CHUNK_BYTES):
        sink.write(data)
        await sink.drain()
    if sink.can_write_eof():
        sink.write_eof()


@contextmanager
def _broken_off() -> Generator[None]:
    """An end that goes away ends the connection, and that is all."""
    try:
        yield
    except* (OSError, asyncio.IncompleteReadError):
        pass
