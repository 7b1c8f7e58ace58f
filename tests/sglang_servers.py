"""What the adapter's tests run against: a fake server, or a real one that SOSTENUTO_SGLANG_URL names.

Of a real one, SOSTENUTO_SGLANG_MODEL is the model's folder, with a tiny model of random weights.
"""

import json
import os
import zlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from fakes_sglang import FakeSGLang, serve
from fakes_sglang_core import VOCABULARY, log_softmax, logits, weights_of
from sostenuto.runtime.engines.folder import WeightFolders, write_safetensors
from sostenuto.runtime.engines.sglang.engine import Deadlines, Keys, SGLangEngine
from sostenuto.runtime.engines.sglang.transports import Disk
from sostenuto.runtime.engines.wire import GenerateRequest
from sostenuto.trainer.publication.manifest import Manifest, TensorEntry
from sostenuto.types import EngineId

NAME = EngineId("e0")
REAL_URL = os.environ.get("SOSTENUTO_SGLANG_URL", "")
BODIES = os.environ.get("SOSTENUTO_SGLANG_BODIES", "")
"""File to which all bodies are added that the adapter sent to fake servers."""
SOON = Deadlines(control_s=20.0, generate_s=60.0, update_s=30.0)


@dataclass
class Served:
    """A server, and what it must answer."""

    url: str
    folder: Path
    """The model that it was started with."""
    place: Path
    """For what the test writes."""
    fake: FakeSGLang | None

    def logprobs(
        self, token_ids: list[int], start: int, *, temperature: float = 1.0, folder: Path | None = None
    ) -> list[float]:
        """Of token_ids[start:], by the weights of `folder`."""
        if self.fake is None:
            return _true_logprobs(folder or self.folder, token_ids, start, temperature)
        weights = weights_of(folder or self.folder)
        rows = (
            log_softmax(logits(weights, token_ids[:i]) / temperature) for i in range(start, len(token_ids))
        )
        return [float(row[token]) for row, token in zip(rows, token_ids[start:], strict=True)]

    def publish(self, version: str, seed: int) -> Manifest:
        """Other weights for the same model."""
        if self.fake is not None:
            return raw_manifest(self.place / f"sent-{version}", version, seed)
        return _true_manifest(self.folder, self.place, version, seed)

    def written(self, version: str) -> Path:
        """The folder that the adapter writes for a version."""
        return self.place / "weights" / f"weights-{version}"


def adapter(served: Served, *, keys: Keys | None = None, deadlines: Deadlines | None = None) -> SGLangEngine:
    transport = Disk(WeightFolders(served.place / "weights", served.folder))
    allowed = deadlines or (SOON if served.fake else Deadlines(update_s=120.0))
    return SGLangEngine(
        NAME, served.url, model=served.folder, transport=transport, keys=keys or Keys(), deadlines=allowed
    )


@asynccontextmanager
async def serving(place: Path, **options: object) -> AsyncGenerator[Served]:
    """The real server where one is named, else a fake one with `options`."""
    if REAL_URL:
        yield Served(REAL_URL, Path(os.environ["SOSTENUTO_SGLANG_MODEL"]), place, None)
        return
    async with faking(place, **options) as served:
        yield served


@asynccontextmanager
async def faking(place: Path, **options: object) -> AsyncGenerator[Served]:
    folder = place / "model"
    make_fake_model(folder)
    fake = FakeSGLang(folder)
    for name, value in options.items():
        setattr(fake, name, value)
    async with serve(fake) as url:
        yield Served(url, folder, place, fake)
    if BODIES:
        _record(fake)


def _record(fake: FakeSGLang) -> None:
    with Path(BODIES).open("a") as file:
        file.writelines(f"{json.dumps(sent)}\n" for sent in fake.bodies)


def make_fake_model(folder: Path) -> None:
    folder.mkdir(parents=True)
    config = {"architectures": ["Fake"], "vocab_size": VOCABULARY, "num_experts_per_tok": 2}
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(raw_manifest(folder / "sent", "0.0", 0), folder / "model.safetensors")


def raw_manifest(path: Path, version: str, seed: int) -> Manifest:
    """Two tensors of bytes that depend on the seed."""
    parts = [f"{name} {seed}".encode().ljust(64) for name in ("a", "b")]
    path.write_bytes(b"".join(parts))
    entries = tuple(
        TensorEntry(
            name=f"t{i}", dtype="uint8", shape=(64,), offset=64 * i, nbytes=64, checksum=zlib.crc32(part)
        )
        for i, part in enumerate(parts)
    )
    return Manifest(version=version, path=str(path), nbytes=128, tensors=entries)


def request(name: str, token_ids: list[int], **options: object) -> GenerateRequest:
    fields = {"request_id": name, "program_id": name, "token_ids": token_ids, "max_new_tokens": 8, **options}
    return GenerateRequest.model_validate(fields)


def _true_logprobs(folder: Path, token_ids: list[int], start: int, temperature: float) -> list[float]:
    import torch
    from transformers import AutoModelForCausalLM

    module = cast("Any", AutoModelForCausalLM).from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        rows = (module(input_ids=torch.tensor([token_ids])).logits[0] / temperature).log_softmax(-1)
    return [float(rows[i - 1, token_ids[i]]) for i in range(start, len(token_ids))]


def _true_manifest(folder: Path, place: Path, version: str, seed: int) -> Manifest:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from engine_models import publish

    cast("Any", torch).manual_seed(seed)
    config = cast("Any", AutoConfig).from_pretrained(folder)
    module = cast("Any", AutoModelForCausalLM).from_config(config, dtype=torch.float32)
    return publish(place, module, version)
