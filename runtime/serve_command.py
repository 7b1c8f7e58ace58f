"""`sostenuto serve`: a model behind a gateway, for agents that only know a base URL."""

import signal
import sys
from pathlib import Path
from typing import Annotated

import anyio
import typer

from sostenuto.runtime.config import RuntimeConfig, load_toml, parse
from sostenuto.runtime.jobs.serve import ServeJob
from sostenuto.runtime.models import resolve_model
from sostenuto.runtime.runtime import Runtime


def serve(
    model: Annotated[str, typer.Argument(help="A folder, package:NAME or hub:ORG/NAME.")],
    *,
    config: Annotated[Path | None, typer.Option(help="TOML file: directory, engine, gateway, ...")] = None,
    directory: Annotated[Path | None, typer.Option(help="Run directory; runs/serve if not given.")] = None,
    host: Annotated[str | None, typer.Option(help="Where it listens; 127.0.0.1 if not given.")] = None,
    port: Annotated[int | None, typer.Option(help="0, or not given: a free one.")] = None,
    name: Annotated[str | None, typer.Option(help="The model's name for clients; its folder's.")] = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C; print the base URL first.  Options go before what the file says."""
    settings = load_toml(config, RuntimeConfig) if config else RuntimeConfig(directory=Path("runs/serve"))
    given = settings.model_dump(exclude_unset=True)
    options = {"host": host, "port": port, "model": name}
    gateway = given.get("gateway", {}) | {key: value for key, value in options.items() if value is not None}
    if directory is not None:
        given["directory"] = directory
    parsed = parse(given | {"gateway": gateway}, RuntimeConfig, where="serve")
    anyio.run(_serve, model, parsed)


async def _serve(model: str, config: RuntimeConfig) -> None:
    async with anyio.create_task_group() as group:

        async def watch() -> None:
            with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                async for _ in signals:
                    group.cancel_scope.cancel()

        group.start_soon(watch)
        job = ServeJob(model=await resolve_model(model))
        async with Runtime(config) as runtime, runtime.serve(job) as gateway:
            sys.stdout.write(f"{gateway.url}/v1\n")
            sys.stdout.flush()
            await anyio.sleep_forever()
