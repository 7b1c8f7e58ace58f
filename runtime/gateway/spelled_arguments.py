"""The grammar of arguments that a model spells out one by one, of a JSON schema.

Arguments come in the order of the schema, each at most once.  A text ends where what marks its end first
stands; lengths and patterns are kept to.  Everything else is JSON.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from sostenuto.runtime.rendering.spelling import Spelling, plain

Json = dict[str, Any]

_KEY = r"[^\s<>\"'/=]+"
_COMBINED = ("anyOf", "oneOf", "allOf")
_DEPTH = 16


class SpellingError(ValueError):
    """The schema asks for what such arguments cannot be held to; the message names where."""


def spelled_arguments(spelling: Spelling, schema: Json) -> Json:
    """A structural tag's format.  A schema without properties allows any arguments."""
    properties: object = schema.get("properties")
    if not isinstance(properties, dict) or not properties:
        is_closed = properties == {} and schema.get("additionalProperties") is False
        return {"type": "const_string", "value": ""} if is_closed else _anything(spelling)
    needed = cast("Sequence[str]", schema.get("required") or ())
    elements = [
        _argument(spelling, key, value, schema, needed=key in needed)
        for key, value in cast("dict[str, object]", properties).items()
    ]
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}


def _anything(spelling: Spelling) -> Json:
    value = {"type": "tag", "begin": "", "content": _any_text(spelling), "end": spelling.end}
    key = {"type": "tag", "begin": "", "content": {"type": "regex", "pattern": _KEY}, "end": spelling.middle}
    one = {
        "type": "tag",
        "begin": spelling.begin,
        "content": {"type": "sequence", "elements": [key, value]},
        "end": "",
    }
    return {"type": "tags_with_separator", "tags": [one], "separator": "", "at_least_one": False}


def _argument(spelling: Spelling, key: str, value: object, schema: Json, *, needed: bool) -> Json:
    tag = {
        "type": "tag",
        "begin": f"{spelling.begin}{key}{spelling.middle}",
        "content": _value(spelling, key, value, schema),
        "end": spelling.end,
    }
    return tag if needed else {"type": "optional", "content": tag}


def _value(spelling: Spelling, key: str, value: object, schema: Json) -> Json:
    own = _resolved(value, schema, 0)
    choices = [own["const"]] if "const" in own else own.get("enum")
    if isinstance(choices, list) and choices:
        told = [{"type": "const_string", "value": plain(one)} for one in cast("list[object]", choices)]
        return told[0] if len(told) == 1 else {"type": "or", "elements": told}
    if not _may_be_text(own, schema, 0):
        definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        return {"type": "json_schema", "json_schema": {**definitions, **own}}
    return _text(spelling, key, own)


def _text(spelling: Spelling, key: str, own: Mapping[str, Any]) -> Json:
    least, most, pattern = own.get("minLength"), own.get("maxLength"), own.get("pattern")
    if pattern is None and least is None and most is None:
        return _any_text(spelling)
    if pattern is not None and not (least is None and most is None):
        raise SpellingError(f"{key}: pattern beside minLength or maxLength cannot be held to in this form")
    if pattern is None:
        return {"type": "regex", "pattern": rf"[\s\S]{{{least or 0},{'' if most is None else most}}}"}
    return {"type": "regex", "pattern": _anchored(str(pattern))}


def _anchored(pattern: str) -> str:
    """JSON schema looks for a pattern anywhere."""
    begin = "" if pattern.startswith("^") else r"[\s\S]*"
    end = "" if pattern.endswith("$") and not pattern.endswith("\\$") else r"[\s\S]*"
    return f"{begin}({pattern.removeprefix('^').removesuffix('$' if not end else '')}){end}"


def _any_text(spelling: Spelling) -> Json:
    return {"type": "any_text", "excludes": [spelling.end]}


def _resolved(value: object, schema: Json, depth: int) -> Json:
    """Without references at its top."""
    own = cast("Json", value) if isinstance(value, dict) else {}
    reference = own.get("$ref")
    if not isinstance(reference, str) or depth >= _DEPTH:
        return own
    found: Json = schema
    for part in reference.removeprefix("#/").split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        inner: object = found.get(name)
        found = cast("Json", inner) if isinstance(inner, dict) else {}
    return _resolved(found, schema, depth + 1)


def _may_be_text(own: Json, schema: Json, depth: int) -> bool:
    """Whether a string is valid: it is then written as it is, whatever else may be."""
    kinds: object = own.get("type")
    if isinstance(kinds, str):
        return kinds == "string"
    if isinstance(kinds, list):
        return "string" in cast("list[object]", kinds)
    parts = [part for name in _COMBINED for part in cast("list[object]", own.get(name) or ())]
    if not parts or depth >= _DEPTH:
        return True
    return any(_may_be_text(_resolved(part, schema, 0), schema, depth + 1) for part in parts)
