"""What is left of a run: processes, sandboxes, held KV tokens, leases, open groups.

The same counts are taken while it runs, where they must not be zero: a count that cannot see would be
zero at the end too.
"""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from benchmarks import models, outside
from benchmarks.bench import Bench
from sostenuto.envs.storeroom.environment import Storeroom
from sostenuto.envs.storeroom.world import held_out_tasks, training_tasks
from sostenuto.runtime.jobs.events import Evaluated, JobEvent, StepTrained
from sostenuto.runtime.jobs.job import RLJob
from sostenuto.runtime.journal import read_journal
from sostenuto.runtime.quickstart.job import default_config
from sostenuto.runtime.run_directory import RunDirectory
from sostenuto.runtime.runtime import JobHandle, Runtime
from sostenuto.tools.client import ToolServerClient


class WatchedRuntime(Runtime):
    """One whose tool server can be asked what it holds."""

    async def leases(self) -> int:
        """Programs that the tool server keeps alive for this runtime."""
        tools = self._premises.tools
        assert isinstance(tools, ToolServerClient)
        return len((await tools.state()).programs)


@dataclass(frozen=True, slots=True)
class Holdings:
    """All counts at one moment."""

    processes: int = 0
    sandboxes: int = 0
    held_kv_tokens: int = 0
    leases: int = 0
    open_groups: int = 0

    def most(self, other: "Holdings") -> "Holdings":
        """The larger of each count."""
        return Holdings(
            processes=max(self.processes, other.processes),
            sandboxes=max(self.sandboxes, other.sandboxes),
            held_kv_tokens=max(self.held_kv_tokens, other.held_kv_tokens),
            leases=max(self.leases, other.leases),
            open_groups=max(self.open_groups, other.open_groups),
        )


async def measure(bench: Bench) -> None:
    """A short quickstart: its job, evaluation, asynchronous steps and all, with few of them."""
    job = _job(bench, await models.warm(bench))
    with bench.run_directory() as folder:
        async with WatchedRuntime(default_config(folder)) as runtime:
            amid, held_kv_tokens = await _follow(bench, runtime, await runtime.submit(job), folder)
            leases = await runtime.leases()
        after = Holdings(
            processes=remaining_processes(),
            sandboxes=outside.sandbox_folders(folder),
            held_kv_tokens=held_kv_tokens,
            leases=leases,
            open_groups=open_groups(folder),
        )
    for name, unit in _UNITS.items():
        bench.tell(f"amid_{name}", getattr(amid, name), unit, ">= 1")
        bench.tell(f"left_{name}", getattr(after, name), unit, "== 0")


_UNITS = {
    "processes": "processes",
    "sandboxes": "sandboxes",
    "held_kv_tokens": "tokens",
    "leases": "programs",
    "open_groups": "groups",
}


def remaining_processes() -> int:
    """Descendants of this process that still run; the dead ones are taken in."""
    outside.reap_orphans()
    return len(outside.living_descendants())


def open_groups(folder: Path) -> int:
    """Groups of which a program has no outcome yet, by the journal."""
    with read_journal(RunDirectory(folder).journal) as journal:
        return len({program_id.rpartition("-")[0] for program_id in journal.ledger().open_programs()})


async def _follow(
    bench: Bench, runtime: WatchedRuntime, handle: JobHandle, folder: Path
) -> tuple[Holdings, int]:
    """The most that was seen of each count, and the KV tokens that the engine held when all was done."""
    most, held_kv_tokens = Holdings(), -1
    async for event in handle.events():
        bench.follow(event)
        if isinstance(event, StepTrained):
            now = Holdings(
                processes=len(outside.living_descendants()),
                sandboxes=outside.sandbox_folders(folder),
                held_kv_tokens=outside.engine_load().held_kv_tokens,
                leases=await runtime.leases(),
                open_groups=open_groups(folder),
            )
            most = most.most(now)
        elif _is_last_evaluation(event):
            held_kv_tokens = outside.engine_load().held_kv_tokens
    await handle.result()
    return most, held_kv_tokens


def _is_last_evaluation(event: JobEvent) -> bool:
    return isinstance(event, Evaluated) and event.step > 0 and event.temperature == 0


def _job(bench: Bench, model: Path) -> RLJob:
    plan = bench.recipe.reinforcing
    steps = bench.size(10, 3)
    return RLJob(
        env=Storeroom,
        model=model,
        tasks=list(islice(training_tasks(1), steps * plan.groups * 4)),
        eval_tasks=held_out_tasks(bench.size(50, 20), seed=1),
        limits=bench.recipe.limits,
        steps=steps,
        groups_per_step=plan.groups,
        max_staleness=plan.staleness,
        algorithm=plan.algorithm,
        seed=1,
    )
