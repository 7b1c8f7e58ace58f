"""Tools that other services offer, as an environment declares them: `remote = (HttpTool(...), ...)`.

Values; they travel from the worker that read the class to the tool server, which calls the services.  In
headers and variables `${NAME}` stands for the secret of that name, which the tool server was given.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

from pydantic import BaseModel, JsonValue
from yarl import URL

from sostenuto.errors import ConfigError
from sostenuto.tools.limits import read_limits
from sostenuto.tools.wire import ToolLimits

Method = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_NOTHING: dict[str, JsonValue] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class HttpTool:
    """A tool that is one HTTP request: its arguments are the query of a GET or DELETE, else a JSON body."""

    name: str
    url: str
    description: str
    parameters: Mapping[str, JsonValue] | type[BaseModel] = field(default_factory=lambda: dict(_NOTHING))
    """A pydantic model, or the JSON Schema of an object."""
    method: Method = "POST"
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    timeout_s: float = 30.0
    """For the call as a whole, from its turn on."""
    retries: int = 2
    """After a lost connection, 429 or 5xx; each after what Retry-After says, else after half a second, twice
    that, and so on."""
    idempotent: bool | None = None
    """False: not asked again once the request was sent.  None: as the method is, so for GET only."""
    response_bytes: int = 1 << 20
    """Read of an answer; what is beyond is not waited for."""
    output_bytes: int = 16384
    """Shown to the policy."""
    queue: str | None = None
    concurrency: int | None = None
    rate_per_s: float | None = None
    burst: int = 1

    def __post_init__(self) -> None:
        where = f"HttpTool {self.name!r}"
        _check_name(self.name, "HttpTool")
        _check_url(self.url, where)
        _check_headers(self.headers, where)
        if self.method not in METHODS:
            raise ConfigError(f"{where}: method is {self.method!r}; give one of {', '.join(METHODS)}")
        if not self.description.strip():
            raise ConfigError(f"{where}: no description; it tells the model what the tool does")
        if self.retries < 0:
            raise ConfigError(f"{where}: retries is {self.retries}; give 0 or more")
        _check_amounts(where, timeout_s=self.timeout_s, response_bytes=self.response_bytes)
        if self.output_bytes < 64:
            raise ConfigError(f"{where}: output_bytes is {self.output_bytes}; give at least 64")
        object.__setattr__(self, "parameters", _schema(self.parameters, where))
        _ = self.limits

    @property
    def schema(self) -> dict[str, JsonValue]:
        """JSON Schema of the arguments."""
        return cast("dict[str, JsonValue]", self.parameters)

    @property
    def limits(self) -> ToolLimits:
        return _limits(self, f"HttpTool {self.name!r}")

    @property
    def may_repeat(self) -> bool:
        return self.method == "GET" if self.idempotent is None else self.idempotent


@dataclass(frozen=True, slots=True)
class McpServer:
    """The tools of an MCP server: one that is reached by `url`, or a `command` that speaks over its pipes.

    All programs of a tool server share one session with it.  Limits hold for its tools together.
    """

    name: str
    url: str | None = None
    command: Sequence[str] = ()
    """Runs beside the tool server, as its user and without a sandbox, like environment code does."""
    allow: Sequence[str] | None = None
    """Tools that are offered; None: all."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    """With a url."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """With a command: variables beside PATH, HOME and the like, which are all that it inherits."""
    timeout_s: float = 30.0
    """For one call, from its turn on."""
    start_s: float = 30.0
    """For the start and the list of tools."""
    output_bytes: int = 16384
    queue: str | None = None
    concurrency: int | None = None
    rate_per_s: float | None = None
    burst: int = 1

    def __post_init__(self) -> None:
        where = f"McpServer {self.name!r}"
        _check_name(self.name, "McpServer")
        object.__setattr__(self, "command", tuple(self.command))
        object.__setattr__(self, "allow", None if self.allow is None else tuple(self.allow))
        if bool(self.url) == bool(self.command):
            raise ConfigError(f"{where}: give url or command, one of them")
        if self.url:
            _check_url(self.url, where)
        if self.headers and self.command:
            raise ConfigError(f"{where}: headers go with a url; a command takes `environment`")
        if self.environment and self.url:
            raise ConfigError(f"{where}: environment goes with a command; a url takes `headers`")
        _check_headers(self.headers, where)
        _check_amounts(where, timeout_s=self.timeout_s, start_s=self.start_s)
        if self.output_bytes < 64:
            raise ConfigError(f"{where}: output_bytes is {self.output_bytes}; give at least 64")
        _ = self.limits

    @property
    def limits(self) -> ToolLimits:
        limits = _limits(self, f"McpServer {self.name!r}")
        return limits if limits.queue else limits.model_copy(update={"queue": f"mcp.{self.name}"})


Remote = HttpTool | McpServer


def _limits(given: Remote, where: str) -> ToolLimits:
    names = ("queue", "concurrency", "rate_per_s", "burst")
    said = {name: getattr(given, name) for name in names}
    return read_limits({name: value for name, value in said.items() if value is not None}, where)


def _schema(parameters: object, where: str) -> dict[str, JsonValue]:
    if isinstance(parameters, type) and issubclass(cast("type[object]", parameters), BaseModel):
        parameters = cast("type[BaseModel]", parameters).model_json_schema()
    if isinstance(parameters, Mapping):
        schema = dict(cast("Mapping[str, JsonValue]", parameters))
        if schema.get("type") == "object":
            return schema
    raise ConfigError(
        f'{where}: parameters is no pydantic model and no JSON Schema with "type": "object" at its top'
    )


def _check_name(name: str, where: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: name {name!r} is not made of letters, digits, _ and - (64 at most)")


def _check_url(url: str, where: str) -> None:
    try:
        parsed = URL(url)
    except ValueError as error:
        raise ConfigError(f"{where}: url {url!r} cannot be read: {error}") from None
    if parsed.scheme not in {"http", "https"} or not parsed.host:
        raise ConfigError(f"{where}: url {url!r} is no http or https URL with a host")
    if parsed.user is not None or parsed.password is not None:
        raise ConfigError(f'{where}: url has a user; send it as a header, such as "Authorization"')


def _check_headers(headers: Mapping[str, str], where: str) -> None:
    for name, value in headers.items():
        if not _HEADER.fullmatch(name) or "\n" in value or "\r" in value:
            raise ConfigError(f"{where}: header {name!r} cannot be sent; names are tokens, values one line")


def _check_amounts(where: str, **amounts: float) -> None:
    for name, value in amounts.items():
        if not 0 < value < float("inf"):
            raise ConfigError(f"{where}: {name} is {value}; give a positive number")
