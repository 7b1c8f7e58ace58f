# pyright: basic, reportMissingImports=false
"""TRL's side of the comparison, run by the Python of its environment: the protocol of `learning_sides`.

A step is what `GRPOTrainer` does with a batch that was generated: its loss, backward, clipping, AdamW.
"""

import json
import os
import resource
import sys
import tempfile
import time
from typing import Any


def trainer_of(folder: str) -> Any:  # noqa: ANN401 - of a library without types, in another environment
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="sostenuto-trl-"),
        per_device_train_batch_size=8, num_generations=8, gradient_accumulation_steps=1, max_steps=100,
        use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], learning_rate=1e-6,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 8}),
        processing_class=tokenizer,
    )
    trainer.create_optimizer()
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def inputs_of(batch: dict[str, Any]) -> dict[str, Any]:
    """Prompts padded on the left, completions on the right, as TRL generates them."""
    import torch

    prompts, completions = batch["prompts"], batch["completions"]
    before, after = max(map(len, prompts)), max(map(len, completions))
    prompt_ids = [[0] * (before - len(row)) + row for row in prompts]
    completion_ids = [row + [0] * (after - len(row)) for row in completions]
    return {
        "prompt_ids": torch.tensor(prompt_ids),
        "prompt_mask": torch.tensor([[0] * (before - len(row)) + [1] * len(row) for row in prompts]),
        "completion_ids": torch.tensor(completion_ids),
        "completion_mask": torch.tensor([[1] * len(row) + [0] * (after - len(row)) for row in completions]),
        "advantages": torch.tensor(batch["advantages"]),
        "num_items_in_batch": torch.tensor(float(sum(map(len, completions)))),
    }


def main() -> None:
    import torch

    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    trainer = trainer_of(sys.argv[1])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        started_s = time.process_time()
        loss = trainer.compute_loss(trainer.model, inputs_of(json.loads(line)))
        trainer.accelerator.backward(loss)
        trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
        print(json.dumps({"cpu_s": time.process_time() - started_s, "grown_bytes": held}), flush=True)


if __name__ == "__main__":
    main()
