"""What the runs against real engines have in common: suites of tests, a model, and their figures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import anyio

from sostenuto.runtime.quickstart.folder import ModelShape, write_folder
from sostenuto.runtime.quickstart.tokenizer import tokenizer_material, train_tokenizer

CONTEXT_TOKENS = 1024
_HERE = Path(__file__).parent.parent
SMALL = ModelShape(layers=2, hidden=256, heads=4, feed_forward=512, context_tokens=CONTEXT_TOKENS)
"""vLLM on CPU has no attention for heads of 16."""
SLOW = ModelShape(layers=12, hidden=512, heads=8, feed_forward=1536, context_tokens=CONTEXT_TOKENS)
"""Long turns take it seconds on a fast core, too: time to pause and to update while they run."""


def make_model(folder: Path, seed: int, shape: ModelShape = SMALL) -> Path:
    """The quickstart's model in another shape, with random weights and an output layer of its own.

    vLLM on CPU takes no updates of one that is tied to the embedding.
    """
    write_folder(folder, train_tokenizer(tokenizer_material(1)), shape)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    command = [sys.executable, "-m", "sostenuto.trainer.build", "--folder", str(folder), "--seed", str(seed)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return folder


async def passes(environment: dict[str, str], *arguments: str) -> bool:
    """Whether pytest with these arguments does; what it says goes to standard error."""
    command = [sys.executable, "-m", "pytest", "-q", "-rs", *arguments]
    process = await anyio.run_process(
        command, check=False, cwd=_HERE, env=os.environ | environment, stdout=sys.stderr, stderr=sys.stderr
    )
    return process.returncode == 0


async def job_passes(kind: str, url: str, model: Path, place: Path) -> bool:
    """A job and programs of several turns on the engine; prints their figures."""
    figures = place / "figures.jsonl"
    told = {"kind": kind, "url": url, "model": str(model)}
    environment = {"SOSTENUTO_REAL_ENGINE": json.dumps(told), "SOSTENUTO_FIGURES": str(figures)}
    passed = await passes(environment, "tests/test_engines_real.py")
    if await anyio.Path(figures).exists():
        print(await anyio.Path(figures).read_text(), end="", flush=True)
    return passed
