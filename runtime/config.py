"""What a user configures, apart from the job itself.  Parsed once, frozen, passed down in parts."""

import tomllib
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, cast, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sostenuto.errors import ConfigError, nearest
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.trainer.settings import TrainerProcessSettings as TrainerProcessSettings

M = TypeVar("M", bound=BaseModel)

TOKEN_VARIABLE = "SOSTENUTO_TOOL_TOKEN"


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

    speculation: Literal["prompt", "draft", "mtp"] | None = None
    """Where guesses at the next tokens come from; they are verified, several in one step.

    prompt: what followed the last tokens when they were in the context before; draft: what a smaller
    model draws; mtp: what the model's own multi-token-prediction layer draws.
    """

    draft_model: Path | None = None
    """Folder of the smaller model, with the same tokenizer."""

    draft_tokens: int = Field(default=8, gt=0, le=64)
    """Guesses for one request in one step, at most."""

    quantization: Literal["int8", "fp8", "nvfp4"] | None = None
    """Keep matrices in few bits.  `learner.quantization` makes training compute with the same values."""

    replicas: int = Field(default=1, gt=0)
    """Engines like this one."""

    restarts: int = Field(default=3, ge=0)
    """How often one that dies is started again within ten minutes."""

    lower_tokens: int = Field(default=0, ge=0)
    """Room for KV of programs that are not expected back soon, below the pool; 0: none.

    Host memory beside a GPU, a file on a CPU.
    """

    lower_folder: Path | None = None
    """Where that file is; it has no name there.  None: the run directory."""

    @model_validator(mode="after")
    def _a_draft_model_is_used(self) -> Self:
        if (self.speculation == "draft") != (self.draft_model is not None):
            raise ValueError('speculation = "draft" and draft_model belong together; give both, or neither')
        return self


class EngineEntry(Section):
    """One of several engines: embedded, or one that runs already and is reached over HTTP."""

    kind: Literal["embedded", "vllm", "sglang"] = "embedded"
    id: str = Field(default="", pattern=r"^[A-Za-z0-9._-]*$")
    """Its name in errors and in the view of the fleet; empty: its kind and a number."""

    url: str | None = Field(default=None, pattern=r"^https?://[^/?#\s]+$")
    """Such as http://gpu-1:8000; of one that runs already."""

    api_key_env: str | None = None
    """Environment variable with its key."""

    api_key_file: Path | None = None
    """File with its key, in place of the variable."""

    weights: Path | None = None
    """Folder that it reads under the same path: new versions are written there.  None: the run directory."""

    kv_tokens: int | None = Field(default=None, gt=0)
    """None: as `engine` says, or as the engine itself does where it runs already."""

    concurrency: int | None = Field(default=None, gt=0)
    threads: int | None = Field(default=None, gt=0)
    dtype: Literal["float32", "bfloat16"] | None = None
    device: str | None = None

    @model_validator(mode="after")
    def _says_what_its_kind_needs(self) -> Self:
        embedded = self.kind == "embedded"
        foreign = (
            ("url", "api_key_env", "api_key_file", "weights") if embedded else ("threads", "dtype", "device")
        )
        if wrong := [name for name in foreign if getattr(self, name) is not None]:
            remedy = "give kind = 'vllm' or 'sglang', or leave it out" if embedded else "start the engine so"
            raise ValueError(f"{wrong[0]} is nothing that an engine of kind {self.kind!r} is told; {remedy}")
        if not embedded and self.url is None:
            raise ValueError(f"url is missing; say where the {self.kind} engine listens")
        if self.api_key_env is not None and self.api_key_file is not None:
            raise ValueError("api_key_env and api_key_file both name the key; give one of them")
        return self


class DockerSection(Section):
    """Of sandboxes that are containers."""

    image: str = "python:3.12-slim"
    """For environments that name none.  Needs a POSIX `sh`."""

    socket: str | None = None
    """None: $DOCKER_HOST, or where Docker and Podman usually listen."""

    runtime: str | None = None
    """An OCI runtime that the daemon knows, such as `runsc`; None: its default."""

    checkpoints: bool = False
    """Move the memory of waiting sandboxes to disk, once for each, where a trial has seen that this works."""

    disk_bytes: int | None = Field(default=None, gt=0)
    """What one sandbox may write beside what it starts with; refused where storage cannot bound it."""

    uid: int = Field(default=61184, ge=0)
    """User and group inside; 0 for images whose programs write all over the file system."""

    starts: int = Field(default=8, gt=0)
    """Containers that may be starting at the same time."""


