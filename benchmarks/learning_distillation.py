"""Distillation: how soon a student is taught by a model that reward has taught, and two specialists in one.

From the quickstart's warm start.  A specialist for each of two domains is made by imitation and reward; a
student learns from both, each in its own domain, and from no reward.  What a step sees does not depend on
the machine, so the figures may be taken beside other work.
"""

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import anyio

from benchmarks.bench import Bench
from benchmarks.figure import Tell
from benchmarks.rooms import DOMAINS, Domain, Rooms, RoomTask, room_tasks
from sostenuto.envs.storeroom.world import held_out_tasks, training_tasks
from sostenuto.runtime.jobs.events import Evaluated
from sostenuto.runtime.jobs.job import EvalJob, RLJob, WarmStart
from sostenuto.runtime.jobs.teacher import Teacher
from sostenuto.runtime.quickstart.job import default_config, warm_model
from sostenuto.runtime.quickstart.recipe import Copying, Demonstrating, Gate, Recipe, Reinforcing
from sostenuto.runtime.runtime import Runtime
from sostenuto.trainer.algorithms import GRPO, OPD
from sostenuto.trainer.parts import Teaching
from sostenuto.trainer.settings import LearnerSettings, Schedule

SEEDS = (1, 2, 3)
ARRIVED = 0.9
_EVERY = 5
_PROGRAMS = 64
"""In one step, of every method."""
_METHOD = OPD(teaching=Teaching(signal="distribution"))
"""The teachers are in the trainer, so whole distributions are there to be compared."""
_TAUGHT = Schedule(
    learning_rate=1.5e-3, final_learning_rate=2e-4, shape="linear", warmup_steps=2, total_steps=40
)
"""A signal at every token bears larger steps than one for a whole program."""
_IMITATION = WarmStart(
    steps=100, batch=16, schedule=Schedule(learning_rate=1e-3, shape="linear", total_steps=100)
)


@dataclass(frozen=True, slots=True)
class Course:
    """Everything of one seed; the models that it makes lie in `folder`."""

    seed: int
    folder: Path
    warm: Path
    recipe: Recipe = field(default_factory=Recipe)
    reward_steps: int = 40
    teacher_steps: int = 20
    both_steps: int = 20
    held_out: int = 100


def measure_distillation(tell: Tell, *, quick: bool) -> None:
    """Of every seed: steps to success by a teacher and by reward; what a student keeps of two specialists."""
    for seed in SEEDS[:1] if quick else SEEDS:
        with tempfile.TemporaryDirectory(prefix="sostenuto-bench-") as folder:
            course = anyio.run(_course, Path(folder), seed, quick)
            measure_seed(tell, course)


def measure_seed(tell: Tell, course: Course) -> None:
    """The whole course of one seed."""
    total = anyio.run(specialist, course, "total")
    parts = anyio.run(specialist, course, "parts")
    tell_arrival(tell, course, total, anyio.run(pupil, course, total.model))
    teachers: Mapping[Domain, Path] = {"total": total.model, "parts": parts.model}
    tell_kept(tell, course, teachers, anyio.run(student_of_both, course, teachers))


@dataclass(frozen=True, slots=True)
class Trained:
    model: Path
    curve: Mapping[int, float]
    """Held-out success by step, sampled at temperature 1."""

    @property
    def arrived(self) -> float:
        """The first step that was seen with enough success; infinite: none."""
        return min((step for step, success in self.curve.items() if success >= ARRIVED), default=float("inf"))


async def specialist(course: Course, domain: Domain) -> Trained:
    """Imitation of the domain's demonstrations where the warm start had none, then reward."""
    imitation = None if domain == "total" else _IMITATION
    job = _job(course, domain, (domain,), steps=course.reward_steps)
    algorithm = course.recipe.reinforcing.algorithm
    groups = _PROGRAMS // algorithm.group_size
    return await _trained(
        course, replace(job, algorithm=algorithm, groups_per_step=groups, warm_start=imitation)
    )


async def pupil(course: Course, teacher: Path) -> Trained:
    """On-policy distillation of one teacher, from where that began itself."""
    job = _job(course, "pupil", ("total",), steps=course.teacher_steps)
    return await _trained(course, _taught(job, Teacher(model=teacher)))


async def student_of_both(course: Course, teachers: Mapping[Domain, Path]) -> Path:
    """Both domains mixed, each taught by its own specialist over the whole vocabulary.

    It has seen demonstrations of both: a student that never samples what its teacher would do has next to no
    gradient towards it.
    """
    job = _job(course, "both", DOMAINS, steps=course.both_steps)
    assigned = tuple(
        Teacher(name=domain, model=model, tasks={"domain": domain}) for domain, model in teachers.items()
    )
    taught = replace(_taught(job, *assigned), eval_tasks=(), warm_start=_IMITATION)
    return (await _trained(course, taught)).model


