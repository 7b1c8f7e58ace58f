"""The vLLM adapter against a real vLLM server on CPU: what `make test-vllm` runs.

    python -m benchmarks.vllm_adapter

1. The adapter's contract tests, on the real server.
2. Programs of several turns, and a job that learns and publishes its weights, on the real server.
Ends with status 1 when something of it fails.  Figures are printed as they come, one JSON object a line.
"""

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

import anyio.to_thread

from benchmarks.engine_suites import CONTEXT_TOKENS, SLOW, job_passes, make_model, passes
from benchmarks.figure import Figure
from benchmarks.telling import end_in_order
from benchmarks.vllm_environment import vllm_command
from benchmarks.vllm_server import serve

_BLOCKS = 512
_FLAGS = (
    "--scheduling-policy", "priority", "--enable-scale-out", "--logprobs-mode", "processed_logprobs",
    "--no-enable-chunked-prefill",
)  # fmt: skip
_CONTRACT = "tests/test_vllm_adapter.py"


def main() -> None:
    end_in_order()
    vllm = vllm_command()
    with tempfile.TemporaryDirectory() as folder:
        failed = asyncio.run(_measure(vllm, Path(folder)))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
        sys.exit(1)


async def _measure(vllm: Path, place: Path) -> list[str]:
    """The parts that failed."""
    failed: list[str] = []
    model, other = [
        await anyio.to_thread.run_sync(make_model, place / name, seed, SLOW)
        for seed, name in enumerate(("model", "other"))
    ]
    began_s = time.monotonic()
    async with serve(vllm, model, blocks=_BLOCKS, context_tokens=CONTEXT_TOKENS, flags=_FLAGS) as url:
        print(Figure("vllm on CPU: start of the server", time.monotonic() - began_s, "s").line(), flush=True)
        if not await job_passes("vllm", url, model, place):
            failed.append("a job and programs on the real server")
        told = {"url": url, "key": "", "model": model, "other": other, "updates": place / "updates"}
        server = {"SOSTENUTO_TEST_VLLM": json.dumps(told, default=str)}
        if not await passes(server, "--timeout", "600", "-k", "real", _CONTRACT):
            failed.append("contract tests on the real server")
    return failed


if __name__ == "__main__":
    main()