class ToolServerSettings(Section):
    """The tool server and what runs in it."""

    hosts: int = Field(default=1, gt=0)
    """Worker processes for environment code, for each interpreter that environments need."""

    host_memory_bytes: int | None = Field(default=None, gt=0)
    """Of one worker and what it starts; one that uses more is ended.  None: as much as there is."""

    host_cpus: float | None = Field(default=None, ge=0.01, allow_inf_nan=False)
    """Cores of one worker and what it starts; None: as many as there are."""

    sandbox: Literal["bubblewrap", "landlock", "docker"] | None = None
    """None: the first that works here."""

    docker: DockerSection = DockerSection()
    warm: int = Field(default=0, ge=0)
    """Sandboxes that are started ahead, of each kind that was asked for before."""

    layer_bytes: int | None = Field(default=None, ge=0)
    """Disk for what set-up commands have left; None: half of what is free at the start."""

    snapshot_idle_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """A sandbox that was not used for so long is snapshotted as it runs: its program can go on when the
    server dies.  None: only those are that step down so far."""

    unsafe: bool = False
    """True: tools run as plain processes of yours, isolated from nothing."""

    sandbox_memory_bytes: int | None = Field(default=None, gt=0)
    """What sandboxes may take together, each counted with its limit; None: no bound.

    Where one more does not fit, those of programs that wait for an engine step down.
    """

    port: int = Field(default=0, ge=0, le=65535)
    """Of the tool server on 127.0.0.1; 0: a free one."""

    lease_s: float = Field(default=30.0, gt=0)
    """How long environments outlive a runtime that has died."""

    restarts: int = Field(default=3, ge=0)
    """How often the server is started again within ten minutes when it dies."""

    secrets: tuple[str, ...] = ()
    """Names of environment variables that tools may read and that never leave the tool server."""


class RemoteToolServer(Section):
    """A tool server that runs already, here or on another machine."""

    url: str = Field(pattern=r"^https?://[^/?#\s]+$")
    """Such as https://tools-1:7070."""

    token_env: str = TOKEN_VARIABLE
    """Environment variable with the server's token."""

    ca: Path | None = None
    """PEM file of who vouches for the server; None: the system's authorities."""


class ToolServeSettings(ToolServerSettings):
    """A tool server of its own, for runtimes on this machine or others."""

    @model_validator(mode="after")
    def _is_started_by_others(self) -> Self:
        if "restarts" in self.model_fields_set:
            raise ValueError("restarts is of a server that a runtime starts; leave it to who starts this one")
        return self

    host: str = "127.0.0.1"
    """Where it listens.  Beyond this machine it needs TLS, or `insecure`."""

    token_env: str = TOKEN_VARIABLE
    """Environment variable with the token that clients have to give."""

    token_file: Path | None = None
    """File with the token, in place of the variable."""

    tls_certificate: Path | None = None
    tls_key: Path | None = None
    insecure: bool = False
    """Listen beyond this machine without TLS: whoever sees the traffic has the token."""

    sandbox_root: Path = Path("tool-server/sandboxes")
    """Folder for workspaces."""

    state_dir: Path = Path("tool-server/state")
    """Folder for what has to survive the server's process."""

    cpus: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """What running calls may claim of processors together; None: all that this machine gives."""

    memory_bytes: int | None = Field(default=None, gt=0)
    """What running calls may claim of memory together; None: all that this machine gives."""


