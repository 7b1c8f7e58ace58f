"""A real vLLM on CPU with one thread and a pool of a chosen size."""

import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO

import aiohttp
import anyio
from anyio.abc import Process

from benchmarks.vllm_model import CONTEXT_TOKENS

BLOCK_TOKENS = 32
_START_WITHIN_S = 900
_STOP_WITHIN_S = 30
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}


@asynccontextmanager
async def serve(
    vllm: Path,
    model: Path,
    *,
    blocks: int,
    context_tokens: int = CONTEXT_TOKENS,
    dtype: str = "float32",
    flags: Sequence[str] = (),
    log: IO[str] | None = None,
) -> AsyncGenerator[str]:
    """Start it, give its address once it is healthy, and end it with everything that it started.

    `log`: where it writes; None: our standard error.
    """
    port = _free_port()
    command = [
        # Through its Python: an environment that was moved has commands that name the old place.
        str(vllm.with_name("python")), str(vllm), "serve", str(model), "--served-model-name", "truth",
        "--host", "127.0.0.1", "--port", str(port),
        "--dtype", dtype, "--enforce-eager", "--max-model-len", str(context_tokens),
        "--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(blocks),
        "--max-num-seqs", "32", "--max-num-batched-tokens", "1024",
        "--enable-prefix-caching", "--enable-prompt-tokens-details", *flags,
    ]  # fmt: skip
    process = await anyio.open_process(
        command, env=os.environ | _ENVIRONMENT,
        stdout=log or sys.stderr, stderr=log or sys.stderr, start_new_session=True,
    )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        with anyio.fail_after(_START_WITHIN_S):
            await _healthy(url, process)
        yield url
    finally:
        with anyio.CancelScope(shield=True):
            await _stop(process)


async def _healthy(url: str, process: Process) -> None:
    async with aiohttp.ClientSession() as session:
        while process.returncode is None:
            try:
                async with session.get(f"{url}/health") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await anyio.sleep(1)
    raise RuntimeError(f"vLLM ended with {process.returncode} before it was ready")


async def _stop(process: Process) -> None:
    if process.returncode is None:
        process.terminate()
        with anyio.move_on_after(_STOP_WITHIN_S):
            await process.wait()
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    await process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
