"""Which program a request belongs to, from what clients really send.

In this order, the first that is there: a minted key, the path `/p/ID/...`, `X-Program-Id`, `program_id` in
the body (also within `extra_body`), Dynamo's agent context, `X-Session-ID`, what Claude Code and Codex send,
`user` or `prompt_cache_key`.  A request with none of them is a program of its own.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, cast

from sostenuto.runtime.gateway.turn import Refused

Headers = Mapping[str, str]
Body = Mapping[str, Any]


class Strength(IntEnum):
    """How sure it is that two requests with the same name are one program."""

    NONE = 0
    """A program of one call."""
    WEAK = 1
    """A hint that clients send by themselves: it is over soon after it falls silent."""
    EXPLICIT = 2
    KEY = 3
    """A key that was minted for this program."""


@dataclass(frozen=True, slots=True)
class Identity:
    """`name` is the client's own for its program; "" for one of a single call."""

    name: str
    strength: Strength
    parent: str = ""
    is_final: bool = False
    """The program's last call."""


NOBODY = Identity("", Strength.NONE)
_NAME = re.compile(r"[!-~]{1,200}")
_YES = frozenset({"1", "true", "yes"})


def identify(headers: Headers, path_name: str | None, body: Body) -> Identity:
    """Who calls, minted keys apart; Refused for what cannot be a name, or two explicit ones that differ."""
    if path_name is not None:
        found = _within_path(path_name, headers, body)
    else:
        found = next((identity for read in _READERS if (identity := read(headers, body))), NOBODY)
    if found.strength is not Strength.NONE:
        _check(found.name, "program id")
    if found.parent:
        _check(found.parent, "parent's program id")
    return found


def _within_path(path_name: str, headers: Headers, body: Body) -> Identity:
    """The path decides over what clients send by themselves; only another name of ours contradicts it."""
    own = _own(headers, body) or NOBODY
    if own.name not in {"", path_name}:
        raise Refused(
            f"the path says that this is program {path_name!r}, and the request says {own.name!r}; "
            "leave one of them out",
            field="program_id",
            code="contradictory_identity",
        )
    return replace(
        own, name=path_name, strength=Strength.EXPLICIT, is_final=own.is_final or _says_final(headers)
    )


def _check(name: str, what: str) -> None:
    if not _NAME.fullmatch(name):
        raise Refused(
            f"{what}: {name[:80]!r} cannot be one; give 1 to 200 printable ASCII characters, no blanks",
            field="program_id",
        )


def _own(headers: Headers, body: Body) -> Identity | None:
    said = [name for name in (headers.get("X-Program-Id"), *_in_body(body)) if name]
    if len(set(said)) > 1:
        raise Refused(
            f"the request names two programs, {said[0]!r} and {said[1]!r}; leave one of them out",
            field="program_id",
            code="contradictory_identity",
        )
    if not said:
        return None
    final = _says_final(headers) or body.get("program_final") is True
    return Identity(said[0], Strength.EXPLICIT, headers.get("X-Parent-Program-Id", ""), final)


def _says_final(headers: Headers) -> bool:
    return headers.get("X-Program-Final", "").lower() in _YES


def _in_body(body: Body) -> list[str]:
    extra = _section(body, "extra_body")
    return [_name_in(section, "program_id") for section in (body, extra)]


def _dynamo(headers: Headers, body: Body) -> Identity | None:
    context = _section(_section(body, "nvext"), "agent_context")
    name = _name_in(context, "trajectory_id") or _name_in(context, "session_id")
    if name:
        parent = _name_in(context, "parent_trajectory_id")
        return Identity(name, Strength.EXPLICIT, parent, context.get("trajectory_final") is True)
    if name := headers.get("X-Dynamo-Session-ID", ""):
        final = headers.get("X-Dynamo-Session-Final", "").lower() in _YES
        return Identity(name, Strength.EXPLICIT, headers.get("X-Dynamo-Parent-Session-ID", ""), final)
    return None


def _session(headers: Headers, body: Body) -> Identity | None:
    del body
    if name := headers.get("X-Session-ID", ""):
        return Identity(name, Strength.EXPLICIT, headers.get("X-Parent-Session-ID", ""))
    return None


def _coding_agents(headers: Headers, body: Body) -> Identity | None:
    del body
    if session := headers.get("X-Claude-Code-Session-Id", ""):
        agent = headers.get("X-Claude-Code-Agent-Id", "")
        if not agent:
            return Identity(session, Strength.WEAK)
        parent = headers.get("X-Claude-Code-Parent-Agent-Id", "")
        return Identity(f"{session}/{agent}", Strength.WEAK, f"{session}/{parent}" if parent else session)
    if name := headers.get("Session-Id", "") or headers.get("session_id", ""):
        return Identity(name, Strength.WEAK)
    return None


def _weak(headers: Headers, body: Body) -> Identity | None:
    del headers
    name = _name_in(body, "prompt_cache_key") or _name_in(body, "user")
    return Identity(name, Strength.WEAK) if _NAME.fullmatch(name) else None


_READERS: tuple[Callable[[Headers, Body], Identity | None], ...] = (
    _own, _dynamo, _session, _coding_agents, _weak,
)  # fmt: skip


def _section(body: Body, key: str) -> Body:
    value: object = body.get(key)
    return cast("Body", value) if isinstance(value, dict) else {}


def _name_in(section: Body, key: str) -> str:
    value = section.get(key)
    if value is None or isinstance(value, str):
        return value or ""
    raise Refused(f"{key}: give a text, not {type(value).__name__}", field=key)