class GatewaySettings(Section):
    """Where agents from elsewhere reach the model."""

    host: str = "127.0.0.1"
    """Where it listens.  Beyond this machine it needs TLS, or `insecure`."""

    port: int = Field(default=0, ge=0, le=65535)
    """0: a free one."""

    tls_certificate: Path | None = None
    tls_key: Path | None = None
    insecure: bool = False
    """Listen beyond this machine without TLS: whoever sees the traffic has the keys."""

    model: str = ""
    """The name under which the model is served; empty: that of its folder."""

    admin_key_env: str = "SOSTENUTO_ADMIN_KEY"
    """Environment variable with the key for programs, workers and weights."""

    agent_key_env: str = "SOSTENUTO_AGENT_KEY"
    """Environment variable with a key for model calls.  With neither key, whoever reaches it may do all."""

    metrics_key_env: str = "SOSTENUTO_METRICS_KEY"
    """Environment variable with the key for metrics."""

    body_bytes: int = Field(default=64 << 20, gt=0)
    """The largest body of a request."""

    keep_alive_s: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    """How often a stream says that its program still waits."""

    turn_tokens: int = Field(default=8192, gt=0)
    """Tokens of a reply whose client sets no limit.  KV for as many is kept clear while it is sampled."""

    strict_tools: bool = True
    """Hold calls to tools that are `strict` to their schemas, or refuse them; false: `strict` is ignored."""

    programs: int = Field(default=10_000, gt=0)
    """How many may be there at one time, idle ones included; more are refused."""

    hold_s: float = Field(default=300.0, gt=0, allow_inf_nan=False)
    """KV of a program that named itself is held so long between its calls."""

    weak_hold_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """The same where it only gave a hint, such as `user`."""

    forget_s: float = Field(default=3600.0, gt=0, allow_inf_nan=False)
    """A program that was silent for so long is over; one that only gave a hint, after a tenth of it."""


class RuntimeConfig(Section):
    """Everything but the job."""

    directory: Path = Path("runs/default")
    """Journal, logs and checkpoints of the run."""

    engine: EngineSettings = EngineSettings()
    engines: tuple[EngineEntry, ...] = ()
    """Which engines there are; none: `engine.replicas` embedded ones."""

    engine_return_s: float = Field(default=180.0, gt=0)
    """When no engine is left: how long programs wait for one to come back."""

    trainer: TrainerProcessSettings = TrainerProcessSettings()
    tool_server: ToolServerSettings = ToolServerSettings()
    tool_servers: tuple[RemoteToolServer, ...] = ()
    """Where programs get their environments; none: from one server that the runtime starts."""

    scheduler: SchedulerSettings = SchedulerSettings()
    gateway: GatewaySettings = GatewaySettings()

    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)
    """Where `sostenuto train` and `eval` log scalars; the last two where they are installed."""

    trace: Path | None = None
    """Each finished program adds a line there, which `sostenuto bench` can replay."""

    @model_validator(mode="after")
    def _engines_are_told_apart(self) -> Self:
        for name in ("id", "url"):
            given = [value for entry in self.engines if (value := getattr(entry, name))]
            if twice := {value for value in given if given.count(value) > 1}:
                raise ValueError(f"engines: {name} {min(twice)} is there twice; give each engine its own")
        said = self.engine.model_fields_set
        if self.engines and "replicas" in said:
            raise ValueError("engine.replicas and engines both say which engines there are; give one of them")
        if self.engines and said and all(entry.kind != "embedded" for entry in self.engines):
            raise ValueError(
                f"engine.{min(said)} is of embedded engines, and engines names none; leave it out, or add an "
                "entry of kind 'embedded'"
            )
        return self

    @model_validator(mode="after")
    def _remote_servers_are_told_apart(self) -> Self:
        urls = [server.url for server in self.tool_servers]
        if twice := {url for url in urls if urls.count(url) > 1}:
            raise ValueError(f"tool_servers: {min(twice)} is there twice; give each server once")
        unused = sorted(self.tool_server.model_fields_set - {"lease_s"}) if urls else []
        if unused:
            raise ValueError(
                f"tool_server.{unused[0]} is of a server that the runtime starts, and tool_servers names "
                "others; give it to those, with `sostenuto tools serve`"
            )
        return self


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
    if kind not in {"extra_forbidden", "unexpected_keyword_argument"}:
        return f"{place}: {message.removeprefix('Value error, ')}"
    return f"unknown key {place!r}; {nearest(str(loc[-1]), list(_section(model, loc[:-1])))}"


def _section(model: type[BaseModel], loc: tuple[int | str, ...]) -> dict[str, Any]:
    """Keys, with their annotations, of the section that a path of keys leads to."""
    known = _keys(model) or {}
    for part in loc:
        if str(part) in known:
            annotation = known[str(part)]
            found = (_keys(candidate) for candidate in (annotation, *get_args(annotation)))
            known = {key: value for keys in found if keys is not None for key, value in keys.items()}
    return known


def _keys(section: object) -> dict[str, Any] | None:
    if not isinstance(section, type):
        return None
    if issubclass(section, BaseModel):
        return {name: field.annotation for name, field in section.model_fields.items()}
    kind = cast("Any", section)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return {field.name: hints[field.name] for field in fields(kind)}
    return None
