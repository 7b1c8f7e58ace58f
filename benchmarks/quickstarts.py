"""The quickstart as a newcomer runs it, on several seeds, and with rewards that mean nothing."""

import anyio

from benchmarks import outside
from benchmarks.bench import Bench
from benchmarks.leftovers import open_groups, remaining_processes
from sostenuto.runtime.jobs.events import JobResult
from sostenuto.runtime.quickstart.job import default_config, quickstart
from sostenuto.runtime.quickstart.recipe import Copying, Demonstrating, Gate, Recipe, Reinforcing
from sostenuto.trainer.algorithms import GRPO


async def measure(bench: Bench) -> None:
    """Held-out success before and after, sampled and greedy; permuted rewards teach nothing."""
    for seed in bench.seeds:
        result = await _run(bench, seed, shuffle_rewards=False)
        for manner, (before, after) in _success(result).items():
            bench.tell(f"quickstart_{seed}_before_{manner}", before, "share of tasks", "< 0.5")
            bench.tell(f"quickstart_{seed}_after_{manner}", after, "share of tasks", ">= 0.9")
    for seed in bench.seeds:
        result = await _run(bench, seed, shuffle_rewards=True)
        for manner, (before, after) in _success(result).items():
            moved = abs(after - before)
            bench.tell(f"permuted_{seed}_before_{manner}", before, "share of tasks")
            bench.tell(f"permuted_{seed}_moved_{manner}", moved, "share of tasks", "<= 0.05")


async def _run(bench: Bench, seed: int, *, shuffle_rewards: bool) -> JobResult:
    name = f"{'permuted' if shuffle_rewards else 'quickstart'}_{seed}"
    with bench.run_directory() as folder:
        began_s = anyio.current_time()
        done = await quickstart(
            default_config(folder),
            bench.follow,
            seed=seed,
            recipe=_recipe(bench),
            shuffle_rewards=shuffle_rewards,
        )
        bench.tell(f"{name}_wall", anyio.current_time() - began_s, "s", "<= 600")
        bench.tell(f"{name}_left_processes", remaining_processes(), "processes", "== 0")
        bench.tell(f"{name}_left_sandboxes", outside.sandbox_folders(folder), "sandboxes", "== 0")
        bench.tell(f"{name}_left_open_groups", open_groups(folder), "groups", "== 0")
    return done.job


def _recipe(bench: Bench) -> Recipe:
    """The recipe itself; in quick mode a few steps of everything, which learn nothing."""
    if not bench.quick:
        return bench.recipe
    return Recipe(
        copying=Copying(steps=5),
        demonstrating=Demonstrating(steps=5, most_steps=5, gate=Gate(lessons=10, answers=10)),
        # An untaught model is never right: groups with something to compare would not come.
        reinforcing=Reinforcing(steps=2, groups=2, algorithm=GRPO(group_size=4, zero_spread="keep")),
        held_out_tasks=10,
    )


def _success(result: JobResult) -> dict[str, tuple[float, float]]:
    """Of the first and the last evaluation, sampled and greedy."""
    found: dict[str, tuple[float, float]] = {}
    for manner, is_greedy in (("sampled", False), ("greedy", True)):
        rewards = [told.reward for told in result.evaluations if (told.temperature == 0) == is_greedy]
        found[manner] = rewards[0], rewards[-1]
    return found
