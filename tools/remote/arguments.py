"""What a policy wrote for a remote tool, held against the tool's JSON Schema as far as that is cheap.

Looked at are the object itself, its required, unknown and enumerated arguments and the types at its top;
the rest is judged by the service, whose refusal is an observation, too.  Patterns and references of a schema
that came from elsewhere are never run: a hostile one could keep this process busy.
"""

import json
from typing import cast

from pydantic import JsonValue

from sostenuto.errors import nearest
from sostenuto.tools.schema import InvalidArguments

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
_SHOWN_CHARS = 80


def read_arguments(
    tool: str, text: str, schema: dict[str, JsonValue]
) -> dict[str, JsonValue] | InvalidArguments:
    """The arguments, or what is wrong with them in words for the policy; empty text is no arguments."""
    try:
        values: object = json.loads(text if text.strip() else "{}", parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        return InvalidArguments(f"{tool}: the arguments are not JSON ({error})")
    if not isinstance(values, dict):
        return InvalidArguments(f"{tool}: the arguments are not a JSON object but {_shown(values)}")
    given = cast("dict[str, JsonValue]", values)
    wrong = [*_missing(given, schema), *_unknown(given, schema), *_unfit(given, schema)]
    return InvalidArguments(f"{tool}: " + "; ".join(wrong[:5])) if wrong else given


def _missing(given: dict[str, JsonValue], schema: dict[str, JsonValue]) -> list[str]:
    required = schema.get("required")
    names = required if isinstance(required, list) else []
    return [f"argument {str(name)!r} is missing" for name in names if name not in given]


def _unknown(given: dict[str, JsonValue], schema: dict[str, JsonValue]) -> list[str]:
    known = _properties(schema)
    if schema.get("additionalProperties") is not False or "patternProperties" in schema:
        return []
    return [
        f"there is no argument {_shown(name)}: {nearest(name, list(known))}"
        for name in given
        if name not in known
    ]


def _unfit(given: dict[str, JsonValue], schema: dict[str, JsonValue]) -> list[str]:
    wrong: list[str] = []
    for name, value in given.items():
        described = _properties(schema).get(name)
        if not isinstance(described, dict):
            continue
        wanted = described.get("type")
        kinds = wanted if isinstance(wanted, list) else [wanted]
        if all(kind in _TYPES for kind in kinds) and not any(_is(value, str(kind)) for kind in kinds):
            wrong.append(f"argument {name!r}: not {' or '.join(map(str, kinds))} but {_shown(value)}")
            continue
        choices = described.get("enum")
        if isinstance(choices, list) and value not in choices:
            wrong.append(f"argument {name!r}: not one of {_shown(choices)} but {_shown(value)}")
    return wrong


def _is(value: JsonValue, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[kind])


def _properties(schema: dict[str, JsonValue]) -> dict[str, JsonValue]:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
