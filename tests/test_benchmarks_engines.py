"""What the engines' benchmarks compare is the same on both sides."""

import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream
from benchmarks.engines_adapters import PROMPT_TOKENS, SAMPLED_TOKENS, standing


@pytest.mark.parametrize(("kind", "prompt", "limit"), [
    ("sglang", "input_ids", "max_new_tokens"), ("vllm", "token_ids", "max_tokens"),
])  # fmt: skip
async def test_the_raw_client_sends_what_the_adapter_sends(kind: str, prompt: str, limit: str):
    bodies: list[dict[str, Any]] = []
    async with standing(kind, 0.0) as stand, aiohttp.ClientSession() as session:
        for call in (stand.ours, stand.raw):
            await call("one")
            async with session.get(f"{stand.url}/asked") as answer:
                bodies.append(await answer.json())
    ours, raw = bodies
    assert {name for name in ours | raw if ours.get(name) != raw.get(name)} == (
        {"rid", "session_id"} if kind == "sglang" else {"request_id"}
    )
    assert len(raw[prompt]) == PROMPT_TOKENS
    assert raw["sampling_params"][limit] == SAMPLED_TOKENS


_UNWINDS = """
import anyio
from benchmarks.telling import end_in_order

async def wait():
    try:
        print("ready", flush=True)
        await anyio.sleep_forever()
    finally:
        with anyio.CancelScope(shield=True):
            print("ending", flush=True)
            await anyio.sleep(0.5)
            print("ended", flush=True)

end_in_order()
anyio.run(wait)
"""


async def test_a_measurement_that_is_told_to_end_ends_what_it_has_started():
    command, root = [sys.executable, "-c", _UNWINDS], Path(__file__).parent.parent
    async with await anyio.open_process(command, cwd=root, stderr=None) as process:
        assert process.stdout is not None
        said = BufferedByteReceiveStream(process.stdout)
        assert await said.receive_until(b"\n", 16) == b"ready"
        process.send_signal(signal.SIGTERM)
        assert await said.receive_until(b"\n", 16) == b"ending"
        process.send_signal(signal.SIGTERM)
        assert await said.receive_until(b"\n", 16) == b"ended"
        assert await process.wait() == 128 + signal.SIGTERM
