"""Several prefixes: independent turns from what others have done, taught in the same context."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import anyio
import pytest

from fakes_training import Parity, numbers
from scripted import TINY, Stage, specs_of, staged, turns_of, write_tokenizer_folder
from sostenuto.envs.storeroom.demonstrations import demonstrate_in_full
from sostenuto.envs.storeroom.environment import Storeroom
from sostenuto.envs.storeroom.world import StoreroomTask, training_tasks
from sostenuto.envs.task import Draw
from sostenuto.errors import ConfigError
from sostenuto.records import Trajectory, validate
from sostenuto.runtime.config import RuntimeConfig, ToolServerSettings
from sostenuto.runtime.jobs.continuing import Continuations, open_continuations
from sostenuto.runtime.jobs.events import StepTrained
from sostenuto.runtime.jobs.job import EvalJob, RLJob
from sostenuto.runtime.jobs.prefixes import Prefixes
from sostenuto.runtime.jobs.sources import Mixed
from sostenuto.runtime.jobs.teacher import Teacher
from sostenuto.runtime.journal import read_journal
from sostenuto.runtime.rollouts import Rollouts
from sostenuto.runtime.runtime import Runtime
from sostenuto.trainer.algorithms import GRPO, OPD
from sostenuto.trainer.build import build
from sostenuto.trainer.client import TrainerClient
from sostenuto.trainer.parts import Teaching
from sostenuto.trainer.samples import trajectory_samples
from sostenuto.trainer.settings import LearnerSettings
from sostenuto.types import GroupId, Limits, Message, ProgramId, Purpose, StopReason

TASKS = list(islice(training_tasks(1), 2))
LIMITS = Limits(turns=2, turn_tokens=6)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders: dict[str, Path] = {}
    for seed, name in enumerate(("student", "teacher"), 1):
        folders[name] = write_tokenizer_folder(tmp_path_factory.mktemp(name), TINY)
        build(folders[name], seed)
    return folders


def right(_program: str) -> Sequence[Message]:
    """Four turns: find, read, calculate, answer."""
    return turns_of(demonstrate_in_full(TASKS[0]))


def a_job(model: Path, *prefixes: Prefixes) -> RLJob:
    return RLJob(
        name="student", env=Storeroom, model=model, tasks=TASKS, steps=1, algorithm=OPD(),
        teachers=(Teacher(name="math", model=model),), prefixes=prefixes,
    )  # fmt: skip


async def teach(folder: Path, model: Path) -> list[int]:
    """A teacher's run of one program; the tokens of it."""
    async with staged(folder, model, right) as stage:
        await stage.play(specs_of(Storeroom, {"teacher": TASKS[0]}))
        return stage.engine.contexts["teacher"]


async def play(stage: Stage, continuations: Continuations, ids: Sequence[str]) -> dict[str, Trajectory]:
    """Programs that the draws of these histories start, together and on the real path."""
    runner = continuations.around(stage.dispatcher, stage.dispatcher)
    rollouts = Rollouts(runner, stage.ledger, stage.journal)
    (blank,) = specs_of(Storeroom, {"fresh": TASKS[0]})
    done: dict[str, Trajectory] = {}

    async def run(number: int, history: str) -> None:
        name = f"fresh-{number}"
        spec = replace(
            blank, id=ProgramId(name), group_id=GroupId(name), task_id=history, task={"id": history}
        )
        done[history] = await rollouts.run(spec)

    async with anyio.create_task_group() as group:
        for number, history in enumerate(ids):
            group.start_soon(run, number, history)
    return done


