"""A model folder with random weights: what an engine computes costs the same whatever it says."""

import subprocess
import sys
from pathlib import Path

import anyio
from anyio import to_thread
from tokenizers import Tokenizer, models

from sostenuto.errors import TrainerError
from sostenuto.runtime.quickstart.folder import write_folder
from sostenuto.runtime.quickstart.recipe import ModelShape

SHAPE = ModelShape(layers=4, hidden=256, heads=4, feed_forward=768, context_tokens=2048)
_VOCABULARY = 512
_FIRST_CHARACTER = 0x4E00


async def random_model(folder: Path, shape: ModelShape = SHAPE, tokenizer: Tokenizer | None = None) -> Path:
    """Write a model of this shape into `folder`, the same each time; without a tokenizer, of symbols."""
    characters = {chr(_FIRST_CHARACTER + number): number for number in range(_VOCABULARY)}
    tokenizer = tokenizer or Tokenizer(models.BPE(characters, []))
    await to_thread.run_sync(write_folder, folder, tokenizer, shape)
    command = [sys.executable, "-m", "sostenuto.trainer.build", "--folder", str(folder), "--seed", "0"]
    done = await anyio.run_process(command, check=False, stderr=subprocess.PIPE)
    if done.returncode:
        raise TrainerError(f"the model was not built: {done.stderr.decode(errors='replace')}")
    return folder
