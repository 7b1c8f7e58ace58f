"""One side of the comparison, a process of its own: it trains on the batches that it is sent.

    python -m benchmarks.learning_sides ours|bare MODEL
    (environment of TRL) python benchmarks/learning_trl_side.py MODEL

Each line of stdin is a batch, `{"prompts": [[id]], "completions": [[id]], "advantages": [x]}`; each line of
stdout says what its step cost: processor seconds of the process, and the largest memory that it ever held.
One thread, float32, AdamW.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

Batch = dict[str, Any]
Step = Callable[[Batch], None]


def serve(step: Step, lines: Iterable[str], before_bytes: int) -> None:
    """Answer until stdin ends.  `before_bytes`: what the process held before it had a model."""
    print(json.dumps({"ready": True}), flush=True)
    for line in lines:
        started_s = time.process_time()
        step(json.loads(line))
        spent_s = time.process_time() - started_s
        print(json.dumps({"cpu_s": spent_s, "grown_bytes": largest_bytes() - before_bytes}), flush=True)


def largest_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def bare(folder: Path) -> Step:
    """Nothing but transformers: padded rows, cross-entropy of the completions, clipping, AdamW."""
    import transformers

    model = cast("Any", transformers).AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def step(batch: Batch) -> None:
        whole = [p + c for p, c in zip(batch["prompts"], batch["completions"], strict=True)]
        longest = max(map(len, whole))
        ids = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens in whole])
        labels = torch.full_like(ids, -100)
        for row, (prompt, tokens) in enumerate(zip(batch["prompts"], whole, strict=True)):
            labels[row, len(prompt) : len(tokens)] = ids[row, len(prompt) : len(tokens)]
        # Padding is to the right of all that counts, so attention needs no mask.
        model(input_ids=ids, labels=labels).loss.backward()
        cast("Any", torch.nn.utils).clip_grad_norm_(model.parameters(), 1.0)
        cast("Any", optimizer).step()
        optimizer.zero_grad()

    return step


def ours(folder: Path) -> Step:
    """The learner of this project, GRPO with its defaults."""
    from sostenuto.trainer.algorithms import GRPO
    from sostenuto.trainer.learner import Learner
    from sostenuto.trainer.model import open_policy
    from sostenuto.trainer.samples import Sample
    from sostenuto.trainer.settings import LearnerSettings, Schedule
    from sostenuto.types import Version

    settings = LearnerSettings(schedule=Schedule(learning_rate=1e-6))
    learner = Learner(open_policy(folder, settings, seed=0), settings, seed=0, version=Version(0, 0))

    def sample(row: int, prompt: list[int], completion: list[int], advantage: float) -> Sample:
        count = len(prompt) + len(completion)
        return Sample(
            np.array(prompt + completion, dtype=np.int32),
            np.arange(count) >= len(prompt),
            np.full(count, -10.0, dtype=np.float32),
            np.full(count, advantage, dtype=np.float32),
            Version(0, 0),
            f"p{row}",
        )

    def step(batch: Batch) -> None:
        rows = zip(batch["prompts"], batch["completions"], batch["advantages"], strict=True)
        report = learner.learn([sample(row, *parts) for row, parts in enumerate(rows)], GRPO())
        if report.refused:
            raise RuntimeError(report.refused)

    return step


def main() -> None:
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"

    before = largest_bytes()
    side = {"ours": ours, "bare": bare}[sys.argv[1]]
    serve(side(Path(sys.argv[2])), sys.stdin, before)


if __name__ == "__main__":
    main()
