"""TRL's GRPO trainer on groups of the runtime: `python examples/trl_trainer.py`.

Needs an environment with `pip install trl` beside this project; written for TRL 1.16.  TRL is synchronous
and has a thread of its own: it asks for groups, and publishes its weights after every optimizer step.  Tools,
several turns, sandboxes and staleness are the runtime's; loss and optimizer are TRL's.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
from anyio import from_thread, to_thread
from datasets import Dataset
from own_trainer import Digits, Wish
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import sostenuto as so
from sostenuto.runtime.quickstart.job import fresh_model
from sostenuto.runtime.quickstart.recipe import ModelShape

GROUP_SIZE, GROUPS_PER_STEP, STEPS = 8, 4, 30
LIMITS = so.Limits(turns=1, turn_tokens=8)


def as_trl(group: so.Group) -> dict[str, list[Any]]:
    """The exact tokens: prompt, what follows it, which of that the policy has sampled, and how probably."""
    rows: dict[str, list[Any]] = {key: [] for key in ("prompt_ids", "completion_ids", "logprobs", "env_mask")}
    for sample in group.samples():
        start = int(np.argmax(sample.mask))
        rows["prompt_ids"].append(sample.token_ids[:start].tolist())
        rows["completion_ids"].append(sample.token_ids[start:].tolist())
        rows["logprobs"].append(np.nan_to_num(sample.logprobs[start:]).tolist())
        rows["env_mask"].append(sample.mask[start:].astype(int).tolist())
    return rows | {"reward": group.rewards}


class Publishing(TrainerCallback):
    """After every optimizer step."""

    def __init__(self, publish: Callable[[Any], Any]) -> None:
        self.publish = publish

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.publish(model.state_dict())


def trainer(folder: Path, rollout: Callable[..., Any], publish: Callable[[Any], Any], steps: int) -> Any:
    """TRL's trainer; its data set only counts, since the runtime draws the tasks."""
    settings = GRPOConfig(
        output_dir=str(folder.parent / "trl"), max_steps=steps, learning_rate=3e-4, beta=0.0, seed=1,
        per_device_train_batch_size=GROUP_SIZE * GROUPS_PER_STEP, num_generations=GROUP_SIZE,
        max_completion_length=LIMITS.turn_tokens, temperature=1.0, use_cpu=True, bf16=False,
        save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder),
        processing_class=AutoTokenizer.from_pretrained(folder),
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": "unused"}] * GROUPS_PER_STEP),
        reward_funcs=[lambda reward, **_: reward],
        rollout_func=rollout,
        callbacks=[Publishing(publish)],
    )


async def train(directory: Path, *, steps: int = STEPS) -> list[float]:
    """The mean reward of each step."""
    folder = await fresh_model(directory / "model", ModelShape(), seed=1)
    rewards: list[float] = []
    async with (
        so.Runtime(so.RuntimeConfig(directory=directory)) as runtime,
        runtime.rollouts(
            Digits, model=folder, tasks=[Wish(number=number) for number in range(1, 30)], seed=1,
            group_size=GROUP_SIZE, groups_per_step=GROUPS_PER_STEP, max_staleness=1, limits=LIMITS,
        ) as groups,
    ):  # fmt: skip

        async def take(programs: int) -> dict[str, list[Any]]:
            rows: dict[str, list[Any]] = {}
            while len(rows.get("reward", [])) < programs:
                group = await anext(groups)
                if len(group.members) < GROUP_SIZE:
                    group.drop("incomplete")  # TRL compares groups of one size.
                    continue
                for key, values in as_trl(group).items():
                    rows.setdefault(key, []).extend(values)
            rewards.append(sum(rows["reward"]) / programs)
            print(f"step {len(rewards)}: reward {rewards[-1]:.3f}")
            return rows

        trl = trainer(
            folder,
            lambda prompts, _trainer: from_thread.run(take, len(prompts)),
            lambda weights: from_thread.run(groups.publish, weights),
            steps,
        )
        await to_thread.run_sync(trl.train)
    return rewards


if __name__ == "__main__":
    anyio.run(train, Path("runs/trl_trainer"))
