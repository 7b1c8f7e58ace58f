"""`python -m sostenuto.runtime.engines.embedded`: one engine process.

Standard output carries one JSON line: {"ready": Capabilities}, or a refusal and exit status 2.
The process ends at SIGTERM, at SIGINT, and with --until-stdin-closes when its parent is gone.
"""

import argparse
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import psutil

from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.runtime.engines.embedded.settings import EmbeddedSettings
from sostenuto.types import Version

if TYPE_CHECKING:
    from sostenuto.runtime.engines.embedded.core import Core
    from sostenuto.runtime.engines.embedded.lanes import KvShape
    from sostenuto.runtime.engines.embedded.lower import LowerTier
    from sostenuto.runtime.engines.embedded.worker import Worker

_SHUTDOWN_S = 0.2
_POOL_SLACK = 1.5
"""Of the pool's tokens: rows are wider than what lies in them."""


def main() -> int:
    settings, until_stdin_closes = _arguments()
    # Threads that spin while they wait starve every tool process on the machine; read when torch loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("OMP_NUM_THREADS", str(settings.threads))
    try:
        anyio.run(_serve, settings, until_stdin_closes)
    except Refusal as refusal:
        _say({**refusal.body()})
        return 2
    return 0


def _arguments() -> tuple[EmbeddedSettings, bool]:
    parser = argparse.ArgumentParser(prog="sostenuto.runtime.engines.embedded", allow_abbrev=False)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--kv-tokens", type=_positive, required=True)
    parser.add_argument("--concurrency", type=_positive, required=True)
    parser.add_argument("--threads", type=_positive, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--quantization", choices=("int8", "fp8", "nvfp4"))
    parser.add_argument("--version", default="0.0")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--speculation", choices=("prompt", "draft", "mtp"))
    parser.add_argument("--draft-model", type=Path)
    parser.add_argument("--draft-tokens", type=_positive, default=8)
    parser.add_argument("--lower-tokens", type=int, default=0)
    parser.add_argument("--lower-folder", type=Path, default=None)
    parser.add_argument("--until-stdin-closes", action="store_true")
    given = vars(parser.parse_args())
    until_stdin_closes = bool(given.pop("until_stdin_closes"))
    return EmbeddedSettings(**given), until_stdin_closes


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


async def _serve(settings: EmbeddedSettings, until_stdin_closes: bool) -> None:
    # torch is loaded after the thread settings are in the environment
    from sostenuto.runtime.engines.embedded.server import bind

    listener = bind(settings.socket)
    try:
        await _run(settings, listener, until_stdin_closes)
    finally:
        listener.close()
        settings.socket.unlink(missing_ok=True)


async def _run(settings: EmbeddedSettings, listener: socket.socket, until_stdin_closes: bool) -> None:
    from aiohttp import web

    from sostenuto.runtime.engines.embedded.server import Server
    from sostenuto.runtime.engines.embedded.worker import Worker

    core = _core(settings)
    worker = Worker(core, threads=settings.threads)
    runner = web.AppRunner(
        Server(worker).application(), handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_S
    )
    await runner.setup()
    await web.SockSite(runner, listener).start()
    _say({"ready": core.capabilities().model_dump(mode="json")})
    async with anyio.create_task_group() as group:
        group.start_soon(_stop_at_signal, worker)
        if until_stdin_closes:
            group.start_soon(_stop_when_stdin_closes, worker)
        try:
            await anyio.to_thread.run_sync(worker.run)
        finally:
            with anyio.CancelScope(shield=True):
                await runner.cleanup()
        group.cancel_scope.cancel()


async def _stop_at_signal(worker: "Worker") -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            worker.stop()


async def _stop_when_stdin_closes(worker: "Worker") -> None:
    """The parent holds the other end of the pipe, and loses it however it ends."""
    while True:
        await anyio.wait_readable(sys.stdin.fileno())
        if not os.read(sys.stdin.fileno(), 4096):
            worker.stop()
            return


def _core(settings: EmbeddedSettings) -> "Core":
    import torch

    from sostenuto.runtime.engines.embedded.core import Core
    from sostenuto.runtime.engines.embedded.model import load
    from sostenuto.runtime.engines.embedded.speculation.build import check_speculation, drafting_for

    torch.set_num_threads(settings.threads)
    version = _version(settings.version)
    check_speculation(settings)
    model = load(
        settings.model, dtype=settings.dtype, device=settings.device, quantization=settings.quantization
    )
    drafting = drafting_for(model, settings)
    token_bytes = drafting.model.shape.token_bytes + drafting.token_bytes
    _check_memory(settings.kv_tokens, token_bytes, settings.device)
    return Core(
        drafting.model, version=version, kv_tokens=settings.kv_tokens, concurrency=settings.concurrency,
        threads=settings.threads, lower=_lower(settings, drafting.model.shape),
        speculator=drafting.speculator(),
    )  # fmt: skip


def _lower(settings: EmbeddedSettings, shape: "KvShape") -> "LowerTier | None":
    from sostenuto.runtime.engines.embedded.lower import LowerTier

    if not settings.lower_tokens:
        return None
    return LowerTier(shape, settings.lower_tokens, settings.lower_folder or settings.socket.parent)


def _version(text: str) -> Version:
    try:
        return Version.parse(text)
    except ValueError as exc:
        raise Refusal(400, "version", f"--version {text!r} is not EPOCH.NUMBER", "for example 0.0") from exc


def _check_memory(kv_tokens: int, token_bytes: int, device: str) -> None:
    needed = int(kv_tokens * token_bytes * _POOL_SLACK)
    available = _available_bytes(device)
    if needed > available:
        message = (
            f"--kv-tokens {kv_tokens} needs {needed >> 20} MiB ({token_bytes} bytes a token and rows wider "
            f"than their content), {available >> 20} MiB are free"
        )
        fits = int(available / (token_bytes * _POOL_SLACK))
        raise Refusal(400, "memory", message, f"at most --kv-tokens {fits} fits")


def _available_bytes(device: str) -> int:
    if device.startswith("cuda"):
        import torch

        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def _say(line: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
