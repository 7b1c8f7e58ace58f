"""What an episode in a sandbox costs in processor time, outside the model.

One job runs the same tasks three times.  The first round starts what is started once; the second is
measured; the third keeps every process alive while the second is looked at.
"""

from dataclasses import dataclass

import psutil

from benchmarks import models, outside
from benchmarks.bench import Bench
from benchmarks.child_clock import ChildClock
from sostenuto.envs.storeroom.environment import Storeroom
from sostenuto.envs.storeroom.world import held_out_tasks
from sostenuto.runtime.jobs.events import Evaluated
from sostenuto.runtime.jobs.job import EvalJob
from sostenuto.runtime.journal import read_journal
from sostenuto.runtime.quickstart.job import default_config
from sostenuto.runtime.run_directory import RunDirectory
from sostenuto.runtime.runtime import JobHandle, Runtime


@dataclass(frozen=True, slots=True)
class Spent:
    """Processor seconds, by who spent them."""

    runtime_s: float
    tool_server_s: float
    workers_s: float
    sandboxes_s: float

    @property
    def total_s(self) -> float:
        return self.runtime_s + self.tool_server_s + self.workers_s + self.sandboxes_s

    def since(self, earlier: "Spent") -> "Spent":
        return Spent(
            self.runtime_s - earlier.runtime_s,
            self.tool_server_s - earlier.tool_server_s,
            self.workers_s - earlier.workers_s,
            self.sandboxes_s - earlier.sandboxes_s,
        )


async def measure(bench: Bench) -> None:
    """Runtime, tool server, workers and sandboxes, for an episode of three tool calls."""
    tasks = bench.size(200, 40)
    job = EvalJob(
        env=Storeroom,
        model=await models.competent(bench),
        tasks=held_out_tasks(tasks, seed=1),
        temperatures=(0.0, 0.0, 0.0),
        limits=bench.recipe.limits,
    )
    with bench.run_directory() as folder:
        async with Runtime(default_config(folder)) as runtime:
            (server,) = outside.running(outside.TOOL_SERVER)
            with ChildClock(server.pid) as sandboxes:
                cost = await _cost_of_second_round(await runtime.submit(job), server, sandboxes)
        with read_journal(RunDirectory(folder).journal) as journal:
            calls = [record.metrics.get("tool_calls", 0.0) for record in journal.trajectories()]
    per_episode_ms = 1000.0 / tasks
    bench.tell("cost_tool_calls", sum(calls) / len(calls), "calls/episode", ">= 2.9")
    for part in ("runtime", "tool_server", "workers", "sandboxes"):
        bench.tell(f"cost_{part}", getattr(cost, f"{part}_s") * per_episode_ms, "cpu-ms/episode")
    bench.tell("cost_outside_the_model", cost.total_s * per_episode_ms, "cpu-ms/episode", "<= 60")


async def _cost_of_second_round(job: JobHandle, server: psutil.Process, sandboxes: ChildClock) -> Spent:
    looks = [_look(server, sandboxes) async for event in job.events() if isinstance(event, Evaluated)]
    await job.result()
    return looks[1].since(looks[0])


def _look(server: psutil.Process, sandboxes: ChildClock) -> Spent:
    workers = outside.running(outside.WORKER)
    return Spent(
        runtime_s=_used_s(psutil.Process()),
        tool_server_s=_used_s(server),
        workers_s=sum(map(_used_s, workers)),
        # The first worker was started after the clock, and is not a sandbox.
        sandboxes_s=sandboxes.seconds() - sum(map(_used_s, workers)),
    )


def _used_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system
