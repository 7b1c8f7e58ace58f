"""What a user configures, apart from the job itself.  Parsed once, frozen, passed down in parts."""

import tomllib
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sostenuto.errors import ConfigError, nearest
from sostenuto.scheduler.scheduler import SchedulerSettings

M = TypeVar("M", bound=BaseModel)


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EngineSettings(Section):
    """The embedded engine."""

    kv_tokens: int = Field(default=16384, gt=0)
    """KV pool: tokens of all programs that decode or are held."""

    concurrency: int = Field(default=32, gt=0)
    """Requests that decode together."""

    threads: int = Field(default=1, gt=0)
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"


class TrainerProcessSettings(Section):
    threads: int = Field(default=1, gt=0)


class ToolServerSettings(Section):
    """The tool server and what runs in it."""

    hosts: int = Field(default=1, gt=0)
    """Worker processes for environment code."""

    sandbox: Literal["bubblewrap", "landlock"] | None = None
    """None: the first that works here."""

    unsafe: bool = False
    """True: tools run as plain processes of yours, isolated from nothing."""

    port: int = Field(default=0, ge=0, le=65535)
    """Of the tool server on 127.0.0.1; 0: a free one."""

    lease_s: float = Field(default=30.0, gt=0)
    """How long environments outlive a runtime that has died."""

    secrets: tuple[str, ...] = ()
    """Names of environment variables that tools may read and that never leave the tool server."""


class RuntimeConfig(Section):
    """Everything but the job."""

    directory: Path = Path("runs/default")
    """Journal, logs and checkpoints of the run."""

    engine: EngineSettings = EngineSettings()
    trainer: TrainerProcessSettings = TrainerProcessSettings()
    tool_server: ToolServerSettings = ToolServerSettings()
    scheduler: SchedulerSettings = SchedulerSettings()


def load_toml(path: Path, model: type[M]) -> M:
    """The file as `model`, or a ConfigError that names place, reason and, for an unknown key, the nearest."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give the path of a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    return parse(values, model, where=str(path))


def parse(values: dict[str, Any], model: type[M], *, where: str) -> M:
    """`values` as `model`, with every error in one ConfigError."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        lines = [_explain(model, item["loc"], item["type"], item["msg"]) for item in error.errors()]
        raise ConfigError(f"{where}: " + "; ".join(lines)) from None


def _explain(model: type[BaseModel], loc: tuple[int | str, ...], kind: str, message: str) -> str:
    place = ".".join(str(part) for part in loc) or "the whole"
    if kind != "extra_forbidden":
        return f"{place}: {message}"
    section = _section(model, loc[:-1])
    known = list(section.model_fields) if section else []
    return f"unknown key {place!r}; {nearest(str(loc[-1]), known)}"


def _section(model: type[BaseModel], loc: tuple[int | str, ...]) -> type[BaseModel] | None:
    """The model that a path of keys leads to."""
    found: type[BaseModel] | None = model
    for part in loc:
        annotation = (
            found.model_fields[str(part)].annotation if found and str(part) in found.model_fields else None
        )
        candidates = (annotation, *get_args(annotation))
        found = next(
            (c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)),
            found if annotation is None else None,
        )
    return found
