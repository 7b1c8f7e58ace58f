# pyright: basic, reportMissingImports=false
"""What TRL's GRPOTrainer makes of a batch: run by a Python that has TRL, with the batch as JSON on stdin.

Writes, for each of the settings, the loss and the gradient of every weight into a safetensors file.
"""

import json
import sys
from typing import Any

import safetensors.torch
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer


def main() -> None:
    asked = json.load(sys.stdin)
    found: dict[str, torch.Tensor] = {}
    for name, settings in asked["settings"].items():
        trainer = _trainer(asked, settings)
        trainer.model.zero_grad()
        inputs = _inputs(asked["samples"])
        loss = trainer._compute_loss(trainer.model, inputs)  # noqa: SLF001 - the loss is what is compared
        loss.backward()
        found[f"{name}/loss"] = loss.detach().reshape(1)
        for weight, parameter in trainer.model.named_parameters():
            if parameter.grad is not None:
                found[f"{name}/{weight}"] = parameter.grad.clone()
    safetensors.torch.save_file(found, asked["results"])


def _trainer(asked: dict[str, Any], settings: dict[str, Any]) -> GRPOTrainer:
    folder = asked["model"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=f"{folder}/tokenizer.json", pad_token=asked["pad_token"]
    )
    count = len(asked["samples"])
    args = GRPOConfig(
        output_dir=asked["scratch"], per_device_train_batch_size=count, num_generations=count, beta=0.0,
        use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], disable_dropout=True,
        **settings,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=folder,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * count}),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def _inputs(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Prompts padded on the left, completions on the right, as the trainer has them."""
    prompts, completions = ([sample[key] for sample in samples] for key in ("prompt", "completion"))
    long, wide = max(map(len, prompts)), max(map(len, completions))

    def padded(rows: list[list[float]], width: int, *, left: bool = False) -> torch.Tensor:
        return torch.tensor([_row(row, width - len(row), left=left) for row in rows])

    mask = padded([[1] * len(row) for row in completions], wide)
    return {
        "prompt_ids": padded(prompts, long, left=True),
        "prompt_mask": padded([[1] * len(row) for row in prompts], long, left=True),
        "completion_ids": padded(completions, wide),
        "completion_mask": mask,
        "old_per_token_logps": padded([sample["logprobs"] for sample in samples], wide),
        "advantages": torch.tensor([sample["advantage"] for sample in samples]),
        "num_items_in_batch": mask.sum(),
    }


def _row(row: list[float], missing: int, *, left: bool) -> list[float]:
    padding = [type(row[0])(0)] * missing
    return padding + row if left else row + padding


if __name__ == "__main__":
    main()
