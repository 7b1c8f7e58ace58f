"""Train an agent that talks HTTP to its base URL: `python examples/agent_function.py`.

The agent asks which of two numbers is larger, and lets the model try again when it was wrong.  The model is
tiny and built on the spot; a warm start teaches it to name one of the two, and reward which one.
"""

from itertools import permutations
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import anyio
from pydantic import BaseModel

import sostenuto as so
from sostenuto.runtime.jobs.events import Evaluated, StepTrained
from sostenuto.runtime.quickstart.job import fresh_model
from sostenuto.runtime.quickstart.recipe import ModelShape

AGAIN = "No. Again."
HELD_OUT_ONE_IN = 6
STEPS = 30


class Pair(BaseModel):
    first: int
    second: int

    @property
    def question(self) -> str:
        return f"{self.first} or {self.second}"

    @property
    def larger(self) -> str:
        return str(max(self.first, self.second))


def demonstrate(task: Pair, rng: Random) -> list[so.Message]:
    """Name one of the two, whichever; the other one when told that it was wrong."""
    said = str(rng.choice([task.first, task.second]))
    messages = [so.Message("user", task.question), so.Message("assistant", said)]
    if said == task.larger:
        return messages
    return [*messages, so.Message("user", AGAIN), so.Message("assistant", task.larger)]


@so.agent(demonstrate=demonstrate)
async def larger(task: Pair, *, base_url: str, api_key: str) -> dict[str, float]:
    """1 for the larger number at once, a quarter for the second try."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": task.question}]
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as http:
        for reward in (1.0, 0.25):
            body = {"model": "default", "messages": messages}
            async with http.post(f"{base_url}/chat/completions", json=body) as response:
                response.raise_for_status()
                said = (await response.json())["choices"][0]["message"]
            if said["content"].strip() == task.larger:
                return {"reward": reward, "at_once": float(reward == 1.0)}
            messages += [said, {"role": "user", "content": AGAIN}]
    return {"reward": 0.0, "at_once": 0.0}


def tasks() -> tuple[list[Pair], list[Pair]]:
    """For training, and those that it never sees."""
    pairs = [Pair(first=first, second=second) for first, second in permutations(range(2, 14), 2)]
    Random(1).shuffle(pairs)
    held_out = len(pairs) // HELD_OUT_ONE_IN
    return pairs[held_out:], pairs[:held_out]


async def train(directory: Path) -> None:
    """Print the mean reward of each step, and of the pairs that were held out."""
    model = await fresh_model(directory / "model", ModelShape(), seed=1)
    training, held_out = tasks()
    job = so.RLJob(
        name="larger", env=larger, model=model, tasks=training, eval_tasks=held_out, steps=STEPS,
        groups_per_step=8, limits=so.Limits(turns=2, turn_tokens=8, wall_s=60), seed=1,
        warm_start=so.WarmStart(steps=150, batch=16, schedule=so.Schedule(learning_rate=2e-3)),
        learner=so.LearnerSettings(schedule=so.Schedule(learning_rate=5e-4)),
    )  # fmt: skip
    config = so.RuntimeConfig(directory=directory, engine=so.EngineSettings(concurrency=64))
    async with so.Runtime(config) as runtime:
        handle = await runtime.submit(job)
        async for event in handle.events():
            if isinstance(event, StepTrained):
                print(f"step {event.step}: reward {event.reward:.3f}")
            elif isinstance(event, Evaluated):
                print(f"held out at temperature {event.temperature:g}: reward {event.reward:.3f}")
        await handle.result()


if __name__ == "__main__":
    anyio.run(train, Path("runs/agent_function"))
