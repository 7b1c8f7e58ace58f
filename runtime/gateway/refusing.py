"""Errors as HTTP tells them: a status, a field, a time to try again."""

import json

from aiohttp import web
from pydantic_core import to_json

from sostenuto.errors import EngineError, Overloaded, ProgramError, SostenutoError, VersionUnavailable
from sostenuto.runtime.gateway.dialects.dialect import Json
from sostenuto.runtime.gateway.turn import Refused


def as_refused(error: SostenutoError | web.HTTPException) -> Refused:
    """Whatever went wrong, as the client is told."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return Refused(
            f"body: it is larger than the {error.headers.get('X-Limit', 'limit')} that is taken; send less, "
            "or raise gateway.body_bytes",
            status=413,
            code="body_too_large",
        )
    if isinstance(error, web.HTTPException):
        return Refused(error.reason or "refused", status=error.status)
    if isinstance(error, Overloaded):
        return _later(error)
    if isinstance(error, EngineError):
        return _of_engine(error)
    return Refused(str(error), status=503 if isinstance(error, ProgramError) else 400)


def _later(error: Overloaded) -> Refused:
    retry_after_s = error.retry_after_s or 1.0
    if isinstance(error, VersionUnavailable):
        return Refused(str(error), status=409, code="version_unavailable", retry_after_s=retry_after_s)
    return Refused(str(error), status=429, code="over_capacity", retry_after_s=retry_after_s)


def _of_engine(error: EngineError) -> Refused:
    """A refusal of the engine is the request's fault; anything else is the engine's."""
    status = getattr(error, "status", 503)
    if isinstance(status, int) and status in {400, 413, 422}:
        return Refused(str(error), status=400)
    return Refused(str(error), status=503, code="engine_failure", retry_after_s=1.0)


def plain_error(refused: Refused) -> Json:
    return {"error": {"message": str(refused), "param": refused.field, "code": refused.code}}


def json_reply(body: Json, refused: Refused | None = None) -> web.Response:
    response = web.Response(
        body=dumped(body), status=refused.status if refused else 200, content_type="application/json"
    )
    if refused is not None:
        _explain(response, refused)
    return response


def dumped(body: Json) -> bytes:
    """As JSON; what UTF-8 cannot carry becomes `?`."""
    try:
        return to_json(body)
    except ValueError:
        return json.dumps(body, ensure_ascii=False).encode(errors="replace")


def _explain(response: web.Response, refused: Refused) -> None:
    if refused.retry_after_s is not None:
        response.headers["Retry-After"] = str(max(1, round(refused.retry_after_s)))
    if refused.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