def tell_arrival(tell: Tell, course: Course, by_reward: Trained, by_teacher: Trained) -> None:
    name = f"seed {course.seed}"
    last = by_teacher.curve[max(by_teacher.curve)]
    tell(f"opd, {name}: held-out success at the end", last, "share of tasks", f">= {ARRIVED}")
    tell(f"grpo beside opd, {name}: steps to {ARRIVED}", by_reward.arrived, "steps")
    tell(f"opd, {name}: steps to {ARRIVED}", by_teacher.arrived, "steps")
    share = by_teacher.arrived / by_reward.arrived
    tell(f"opd, {name}: steps over those of grpo", share, "ratio", "<= 0.5")


def tell_kept(tell: Tell, course: Course, teachers: Mapping[Domain, Path], student: Path) -> None:
    for domain, model in teachers.items():
        theirs = anyio.run(_success, course, f"teacher-{domain}", model, domain)
        ours = anyio.run(_success, course, f"student-{domain}", student, domain)
        before = anyio.run(_success, course, f"before-{domain}", course.warm, domain)
        name = f"two specialists, seed {course.seed}, {domain}"
        tell(f"{name}: the student before", before, "share of tasks")
        tell(f"{name}: its teacher", theirs, "share of tasks")
        tell(f"{name}: the student", ours, "share of tasks")
        kept = ours / theirs if theirs else float("nan")
        tell(f"{name}: what the student keeps", kept, "ratio", ">= 0.95")


def _job(course: Course, name: str, domains: tuple[Domain, ...], *, steps: int) -> RLJob:
    plan = course.recipe.reinforcing
    count = steps * _PROGRAMS * 2
    return RLJob(
        name=f"{name}-{course.seed}",
        env=Rooms,
        model=course.warm,
        tasks=_tasks(course.seed, domains, count),
        eval_tasks=room_tasks(held_out_tasks(course.held_out, course.seed), domains[0]),
        eval_every=_EVERY,
        limits=course.recipe.limits,
        steps=steps,
        max_staleness=plan.staleness,
        learner=LearnerSettings(schedule=plan.schedule),
        seed=course.seed,
    )


def _taught(job: RLJob, *teachers: Teacher) -> RLJob:
    """By teachers and in place of rewards."""
    learner = LearnerSettings(schedule=_TAUGHT)
    return replace(job, algorithm=_METHOD, teachers=teachers, groups_per_step=_PROGRAMS, learner=learner)


def _tasks(seed: int, domains: tuple[Domain, ...], count: int) -> list[RoomTask]:
    """Other worlds for every domain."""
    worlds = list(islice(training_tasks(seed), count))
    parts = [room_tasks(worlds[at :: len(domains)], domain) for at, domain in enumerate(domains)]
    return [task for part in parts for task in part]


async def _trained(course: Course, job: RLJob) -> Trained:
    curve: dict[int, float] = {}
    async with Runtime(default_config(course.folder / job.name, unsafe=True)) as runtime:
        handle = await runtime.submit(job)
        async for event in handle.events():
            if isinstance(event, Evaluated) and event.temperature > 0:
                curve[event.step] = event.reward
                print(f"# {job.name}, step {event.step}: {event.reward:.3f}", file=sys.stderr, flush=True)
        checkpoint = (await handle.result()).checkpoint
    assert checkpoint is not None
    return Trained(checkpoint, curve)


async def _success(course: Course, name: str, model: Path, domain: Domain) -> float:
    """Of held-out tasks, sampled at temperature 1."""
    job = EvalJob(
        name=name, env=Rooms, model=model, tasks=room_tasks(held_out_tasks(course.held_out, 7), domain),
        temperatures=(1.0,), limits=course.recipe.limits, seed=course.seed,
    )  # fmt: skip
    async with Runtime(default_config(course.folder / name, unsafe=True)) as runtime:
        return (await (await runtime.submit(job)).result()).evaluations[0].reward


async def _course(folder: Path, seed: int, quick: bool) -> Course:
    bench = Bench(quick=quick)
    if quick:
        warm, _ = await warm_model(folder / "models", _quick_recipe(), seed, bench.follow)
        return Course(seed, folder, warm, _quick_recipe(), 2, 2, 2, held_out=10)
    kept = bench.models / f"warm-{seed}" / "version-0.0"
    if not kept.is_dir():
        kept, _ = await warm_model(bench.models, bench.recipe, seed, bench.follow)
    return Course(seed, folder, kept)


def _quick_recipe() -> Recipe:
    return Recipe(
        copying=Copying(steps=5),
        demonstrating=Demonstrating(steps=5, most_steps=5, gate=Gate(lessons=10, answers=10)),
        # An untaught model is never right: groups with something to compare would not come.
        reinforcing=Reinforcing(algorithm=GRPO(group_size=8, zero_spread="keep")),
    )
