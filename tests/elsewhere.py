"""Fake servers as engines that run elsewhere, and what jobs need beside them."""

import shutil
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import anyio
import numpy as np
import safetensors.numpy

import fakes_sglang
import fakes_sglang_core
from fakes_sglang import FakeSGLang
from fakes_training import Parity, numbers
from fakes_vllm import FakeVllm, fake_vllm
from fakes_vllm_model import weights_of
from real_jobs import build_weights
from scripted import TINY, write_tokenizer_folder
from sostenuto.runtime.config import EngineEntry
from sostenuto.runtime.engine_view import EngineView
from sostenuto.runtime.jobs.job import EvalJob
from sostenuto.runtime.runtime import Runtime
from sostenuto.types import Limits

LIMITS = Limits(turns=2, turn_tokens=6)


@dataclass
class Elsewhere:
    """A fake server."""

    kind: str
    url: str
    fake: FakeVllm | FakeSGLang

    def entry(self, **fields: object) -> EngineEntry:
        return EngineEntry.model_validate({"kind": self.kind, "url": self.url, **fields})

    @property
    def label(self) -> str:
        return self.fake.version if isinstance(self.fake, FakeVllm) else self.fake.core.version

    @property
    def weights(self) -> int:
        return self.fake.weights if isinstance(self.fake, FakeVllm) else self.fake.core.weights

    def weights_in(self, folder: Path) -> int:
        """As the fake sums them up."""
        if isinstance(self.fake, FakeVllm):
            return weights_of(folder)
        return fakes_sglang_core.weights_of(folder)

    @property
    def samples(self) -> int:
        """Requests for tokens that jobs have sent; those that try it out are shorter."""
        fake = self.fake
        bodies = [body for _, body in fake.bodies] if isinstance(fake, FakeSGLang) else fake.bodies
        prompts = ((body or {}).get("input_ids") or (body or {}).get("token_ids") or () for body in bodies)
        return sum(len(prompt) > 3 for prompt in prompts)


Serve = Callable[..., AbstractAsyncContextManager[Elsewhere]]


@asynccontextmanager
async def vllm(folder: Path, **settings: object) -> AsyncGenerator[Elsewhere]:
    async with fake_vllm(folder, **settings) as (fake, url):
        yield Elsewhere("vllm", url, fake)


@asynccontextmanager
async def sglang(folder: Path, **settings: object) -> AsyncGenerator[Elsewhere]:
    fake = FakeSGLang(folder, version="default")
    for name, value in settings.items():
        setattr(fake, name, value)
    async with fakes_sglang.serve(fake) as url:
        yield Elsewhere("sglang", url, fake)


def build_model(folder: Path) -> Path:
    write_tokenizer_folder(folder, TINY)
    return build_weights(folder)


def with_other_weights(model: Path, folder: Path) -> Path:
    """A copy of the model with other weights."""
    shutil.copytree(model, folder)
    library = cast("Any", safetensors.numpy)
    tensors = library.load_file(folder / "model.safetensors")
    doubled = {name: np.multiply(tensor, 2) for name, tensor in tensors.items()}
    library.save_file(doubled, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def evaluating(model: Path, *, programs: int = 4) -> EvalJob:
    return EvalJob(env=Parity, model=model, tasks=numbers(programs), limits=LIMITS)


async def until(runtime: Runtime, holds: Callable[[dict[str, EngineView]], bool]) -> dict[str, EngineView]:
    """The engines by name, once they are as they should be."""
    views: dict[str, EngineView] = {}
    with anyio.fail_after(60):
        while not views or not holds(views):
            await anyio.sleep(0.05)
            views = {view.id: view for view in await runtime.engines()}
    return views
