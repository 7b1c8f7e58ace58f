"""What the engines' benchmarks compare is the same on both sides."""

from typing import Any

import aiohttp
import pytest
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
