"""A program's sandbox over HTTP: commands, programs, files, archives.

What is asked for ends when the one who asked goes away.  An archive passes through a file without a name, so
that its size is a matter of disk and never of memory, and a slow client holds nothing else.
"""

from aiohttp import web

from sostenuto.errors import ConfigError
from sostenuto.sandbox.protocol import ShellResult
from sostenuto.tools.archived import Spool, masked, open_spool, pieces_of
from sostenuto.tools.config import ServerConfig
from sostenuto.tools.edge import Edge
from sostenuto.tools.logs import REQUEST
from sostenuto.tools.programs import Programs
from sostenuto.tools.requests import body_of, bytes_of, done, json_response, program_id_of
from sostenuto.tools.wire import REQUEST_ID, ExecRequest, ShellReply, ShellRequest


class SandboxRoutes:
    """One method for each route."""

    def __init__(self, programs: Programs, edge: Edge, config: ServerConfig) -> None:
        self._programs = programs
        self._edge = edge
        self._body_bytes = config.body_bytes
        self._archive_bytes = config.archive_bytes
        self._folder = config.sandbox_root or config.state_dir

    def routes(self, program: str) -> list[web.RouteDef]:
        """`program` is the path of one."""
        return [
            web.post(f"{program}/shell", self._shell),
            web.post(f"{program}/exec", self._exec),
            web.get(f"{program}/files/{{path:.+}}", self._read),
            web.put(f"{program}/files/{{path:.+}}", self._write),
            web.get(f"{program}/archive/{{path:.*}}", self._download),
            web.put(f"{program}/archive/{{path:.*}}", self._upload),
        ]

    async def _shell(self, request: web.Request) -> web.Response:
        body = await body_of(request, ShellRequest)
        return self._ran(
            await self._programs.run_command(
                program_id_of(request),
                lambda sandbox: sandbox.shell(
                    body.command, timeout_s=body.timeout_s, output_bytes=body.output_bytes
                ),
            )
        )

    async def _exec(self, request: web.Request) -> web.Response:
        body = await body_of(request, ExecRequest)
        return self._ran(
            await self._programs.in_sandbox(
                program_id_of(request),
                lambda sandbox: sandbox.exec(
                    body.argv,
                    stdin=body.stdin.encode(),
                    timeout_s=body.timeout_s,
                    output_bytes=body.output_bytes,
                ),
            )
        )

    def _ran(self, result: ShellResult) -> web.Response:
        reply = ShellReply(
            exit_code=result.exit_code,
            output=self._edge.text(result.output),
            cut_bytes=result.cut_bytes,
            elapsed_s=result.elapsed_s,
            out_of_memory=result.out_of_memory,
        )
        return json_response(self._edge, reply)

    async def _read(self, request: web.Request) -> web.Response:
        path = request.match_info["path"]
        data = await self._programs.in_sandbox(
            program_id_of(request), lambda sandbox: sandbox.read(path, max_bytes=self._body_bytes)
        )
        return web.Response(
            body=self._edge.secrets.redact_bytes(data), content_type="application/octet-stream"
        )

    async def _write(self, request: web.Request) -> web.Response:
        path, data = request.match_info["path"], await bytes_of(request)
        await self._programs.in_sandbox(program_id_of(request), lambda sandbox: sandbox.write(path, data))
        return done()

    async def _upload(self, request: web.Request) -> web.Response:
        path, program_id = request.match_info["path"] or ".", program_id_of(request)
        async with open_spool(self._folder) as spool:
            await self._receive(request, spool)
            await self._programs.in_sandbox(program_id, lambda sandbox: sandbox.upload(spool.file, path))
        return done()

    async def _receive(self, request: web.Request, spool: Spool) -> None:
        try:
            async for piece in request.content.iter_any():
                if spool.size + len(piece) > self._archive_bytes:
                    raise web.HTTPRequestEntityTooLarge(self._archive_bytes, spool.size + len(piece))
                await spool.add(piece)
        except web.RequestPayloadError as error:
            raise ConfigError(f"body: it cannot be read: {error}") from None
        await spool.rewind()

    async def _download(self, request: web.Request) -> web.StreamResponse:
        path, program_id = request.match_info["path"] or ".", program_id_of(request)
        most = min(_count(request, "max_bytes", self._archive_bytes), self._archive_bytes)
        async with open_spool(self._folder) as spool, open_spool(self._folder) as other:
            await self._programs.in_sandbox(
                program_id, lambda sandbox: sandbox.download_to(spool.file, path, max_bytes=most)
            )
            leaving = await masked(spool, other, self._edge.secrets)
            return await _stream(request, leaving)


async def _stream(request: web.Request, spool: Spool) -> web.StreamResponse:
    # Once prepared it takes no headers any more.
    response = web.StreamResponse(headers={"Content-Type": "application/x-tar", REQUEST_ID: REQUEST.get()})
    response.content_length = await spool.rewind()
    await response.prepare(request)
    async for piece in pieces_of(spool.file):
        await response.write(piece)
    await response.write_eof()
    return response


def _count(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text)):
        raise ConfigError(f"{name}: {text[:40]!r} is no size; give a positive number of bytes")
    return int(text)
