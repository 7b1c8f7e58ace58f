"""One tool as the model is told of it, and the check of what the model wrote.

- The schema comes from type hints and docstring; ConfigError names tool, argument and remedy.
- Arguments are checked strictly against that schema: what breaks it is refused, nothing is converted.
"""

import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Any, cast, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    PydanticInvalidForJsonSchema,
    PydanticSchemaGenerationError,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
    create_model,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticSerializationError, to_json

from sostenuto.errors import ConfigError, nearest
from sostenuto.tools.decorator import ToolOptions, arguments_of, label, options_of
from sostenuto.tools.docstring import read_docstring
from sostenuto.tools.wire import ToolSchema

_SHOWN_ERRORS = 5
_SHOWN_CHARS = 80
_UNFIT = (PydanticSchemaGenerationError, PydanticInvalidForJsonSchema, PydanticUserError)
_CONFIG = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())


@dataclass(frozen=True, slots=True)
class InvalidArguments:
    """Why the arguments were refused, in words for the policy."""

    message: str


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a policy may call by name."""

    function: Callable[..., object]
    options: ToolOptions
    schema: ToolSchema
    is_async: bool
    _arguments: type[BaseModel]
    _fields: dict[str, str]
    """Field of the model to argument: a field may not be called `json` or `copy`, an argument may."""

    @property
    def name(self) -> str:
        return self.options.name

    def read_arguments(self, text: str) -> dict[str, object] | InvalidArguments:
        """Keyword arguments from JSON text, or what is wrong with it; empty text is no arguments."""
        try:
            model = self._arguments.model_validate_json(text if text.strip() else "{}", strict=True)
        except ValidationError as error:
            return InvalidArguments(self._explain(error))
        return {self._fields[field]: getattr(model, field) for field in model.model_fields_set}

    def _explain(self, error: ValidationError) -> str:
        errors = error.errors(include_url=False, include_context=False)
        lines = [_explain_one(item, list(self._fields.values())) for item in errors[:_SHOWN_ERRORS]]
        if len(errors) > _SHOWN_ERRORS:
            lines.append(f"and {len(errors) - _SHOWN_ERRORS} more")
        return f"{self.name}: " + "; ".join(lines)


def read_tool(function: Callable[..., object]) -> Tool:
    """The tool that `@tool` made of the function, or ConfigError."""
    options = options_of(function)
    if options is None:
        raise ConfigError(f"{label(function)} is not a tool: put @tool above it")
    where = f"tool {label(function)}"
    documented = read_docstring(inspect.getdoc(function) or "")
    hints = resolve_hints(function, where)
    parameters = arguments_of(function)
    fields = {f"a{index}": parameter.name for index, parameter in enumerate(parameters)}
    definitions: dict[str, Any] = {
        f"a{index}": _field(parameter, hints[parameter.name], documented.arguments, where)
        for index, parameter in enumerate(parameters)
    }
    arguments = _model(definitions, fields, where)
    schema = ToolSchema(
        name=options.name,
        description=documented.description,
        parameters=_json_schema(arguments, definitions, fields, where),
        timeout_s=options.timeout_s,
        serial=options.serial,
        idempotent=options.idempotent,
        limits=options.limits,
        output_bytes=options.output_bytes,
    )
    return Tool(function, options, schema, inspect.iscoroutinefunction(function), arguments, fields)


def resolve_hints(function: Callable[..., object], where: str) -> dict[str, Any]:
    """The types of a function's parameters, or ConfigError.

    They replace annotations that are strings, so that a class sent by value needs no name of its script.
    """
    inner = inspect.unwrap(function)
    hints: dict[str, Any] = {}
    for name, written in inner.__annotations__.items():
        if name != "return":
            hints[name] = _resolve(name, written, inner, where)
    inner.__annotations__ = inner.__annotations__ | hints
    return hints


def _resolve(name: str, written: object, function: Callable[..., object], where: str) -> object:
    holder = SimpleNamespace(__annotations__={name: written})
    names = cast("dict[str, Any]", getattr(function, "__globals__", {}))
    try:
        return typing.get_type_hints(holder, globalns=names, include_extras=True)[name]
    except (NameError, AttributeError, SyntaxError, TypeError) as error:
        raise ConfigError(
            f"{where}: argument {name!r}: its type {written!r} cannot be read ({error}); "
            "use a type that is defined or imported at the top of the module"
        ) from error


def _field(
    parameter: inspect.Parameter, hint: object, documented: dict[str, str], where: str
) -> tuple[Any, FieldInfo]:
    if isinstance(parameter.default, FieldInfo):
        raise ConfigError(
            f"{where}: argument {parameter.name!r}: write Annotated[TYPE, Field(...)] and a plain default"
        )
    options: dict[str, Any] = {"alias": parameter.name}
    description = documented.get(parameter.name)
    if description and not _is_described(hint):
        options["description"] = description
    if parameter.default is not inspect.Parameter.empty:
        options |= _default(parameter.default)
    return hint, cast("FieldInfo", Field(**options))


def _is_described(hint: object) -> bool:
    extras = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return any(isinstance(extra, FieldInfo) and extra.description for extra in extras)


def _default(value: object) -> dict[str, object]:
    """A default shows in the schema when JSON can say it."""
    try:
        to_json(value)
    except (PydanticSerializationError, ValueError):
        return {"default_factory": lambda: value}
    return {"default": value}


def _model(definitions: dict[str, Any], fields: dict[str, str], where: str) -> type[BaseModel]:
    try:
        return create_model("Arguments", __config__=_CONFIG, **definitions)
    except _UNFIT as error:
        raise _unfit(definitions, fields, where, error) from error


def _json_schema(
    arguments: type[BaseModel], definitions: dict[str, Any], fields: dict[str, str], where: str
) -> dict[str, JsonValue]:
    try:
        schema = cast("JsonValue", arguments.model_json_schema(by_alias=True))
    except _UNFIT as error:
        raise _unfit(definitions, fields, where, error) from error
    return cast("dict[str, JsonValue]", _without_titles(schema))


def _unfit(
    definitions: dict[str, Any], fields: dict[str, str], where: str, error: PydanticUserError
) -> ConfigError:
    """Find the argument whose type JSON has no form for."""
    for field, (hint, _) in definitions.items():
        try:
            TypeAdapter[object](hint).json_schema()
        except _UNFIT:
            return ConfigError(
                f"{where}: argument {fields[field]!r}: a model cannot write a {hint!r} as JSON; "
                "use str, int, float, bool, list, dict, Literal, an Enum or a pydantic model"
            )
    return ConfigError(f"{where}: {error}")


def _without_titles(schema: JsonValue, *, names: bool = False) -> JsonValue:
    """The schema without the titles that pydantic makes of names: they cost tokens and say nothing."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_titles(value, names=key in {"properties", "$defs"} and not names)
        for key, value in schema.items()
        if names or key != "title"
    }


def _explain_one(error: ErrorDetails, known: list[str]) -> str:
    path = ".".join(str(part) for part in error["loc"])
    match error["type"]:
        case "json_invalid":
            return f"the arguments are not JSON ({error['msg']})"
        case "missing":
            return f"argument {path!r} is missing"
        case "extra_forbidden" if len(error["loc"]) == 1:
            return f"there is no argument {_shown(path)}: {nearest(path, known)}"
        case _ if not error["loc"]:
            return f"the arguments are not a JSON object but {_shown(error['input'])}"
        case _:
            return f"argument {path!r}: {error['msg']}, not {_shown(error['input'])}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
