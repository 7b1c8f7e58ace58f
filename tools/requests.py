"""What a handler reads of a request, and how it answers."""

from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from sostenuto.errors import ConfigError
from sostenuto.tools.edge import Edge
from sostenuto.tools.logs import PROGRAM
from sostenuto.types import ProgramId, ToolResult

M = TypeVar("M", bound=BaseModel)
_NAME_CHARS = 500


async def body_of(request: web.Request, model: type[M]) -> M:
    """The request's body, or the ConfigError that names the first field which is wrong."""
    data = await bytes_of(request)
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "body"
        raise ConfigError(f"{model.__name__}: {field}: {first['msg']}") from None


async def bytes_of(request: web.Request) -> bytes:
    try:
        return await request.read()
    except web.RequestPayloadError as error:
        raise ConfigError(f"body: it cannot be read: {error}") from None


def program_id_of(request: web.Request) -> ProgramId:
    name = named(request, "program_id")
    PROGRAM.set(name)
    return ProgramId(name)


def named(request: web.Request, part: str) -> str:
    """A part of the request's path that is a name; ConfigError when it is none."""
    name = request.match_info[part]
    if len(name) > _NAME_CHARS or not name.isprintable():
        raise ConfigError(
            f"{part}: {name[:40]!r} is no name: give at most {_NAME_CHARS} printable characters"
        )
    return name


def done() -> web.Response:
    return web.Response(body=b"{}", content_type="application/json")


def json_response(edge: Edge, value: BaseModel | ToolResult, status: int = 200) -> web.Response:
    return web.Response(body=edge.json(value), status=status, content_type="application/json")
