"""What a delta of real learning takes: steps of SmolLM2-135M in bfloat16, as examples/smollm2.toml has them.

Each step is published; the bytes of a changed element are those of the whole file, header included, and what
an engine makes of the delta is compared byte for byte with what the trainer has.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import anyio
import numpy as np
import safetensors.torch
from torch import Tensor

from benchmarks.figure import Tell
from benchmarks.publication_transfer import smollm2
from sostenuto.trainer.client import TrainerClient
from sostenuto.trainer.publication.chain import contents
from sostenuto.trainer.publication.manifest import Manifest
from sostenuto.trainer.samples import Sample, demonstration
from sostenuto.trainer.settings import LearnerSettings
from sostenuto.trainer.tensors import as_bytes
from sostenuto.types import Version

_RATE = 1.5e-5
_STEPS = 3


def measure_delta(tell: Tell, *, quick: bool) -> None:
    folder = smollm2()
    if folder is None or quick:
        print("# delta: needs SmolLM2-135M, and a minute", file=sys.stderr, flush=True)
        return
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as place:
        anyio.run(_measure, tell, folder, Path(place))


async def _measure(tell: Tell, folder: Path, place: Path) -> None:
    settings = LearnerSettings.model_validate(
        {
            "dtype": "bfloat16",
            "schedule": {"learning_rate": _RATE},
            "publication": {"transport": "disk_delta", "directory": str(place)},
        }
    )
    async with TrainerClient() as trainer:
        await trainer.open(folder, settings, seed=1, version=Version(0, 0))
        full = await trainer.publish(Version(0, 1))
        elements = sum(entry.nbytes // 2 for entry in full.tensors)
        shares: list[float] = []
        took_s: list[float] = []
        sizes: list[float] = []
        for step in range(_STEPS):
            await trainer.fit([_sample(step, number) for number in range(8)])
            began_s = time.perf_counter()
            manifest = await trainer.publish(Version(0, 2 + step))
            took_s.append(time.perf_counter() - began_s)
            assert manifest.delta is not None, "it was written in full"
            shares.append(manifest.delta.changed / elements)
            sizes.append((await anyio.Path(manifest.path).stat()).st_size / manifest.delta.changed)
            saved = await trainer.save(place / "saved", Version(0, 2 + step))
            tell(f"publication_delta_wrong_bytes_step_{step + 1}", _wrong(manifest, saved), "bytes", "== 0")
    tell("publication_delta_changed_share", max(shares), "")
    tell("publication_delta_bytes_per_changed_element", max(sizes), "bytes", "<= 6")
    tell("publication_delta_over_full_bytes", max(shares) * max(sizes) / 2, "")
    tell("publication_delta_publish_s", min(took_s), "s")


def _sample(step: int, number: int) -> Sample:
    random = np.random.default_rng((step, number))
    token_ids = random.integers(0, 40_000, 64).tolist()
    return demonstration(token_ids, [False] * 16 + [True] * 48)


def _wrong(manifest: Manifest, saved: Path) -> int:
    """Bytes of tensors that an engine would have otherwise than the checkpoint has them."""
    wrong = 0
    held: dict[str, Tensor] = cast("Any", safetensors.torch).load_file(saved / "model.safetensors")
    for entry, content in contents(manifest):
        wrong += int((as_bytes(held[entry.name]) != content).sum())
    return wrong