async def test_fresh_turns_3_and_4_of_a_record_are_independent_and_run_no_tools(
    tmp_path: Path, models: dict[str, Path]
):
    """h1 is P and two source turns with their results, h2 P and three; each gets one turn of its own."""
    whole = await teach(tmp_path / "teacher", models["teacher"])
    job = a_job(models["student"], Prefixes(share=1, run=tmp_path / "teacher", from_turn=3, teacher="math"))
    continuations = await open_continuations(job)
    h1, h2 = continuations.histories.values()
    assert [history.id.rpartition("/")[2] for history in (h1, h2)] == ["3", "4"]
    prefixes = [[i for piece in history.pieces for i in piece.token_ids] for history in (h1, h2)]
    assert all(whole[: len(prefix)] == prefix for prefix in prefixes)
    assert len(prefixes[0]) < len(prefixes[1]) < len(whole)

    def says_something_else(program: str) -> Sequence[Message]:
        return [right("")[2]] if program == "fresh-0" else [Message("assistant", "The total is 1.")]

    async with staged(tmp_path / "student", models["student"], says_something_else) as stage:
        done = await play(stage, continuations, [h1.id, h2.id])
        await stage.assert_nothing_is_held()
        assert stage.ledger.statistics().sealed == 2
        sent = {request.program_id: request.token_ids for request in stage.engine.requests}
        assert sent == {"fresh-0": prefixes[0], "fresh-1": prefixes[1]}
    for history, prefix in zip((h1, h2), prefixes, strict=True):
        record = done[history.id]
        validate(record)
        (sequence,) = record.sequences
        tokens = [int(i) for span in sequence for i in span.token_ids]
        mask = [bool(m) for span in sequence for m in span.mask]
        assert tokens[: len(prefix)] == prefix
        assert mask == [False] * len(prefix) + [True] * (len(tokens) - len(prefix))
        assert (record.reward, record.outcome, record.history) == (None, None, history.id)
        assert record.metrics["tool_calls"] == 0
    # The one that calls a tool is over with that: the call is in the record, and was not run.
    assert done[h1.id].stop_reason is StopReason.TURN_LIMIT
    assert done[h2.id].stop_reason is StopReason.ANSWERED


async def test_a_conversation_of_a_file_is_what_a_rollout_would_have_had_before_each_turn(
    tmp_path: Path, models: dict[str, Path]
):
    whole = await teach(tmp_path / "teacher", models["teacher"])
    file = tmp_path / "shown.jsonl"
    messages = [
        {
            "role": message.role,
            "content": message.content,
            **({"name": message.name} if message.name else {}),
            **({"tool_calls": [
                {"function": {"name": call.name, "arguments": call.arguments}} for call in message.tool_calls
            ]} if message.tool_calls else {}),
        }
        for message in demonstrate_in_full(TASKS[0])
    ]  # fmt: skip
    file.write_text(json.dumps({"messages": messages, "task": {"domain": "sums"}}) + "\n\n")
    job = a_job(models["student"], Prefixes(share=0.5, conversations=file, from_turn=1))
    found = (await open_continuations(job)).histories.values()
    assert len(found) == 4
    for history in found:
        tokens = [i for piece in history.pieces for i in piece.token_ids]
        assert tokens == whole[: len(tokens)]
        assert history.task == {"domain": "sums"}


async def test_a_job_mixes_them_with_whole_rollouts_and_the_teacher_sees_the_same_contexts(
    tmp_path: Path, models: dict[str, Path]
):
    limits = Limits(turns=3, turn_tokens=6)
    shown = EvalJob(
        name="shown", env=Parity, model=models["teacher"], tasks=numbers(4), temperatures=(1.0,),
        limits=limits,
    )  # fmt: skip
    teacher = Teacher(name="t", model=models["teacher"], place="engine")
    job = RLJob(
        name="student", env=Parity, model=models["student"], tasks=numbers(16), steps=2, groups_per_step=4,
        algorithm=GRPO(group_size=2, zero_spread="keep", teaching=Teaching()), limits=limits,
        teachers=(teacher,), prefixes=(Prefixes(share=0.5, run=tmp_path / "first", from_turn=1),),
    )  # fmt: skip
    tools = ToolServerSettings(unsafe=True)
    async with Runtime(RuntimeConfig(directory=tmp_path / "first", tool_server=tools)) as runtime:
        await (await runtime.submit(shown)).result()
    async with Runtime(RuntimeConfig(directory=tmp_path / "second", tool_server=tools)) as runtime:
        handle = await runtime.submit(job)
        steps = [event async for event in handle.events() if isinstance(event, StepTrained)]
        result = await handle.result()
    assert result.ledger.closes
    assert result.ledger.outcomes["trained"] == 16
    assert [step.report.samples for step in steps] == [8, 8]
    with read_journal(tmp_path / "second" / "journal.db") as reader:
        records = list(reader.trajectories(purpose=Purpose.TRAIN))
    fresh = [record for record in records if record.history]
    assert 6 <= len(fresh) <= 10 <= len(records)
    assert all(record.reward is None and record.metrics["turns"] == 1 for record in fresh)
    assert all(record.reward is not None for record in records if not record.history)
    groups = Counter(record.group_id for record in fresh)
    assert set(groups.values()) <= {1, 2}  # members of a group continue the same history
    samples = [sample for record in fresh for sample in trajectory_samples(record, 0.0)]
    async with TrainerClient() as trainer:
        await trainer.open(models["teacher"], LearnerSettings(), seed=1)
        wanted = await trainer.logprobs(samples)
    for sample, logprobs in zip(samples, wanted, strict=True):
        assert sample.extras["teacher"] == pytest.approx(logprobs, abs=1e-4, nan_ok=True)


