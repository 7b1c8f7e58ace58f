"""The servers that the contract is tested against: the fake one, and a real one where it is named.

A real one is told by SOSTENUTO_TEST_VLLM: a JSON object with `url`, `key`, `model` (the folder that it
serves), `other` (a folder of the same model with other weights) and `updates` (a folder that it reads).
"""

import json
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from fakes_vllm import fake_vllm
from fakes_vllm_model import make_fake_folder, reference
from sostenuto.runtime.engines.vllm.engine import Deadlines, VllmEngine
from sostenuto.runtime.engines.vllm.transports import Disk
from sostenuto.runtime.engines.wire import GenerateRequest
from sostenuto.types import EngineId

VARIABLE = "SOSTENUTO_TEST_VLLM"
NO_SERVER = f"{VARIABLE} names no running vLLM; `make test-vllm` starts one"

Logprobs = Callable[[Path, list[int], int], list[float]]


@dataclass(frozen=True)
class Target:
    """A server under test."""

    url: str
    key: str
    model: Path
    other: Path
    updates: Path
    logprobs: Logprobs
    """Of token_ids[start:] under the weights in a folder, from elsewhere than the server."""
    block: int
    """Tokens of a block of its prefix cache."""
    slack: float
    """By how much log-probabilities may differ."""
    text: Callable[[list[int]], str]
    """Of tokens."""
    long: int
    """Tokens of a turn that takes seconds."""

    def engine(self) -> VllmEngine:
        return VllmEngine(
            EngineId("e0"),
            self.url,
            model=self.model,
            transport=Disk(self.updates, self.model),
            api_key=self.key,
            deadlines=Deadlines(control_s=60, update_s=300),
        )


@asynccontextmanager
async def fake_target(place: Path) -> AsyncGenerator[Target]:
    model, other = (make_fake_folder(place / name, seed) for seed, name in enumerate(("model", "other")))
    async with fake_vllm(model, key="key") as (fake, url):
        yield Target(
            url, "key", model, other, place / "updates", reference, fake.cache.block, 1e-6, _numbers, 400
        )


@asynccontextmanager
async def real_target() -> AsyncGenerator[Target]:
    if VARIABLE not in os.environ:
        pytest.skip(NO_SERVER)
    said = json.loads(os.environ[VARIABLE])
    model, other, updates = (Path(said[name]) for name in ("model", "other", "updates"))
    tokenizer: Any = cast("Any", Tokenizer).from_file(str(model / "tokenizer.json"))
    yield Target(
        said["url"], said["key"], model, other, updates, _from_torch, 32, 2e-3, tokenizer.decode, 900
    )


def _numbers(token_ids: list[int]) -> str:
    return "".join(f" {id_}" for id_ in token_ids).strip()


def _from_torch(folder: Path, token_ids: list[int], start: int) -> list[float]:
    with torch.no_grad():
        logits = _module(folder)(input_ids=torch.tensor([token_ids])).logits[0].float()
    logprobs = logits.log_softmax(-1)
    return [float(logprobs[at - 1, token_ids[at]]) for at in range(start, len(token_ids))]


@cache
def _module(folder: Path) -> Any:  # noqa: ANN401 - transformers' own types say as much
    return cast("Any", AutoModelForCausalLM).from_pretrained(folder, dtype=torch.float32)


def request(name: str, tokens: int = 24, **fields: object) -> GenerateRequest:
    """`tokens`: of the context, which begins with the length of its name."""
    context = [3 + len(name), *(5 + (7 * at) % 50 for at in range(tokens - 1))]
    asked = {"request_id": name, "program_id": name, "token_ids": context, "max_new_tokens": 8, **fields}
    return GenerateRequest.model_validate(asked)


async def until_idle(engine: VllmEngine) -> None:
    while (await engine.load()).running:  # noqa: ASYNC110 - the change is in another process
        await anyio.sleep(0.05)
