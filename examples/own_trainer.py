"""Your own training loop on groups of the runtime: `python examples/own_trainer.py`.

REINFORCE in plain torch.  The model is tiny and built on the spot; nobody has shown it anything.  Reward is
the share of its answer that is made of digits.
"""

from pathlib import Path
from typing import Any

import anyio
import torch
from anyio import to_thread
from pydantic import BaseModel
from transformers import AutoModelForCausalLM

import sostenuto as so
from sostenuto.runtime.quickstart.job import fresh_model
from sostenuto.runtime.quickstart.recipe import ModelShape

GROUPS_PER_STEP = 4
STEPS = 30


class Wish(BaseModel):
    number: int


class Digits(so.Environment[Wish]):
    """Say digits."""

    async def reset(self, task: Wish) -> str:
        return f"Say {task.number}."

    async def reward(self, episode: so.Episode) -> float:
        said = episode.answer
        return sum(character.isdigit() for character in said) / len(said) if said else 0.0


def learn(policy: Any, optimizer: torch.optim.Optimizer, groups: list[so.Group]) -> None:
    """One step of REINFORCE: the group's mean is the baseline, and what is stale is weighed."""
    samples = [sample for group in groups for sample in group.samples()]
    tokens = sum(sample.masked_tokens for sample in samples)
    optimizer.zero_grad()
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids).long()
        logits = policy(ids[None]).logits[0, :-1]
        logp = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        mask = torch.from_numpy(sample.mask)[1:]
        behaviour = torch.from_numpy(sample.logprobs)[1:][mask]
        weight = (logp.detach()[mask] - behaviour).exp().clamp(max=2.0)
        advantage = torch.from_numpy(sample.advantages)[1:][mask]
        (-(weight * advantage * logp[mask]).sum() / tokens).backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()


async def train(directory: Path, *, steps: int = STEPS) -> list[float]:
    """The mean reward of each step."""
    folder = await fresh_model(directory / "model", ModelShape(), seed=1)
    policy = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-4, betas=(0.9, 0.95))
    wishes = [Wish(number=number) for number in range(1, 30)]
    rewards: list[float] = []
    batch: list[so.Group] = []
    async with so.Runtime(so.RuntimeConfig(directory=directory)) as runtime:
        async for group in runtime.rollouts(
            Digits, model=folder, tasks=wishes, group_size=8, groups_per_step=GROUPS_PER_STEP,
            max_staleness=1, limits=so.Limits(turns=1, turn_tokens=8), seed=1,
        ):  # fmt: skip
            batch.append(group)
            if len(batch) < GROUPS_PER_STEP:
                continue
            await to_thread.run_sync(learn, policy, optimizer, batch)
            await runtime.publish(policy.state_dict())  # The groups that were handed out are trained.
            each = [reward for group in batch for reward in group.rewards]
            rewards.append(sum(each) / len(each))
            print(f"step {len(rewards)}: reward {rewards[-1]:.3f}")
            batch = []
            if len(rewards) == steps:
                break
    return rewards


if __name__ == "__main__":
    anyio.run(train, Path("runs/own_trainer"))