# ---- parts ----


class Numbered:
    """A TaskSource that says which draw of which source it is."""

    def __init__(self, name: str, end: int = 1000) -> None:
        self.name, self.end = name, end

    def at(self, ordinal: int) -> Draw[StoreroomTask]:
        if ordinal >= self.end:
            raise IndexError(ordinal)
        return Draw(ordinal, 0, f"{self.name}{ordinal}", TASKS[0])


def test_draws_come_by_their_shares_and_the_same_ones_for_the_same_ordinals():
    def mixed() -> Mixed:
        return Mixed([(0.5, Numbered("a")), (0.3, Numbered("b")), (0.2, Numbered("c")), (0.0, Numbered("d"))])

    draws = [mixed().at(ordinal) for ordinal in range(100)]
    assert Counter(draw.task_id[0] for draw in draws) == {"a": 50, "b": 30, "c": 20}
    for name, count in (("a", 50), ("b", 30), ("c", 20)):
        own = [draw.task_id for draw in draws if draw.task_id[0] == name]
        assert own == [f"{name}{number}" for number in range(count)]
    assert [draw.ordinal for draw in draws] == list(range(100))
    again = mixed()
    assert [again.at(ordinal).task_id for ordinal in (70, 3, 99)] == [draws[n].task_id for n in (70, 3, 99)]
    with pytest.raises(IndexError):
        Mixed([(1.0, Numbered("a", end=2))]).at(2)


# ---- bad input ----


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        ({}, "give `run` or `conversations`"),
        ({"run": Path("r"), "conversations": Path("c")}, "one of them"),
        ({"run": Path("r"), "share": 0.0}, "share is 0.0; give more than 0"),
        ({"run": Path("r"), "from_turn": 0}, "turns are counted from 1"),
    ],
)
def test_prefixes_that_say_nothing_sensible_are_refused(given: dict[str, object], wrong: str):
    with pytest.raises(ConfigError, match=wrong):
        Prefixes(**{"share": 0.5, **given})  # pyright: ignore[reportArgumentType]


def test_prefixes_need_a_teacher_who_is_there(models: dict[str, Path]):
    model, run = models["student"], Path("r")
    with pytest.raises(ConfigError, match="no teacher is named 'maths'; there are math"):
        a_job(model, Prefixes(share=0.5, run=run, teacher="maths"))
    with pytest.raises(ConfigError, match=r"shares of 0.7 \+ 0.5 are more than all groups"):
        a_job(model, Prefixes(share=0.7, run=run), Prefixes(share=0.5, run=run))
    with pytest.raises(ConfigError, match="has no reward, and nobody teaches; give teachers"):
        RLJob(env=Storeroom, model=model, tasks=TASKS, steps=1, prefixes=(Prefixes(share=0.5, run=run),))
    choosy = Teacher(name="math", model=model, tasks={"word": [task.word for task in TASKS]})
    with pytest.raises(ConfigError, match="do not say whose tasks they are of; give `teacher`"):
        replace(a_job(model), teachers=(choosy,), prefixes=(Prefixes(share=0.5, run=run),))


async def test_sources_without_a_usable_history_are_refused(tmp_path: Path, models: dict[str, Path]):
    model, file = models["student"], tmp_path / "c.jsonl"
    with pytest.raises(ConfigError, match="no journal at"):
        await open_continuations(a_job(model, Prefixes(share=0.5, run=tmp_path)))
    with pytest.raises(ConfigError, match="give a file of JSON lines"):
        await open_continuations(a_job(model, Prefixes(share=0.5, conversations=file)))
    from_file = a_job(model, Prefixes(share=0.5, conversations=file))
    file.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}')
    with pytest.raises(ConfigError, match=r"no turn from the 2. on .* give from_turn = 1"):
        await open_continuations(from_file)
    file.write_text('{"messages": [{"role": "nobody", "content": "a"}]}')
    with pytest.raises(ConfigError, match=r"line 1: messages\.0\.role"):
        await open_continuations(from_file)
    file.write_text("\n{")
    with pytest.raises(ConfigError, match=r"line 2: .*JSON"):
        await open_continuations(from_file)
