"""`sostenuto tools`: a tool server of its own, for runtimes on this machine or others."""

import os
import sys
from pathlib import Path
from typing import Annotated

import anyio
import typer

from sostenuto.errors import ConfigError
from sostenuto.runtime.config import ToolServeSettings, load_toml, parse
from sostenuto.runtime.tool_process import import_paths_here, serve_tools
from sostenuto.tools.config import ServerConfig

_SHORTEST_TOKEN = 16

tools = typer.Typer(no_args_is_help=True, help="Serve tools to runtimes.")


@tools.command()
def serve(  # noqa: PLR0913 - the options of a command
    *,
    config: Annotated[Path | None, typer.Option(help="TOML file of the server.")] = None,
    host: Annotated[str | None, typer.Option(help="Where it listens; 127.0.0.1 if not given.")] = None,
    port: Annotated[int | None, typer.Option(help="0, or not given: a free one.")] = None,
    token_env: Annotated[
        str | None, typer.Option(help="Variable with the token; SOSTENUTO_TOOL_TOKEN if not given.")
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help="File with the token, instead.")] = None,
    tls_certificate: Annotated[Path | None, typer.Option(help="PEM file.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file.")] = None,
    sandbox: Annotated[str | None, typer.Option(help="Backend; the first that works if not given.")] = None,
    sandbox_root: Annotated[Path | None, typer.Option(help="Folder for workspaces.")] = None,
    state_dir: Annotated[Path | None, typer.Option(help="Folder for what outlives the process.")] = None,
    unsafe: Annotated[
        bool, typer.Option("--unsafe", help="Run tools as plain processes, isolated from nothing.")
    ] = False,
) -> None:
    """Serve until SIGTERM or Ctrl-C; print the URL first.  Options go before what the file says."""
    given = {name: value for name, value in locals().items() if name != "config" and value is not None}
    settings = load_toml(config, ToolServeSettings) if config else ToolServeSettings()
    if not unsafe:
        del given["unsafe"]
    settings = parse(settings.model_dump(exclude_unset=True) | given, ToolServeSettings, where="tools serve")
    anyio.run(serve_tools, server_config(settings), settings, import_paths_here(), _say)


def server_config(settings: ToolServeSettings) -> ServerConfig:
    """What the server is told; ConfigError where its token is missing or too short."""
    return ServerConfig(
        host=settings.host,
        port=settings.port,
        token=_token(settings),
        tls_certificate=settings.tls_certificate,
        tls_key=settings.tls_key,
        insecure=settings.insecure,
        lease_s=settings.lease_s,
        secret_names=settings.secrets,
        sandbox_root=str(settings.sandbox_root.absolute()),
        state_dir=settings.state_dir.absolute(),
        cpus=settings.cpus,
        memory_bytes=settings.memory_bytes,
        sandbox_memory_bytes=settings.sandbox_memory_bytes,
        warm=settings.warm,
        layer_bytes=settings.layer_bytes,
        snapshot_idle_s=settings.snapshot_idle_s,
    )


def _token(settings: ToolServeSettings) -> str:
    file = settings.token_file
    if file is None:
        token = os.environ.get(settings.token_env, "")
        where = f"token_env: the environment variable {settings.token_env}"
    else:
        where = f"token_file: {file}"
        try:
            token = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where} cannot be read: {error}; give a file with the token alone") from error
    if len(token) < _SHORTEST_TOKEN:
        raise ConfigError(
            f"{where} holds no token of {_SHORTEST_TOKEN} characters or more; make one, for example with "
            "`openssl rand -hex 24`"
        )
    return token


def _say(url: str, isolation: str) -> None:
    del isolation  # /v1/limits says it
    sys.stdout.write(url + "\n")
    sys.stdout.flush()
