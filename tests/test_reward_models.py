"""Rewards by models: a classifier in a process of its own, a likelihood in an engine, and their failures."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import anyio
import psutil
import pytest
import torch
import transformers
from pydantic import JsonValue
from tokenizers import Tokenizer

import fakes_agents as agents
from fakes import FakeTools
from fakes_training import Parity, ParityLater, numbers
from scripted import TINY, children, write_tokenizer_folder
from sostenuto.envs.task import task_id
from sostenuto.errors import ConfigError, EnvironmentFailure, JudgeError, lone_error
from sostenuto.records import Trajectory
from sostenuto.runtime.config import EngineEntry, RuntimeConfig, ToolServerSettings
from sostenuto.runtime.job_file import load_train_file
from sostenuto.runtime.jobs.job import RLJob, RolloutJob
from sostenuto.runtime.jobs.losses import NothingComes
from sostenuto.runtime.jobs.reward_model import RewardModel
from sostenuto.runtime.jobs.rewarding import LateRewards
from sostenuto.runtime.journal import read_journal
from sostenuto.runtime.rendering.choice import open_renderer
from sostenuto.runtime.rendering.folder import ModelFolder
from sostenuto.runtime.rendering.renderer import Piece
from sostenuto.runtime.reward_models import Classifier, Scored, open_reward_models
from sostenuto.runtime.runtime import Runtime
from sostenuto.trainer.algorithms import GRPO
from sostenuto.trainer.build import build
from sostenuto.trainer.client import TrainerClient
from sostenuto.trainer.tensors import seed_everything
from sostenuto.types import CallId, Episode, Limits, Message, ProgramId, Purpose, StopReason
from test_supply import Course, job
from test_supply_members import Moody

LIMITS = Limits(turns=2, turn_tokens=6)
LABELS = ("dull", "fine", "grand")
_transformers = cast("Any", transformers)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tokenizer_folder(tmp_path_factory.mktemp("policy"), TINY)
    build(folder, 1)
    return folder


def write_classifier(folder: Path, labels: tuple[str, ...]) -> Path:
    write_tokenizer_folder(folder, TINY)
    seed_everything(5)
    named = dict(enumerate(labels))
    config = _transformers.AutoConfig.from_pretrained(
        folder, num_labels=len(labels), id2label=named, initializer_range=0.3
    )
    _transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classifier(tmp_path_factory.mktemp("classifier"), LABELS)


@pytest.fixture(scope="module")
def value_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classifier(tmp_path_factory.mktemp("value"), ("worth",))


def outputs(folder: Path, ids: list[int]) -> list[float]:
    """What transformers says of it."""
    model = _transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0].tolist()


def logprob(folder: Path, before: list[int], after: list[int]) -> float:
    model = _transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([before + after])).logits[0]
    # Rows beyond the tokenizer have no text, and are no choice of an engine's.
    rows = max(Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab().values()) + 1
    chosen = torch.log_softmax(logits[len(before) - 1 : -1, :rows].double(), -1)
    return float(chosen[torch.arange(len(after)), torch.tensor(after)].sum())


def flat(pieces: list[Piece]) -> list[int]:
    return [id_ for piece in pieces for id_ in piece.token_ids]


async def run(folder: Path, given: RLJob) -> list[Trajectory]:
    """What it was trained on."""
    config = RuntimeConfig(directory=folder, tool_server=ToolServerSettings(unsafe=True))
    async with Runtime(config) as runtime:
        result = await (await runtime.submit(given)).result()
    assert result.ledger.closes
    with read_journal(folder / "journal.db") as reader:
        return [t for t in reader.trajectories(purpose=Purpose.TRAIN) if t.reward is not None]


def a_job(policy: Path, *models: RewardModel) -> RLJob:
    return RLJob(
        env=Parity, model=policy, tasks=numbers(8), steps=1, groups_per_step=2, limits=LIMITS, seed=1,
        algorithm=GRPO(group_size=2, zero_spread="keep"), reward_models=models,
    )  # fmt: skip


async def test_scores_of_models_are_added_to_rewards_by_their_weights(
    tmp_path: Path, policy: Path, classifier: Path
):
    before = children()
    taste = RewardModel(name="taste", model=classifier, label="grand", weight=0.5)
    liked = RewardModel(
        name="liked", model=policy, kind="likelihood", template="Good? $answer", label=" yes",
        against=(" no",), weight=3.0,
    )  # fmt: skip
    records = await run(tmp_path, a_job(policy, taste, liked))
    assert children() == before
    records = [record for record in records if record.metrics["turns"] == 1]
    assert records
    tokenizer = Tokenizer.from_file(str(policy / "tokenizer.json"))
    renderer = open_renderer(ModelFolder.open(policy))

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text).ids

    for record in records[:2]:
        metrics = record.metrics
        said = renderer.parse(last_turn(record), finished=True).message
        told, asked = said.content, [Message("user", f"Say something about {number_of(record)}.")]
        ids = [*flat(renderer.start(asked, ())), *renderer.write(asked, said, ())]
        grand = math.exp(outputs(classifier, ids)[2]) / sum(map(math.exp, outputs(classifier, ids)))
        assert metrics["taste"] == pytest.approx(grand, abs=1e-5)
        question = flat(renderer.start([Message("user", f"Good? {told}")], ()))
        yes, no = (logprob(policy, question, encode(label)) for label in (" yes", " no"))
        assert metrics["liked"] == pytest.approx(1 / (1 + math.exp(no - yes)), abs=1e-4)
        added = sum(model.weight * metrics[model.name] for model in (taste, liked))
        assert record.reward == pytest.approx(metrics["environment_reward"] + added, abs=1e-6)


def last_turn(record: Trajectory) -> list[int]:
    spans = [span for span in record.sequences[-1] if span.mask.any()]
    return spans[-1].token_ids.tolist()


def number_of(record: Trajectory) -> int:
    return next(row.number for row in numbers(8) if task_id(row) == record.task_id)


# ---- what fails ----


@dataclass
class Fake:
    """A reward model that takes its time."""

    takes_s: float = 0.0
    says: Callable[[int], float] = lambda _: 0.5
    asked: int = 0

    async def score(self, episode: Episode, task: Mapping[str, JsonValue]) -> float:
        assert episode.answer == "done"
        assert task["number"] in range(1000)
        self.asked = number = self.asked + 1
        await anyio.sleep(self.takes_s)
        return self.says(number)


ENTRY = RewardModel(model=".", name="taste", deadline_s=5.0, weight=2.0)


async def scored_by(*fakes: Fake) -> Course:
    course = Course(job(staleness=1, steps=1), 1.0)
    judges = [(replace(ENTRY, name=f"taste{number}"), fake) for number, fake in enumerate(fakes)]
    await course.run(cast("Any", Scored(Moody(), judges)))
    statistics = course.ledger.statistics()
    assert statistics.closes
    assert (statistics.running, statistics.sealed) == (0, 0)
    return course


@pytest.mark.looptime
async def test_models_are_asked_side_by_side_and_each_counts_by_its_weight():
    course = await scored_by(Fake(3.0), Fake(4.0, says=lambda _: 0.25))
    members = [member for seen in course.seen for member in seen.members]
    assert members
    for member in members:
        assert member.reward == member.metrics["environment_reward"] + 2 * 0.5 + 2 * 0.25
        assert member.usage.environment_s == pytest.approx(4.0)


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("fake", "said"),
    [
        (Fake(says=lambda asked: math.nan if asked == 3 else 0.5), "taste0: its score is nan"),
        (Fake(says=lambda asked: math.inf if asked == 3 else 0.5), "taste0: its score is inf"),
        (
            Fake(says=lambda asked: 1 / (asked - 3)),
            "taste0: ZeroDivisionError: division by zero",
        ),
    ],
)
async def test_a_model_that_gives_no_number_is_the_infrastructures_failure_and_never_a_zero(
    fake: Fake, said: str
):
    course = await scored_by(fake)
    assert course.ledger.statistics().outcomes[f"failed(infrastructure, reward_models: {said})"] == 1
    assert course.ledger.statistics().outcomes["trained"] == 16


@pytest.mark.looptime
async def test_a_model_that_is_always_late_ends_the_job_and_says_so():
    with pytest.raises(NothingComes, match="taste0: no score within 5 s"), lone_error():
        await scored_by(Fake(6.0))


async def test_a_process_that_dies_fails_its_programs_and_not_the_runtime(value_head: Path):
    async with TrainerClient() as process:
        facts = await process.open_scorer(value_head, dtype="float32", device="cpu")
        assert (facts.labels, facts.context_tokens) == (["worth"], TINY.context_tokens)
        entry = replace(ENTRY, model=value_head, name="worth", template="$prompt: $answer")
        judge = Classifier(entry, process, facts)
        episode = Episode((Message("user", "?"), Message("assistant", "!")), StopReason.ANSWERED)
        scored = Scored(FakeTools(), [(entry, judge)])
        reward = await scored.reward(ProgramId("a"), CallId("reward"), episode, timeout_s=5)
        ids = Tokenizer.from_file(str(value_head / "tokenizer.json")).encode("?: !").ids
        assert reward.metrics["worth"] == pytest.approx(outputs(value_head, ids)[0], abs=1e-5)
        assert reward.value == 1.0 + 2.0 * reward.metrics["worth"]
        with pytest.raises(EnvironmentFailure, match=r"its context is 512; lower limits\.total_tokens"):
            await judge.score(replace(episode, messages=(Message("assistant", "word " * 600),)), {})
        psutil.Process(process.pid).kill()
        with pytest.raises(JudgeError, match="reward_models: worth: "):
            await scored.reward(ProgramId("b"), CallId("reward"), episode, timeout_s=5)


# ---- what is refused ----


async def test_folders_that_cannot_score_are_refused_before_anything_runs(
    tmp_path: Path, policy: Path, classifier: Path, value_head: Path
):
    def entry(model: Path, label: str = "") -> RewardModel:
        return RewardModel(name="m", model=model, label=label)

    wrong = {
        "reward_models: m: model .* is no model of sequence classification": entry(policy),
        "label is '', the model has 3; give label; known: dull, fine, grand": entry(classifier),
        "label is 'good', the model has 1; leave label out": entry(value_head, "good"),
        "reward_models: m: model: .*nowhere is not a folder": entry(tmp_path / "nowhere"),
        "reward_models: m: device 'nonsense' cannot be used": replace(entry(value_head), device="nonsense"),
    }
    for said, model in wrong.items():
        opening = open_reward_models(a_job(policy, model), cast("Any", None))
        with pytest.raises(ConfigError, match=said), lone_error():
            await opening.__aenter__()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: RewardModel(model=".", name="reward"), "the name 'reward' is taken"),
        (lambda: RewardModel(model=".", weight=math.nan), "weight is nan"),
        (lambda: RewardModel(model=".", deadline_s=0), "deadline_s is 0"),
        (lambda: RewardModel(model=".", threads=0), "threads is 0"),
        (lambda: RewardModel(model=".", template="$colour"), r"names \$colour; it may have \$prompt"),
        (lambda: RewardModel(model=".", template="5 $"), "has a \\$ before no name"),
        (lambda: RewardModel(model=".", against=("no",)), "against and engine are of a likelihood"),
        (
            lambda: RewardModel(model=".", engine=EngineEntry(threads=2)),
            'give kind = "likelihood"',
        ),
        (lambda: RewardModel(model=".", kind="likelihood", label="yes"), "needs `template` and `label`"),
        (
            lambda: RewardModel(model=".", kind="likelihood", label="y", template="t", device="cuda"),
            "device and threads are of a classifier",
        ),
        (lambda: a_job(Path(), ENTRY, ENTRY), "the name 'taste' is there twice"),
        (
            lambda: a_job(Path(), replace(ENTRY, template="$task_numbre")),
            r"names \$task_numbre; did you mean 'task_number'",
        ),
        (
            lambda: replace(a_job(Path(), ENTRY), env=ParityLater, late_rewards=LateRewards()),
            "no sum before a late reward",
        ),
        (
            lambda: RolloutJob(
                env=agents.in_a_thread, model=".", tasks=agents.questions(1), reward_models=(ENTRY,)
            ),
            "an agent that drives itself",
        ),
    ],
)  # fmt: skip
def test_entries_that_cannot_be_meant_are_refused(make: Callable[[], object], said: str):
    with pytest.raises(ConfigError, match=said):
        make()


async def test_a_job_file_has_them(tmp_path: Path):
    path = tmp_path / "job.toml"
    path.write_text(
        f"""
        environment = "fakes_training:Parity"
        model = "{tmp_path}"
        steps = 1
        [tasks]
        factory = "fakes_training:numbers"
        arguments = {{ count = 3 }}
        [[reward_models]]
        name = "liked"
        kind = "likelihood"
        model = "{tmp_path}"
        template = "Good? $answer"
        label = " yes"
        against = [" no"]
        weight = 0.25
        engine = {{ kind = "vllm", url = "http://gpu-2:8000" }}
        """
    )
    (found,) = (await load_train_file(path).job()).reward_models
    assert found == RewardModel(
        name="liked", model=tmp_path, kind="likelihood", template="Good? $answer", label=" yes",
        against=(" no",), weight=0.25, engine=EngineEntry(kind="vllm", url="http://gpu-2:8000"),
    )  # fmt: skip
