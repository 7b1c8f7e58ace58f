"""On-policy distillation in the trainer: what a teacher says of the student's own path."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from sostenuto.errors import ConfigError, RecordError
from sostenuto.records import Producer, Span, Taught
from sostenuto.runtime.records import decode_trajectory, encode_trajectory
from sostenuto.trainer.algorithms import GRPO, OPD, Algorithm, Reinforce
from sostenuto.trainer.batching import collate
from sostenuto.trainer.buffer import Buffer
from sostenuto.trainer.credit import credit
from sostenuto.trainer.learner import Learner
from sostenuto.trainer.model import Policy, load_policy, load_reference
from sostenuto.trainer.parts import NoReward, Teaching
from sostenuto.trainer.samples import TEACHER, TEACHER_TOP, TEACHER_TOP_IDS, Sample
from sostenuto.trainer.settings import LearnerSettings
from sostenuto.trainer.teaching import Teachers
from sostenuto.trainer.tensors import as_array
from sostenuto.trainer.wire import sample_from_wire, sample_to_wire
from sostenuto.types import GroupId, ProgramId
from trainer_world import (
    V0,
    Recorder,
    random_samples,
    sampled,
    trajectory,
    write_bigram,
    write_gpt2,
    write_model,
)

P, U, B, D, A, C = range(6)
STUDENT = {P: {U: 0.5}, U: {B: 0.2, A: 0.3}, B: {D: 0.4}}
TEACHER_OF_D = {P: {U: 0.5}, U: {B: 0.4}, B: {D: 0.2}}
OTHER = {P: {U: 0.5}, U: {B: 0.1}, B: {D: 0.8}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    tables = {"student": STUDENT, "teacher": TEACHER_OF_D, "other": OTHER}
    return {
        name: write_bigram(tmp_path_factory.mktemp(name), table, size=6) for name, table in tables.items()
    }


@pytest.fixture(scope="module")
def random_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: write_model(tmp_path_factory.mktemp(name), seed=seed)
        for seed, name in enumerate(("student", "teacher"))
    }


def own_path(*, advantage: float = 0.0, teacher: str = "teacher", said: list[float] | None = None) -> Sample:
    """P, u, b, d with b and d to be taught, sampled with exactly the student's probabilities."""
    logprobs = np.log(np.array([math.nan, math.nan, 0.2, 0.4])).astype(np.float32)
    mask = np.array([False, False, True, True])
    return Sample(
        np.array([P, U, B, D], dtype=np.int32), mask, logprobs,
        np.where(mask, advantage, 0.0).astype(np.float32), V0, "program", teacher=teacher,
        extras={} if said is None else {TEACHER: np.array(said, dtype=np.float32)},
    )  # fmt: skip


def double(folder: Path) -> Policy:
    policy = load_policy(folder, "float32")
    policy.module.double()
    return policy


def learnt(
    folders: dict[str, Path],
    samples: list[Sample],
    algorithm: Algorithm,
    *,
    student: Policy | None = None,
    microbatch_tokens: int = 4096,
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient in float64, with every folder but the student's as a teacher in the trainer."""
    teachers = {name: double(folder) for name, folder in folders.items() if name != "student"}
    settings = LearnerSettings(microbatch_tokens=microbatch_tokens)
    policy = student or double(folders["student"])
    subject = Learner(policy, settings, seed=0, version=V0, teachers=teachers)
    subject.optimizer = recorder = Recorder(subject.policy.module, settings)
    report = subject.learn(samples, algorithm)
    return report.loss, recorder.gradient


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, found in left.items():
        assert as_array(found) == pytest.approx(as_array(right[name]), rel=1e-6, abs=1e-12)


def with_advantages(*advantages: float) -> Sample:
    plain = own_path(teacher="")
    whole = plain.advantages.astype(np.float64)
    whole[plain.mask] = advantages
    return replace(plain, advantages=whole)  # float64 where the record is float32, to be exact


# ---- the worked example ----


def test_at_its_own_path_the_signal_is_plus_and_minus_0_693_and_has_no_gradient(folders: dict[str, Path]):
    """Student 0.2 and teacher 0.4 for b after P+u; student 0.4 and teacher 0.2 for d after P+u+b."""
    student, teacher = double(folders["student"]), double(folders["teacher"])
    seen: list[list[int]] = []
    teacher.module.base_model.register_forward_hook(
        lambda _module, _args, kwargs, _out: seen.append(as_array(kwargs["input_ids"]).flatten().tolist()),
        with_kwargs=True,
    )
    batch = collate([own_path()], [0], [1.0], [True])
    now = torch.tensor([0.2, 0.4], dtype=torch.float64).log().requires_grad_()
    found = Teachers(student, {"teacher": teacher}).signal(Teaching(), batch, now, 1.0)
    assert as_array(found) == pytest.approx([math.log(2), -math.log(2)], abs=1e-6)
    assert not found.requires_grad
    assert seen == [[P, U, B]]  # the student's path, not the target's


def test_alone_the_signal_is_the_advantage_of_each_token(folders: dict[str, Path]):
    found = learnt(folders, [own_path()], OPD())
    wanted = learnt(folders, [with_advantages(math.log(2), -math.log(2))], Reinforce())
    assert found[0] == pytest.approx(-(math.log(2) * math.log(0.2) - math.log(2) * math.log(0.4)) / 2, 1e-6)
    same(found[1], wanted[1])


def test_or_it_is_added_to_the_advantage_that_the_reward_has_given(folders: dict[str, Path]):
    found = learnt(folders, [own_path(advantage=0.5)], Reinforce(teaching=Teaching(coefficient=0.25)))
    added = 0.25 * math.log(2)
    same(found[1], learnt(folders, [with_advantages(0.5 + added, 0.5 - added)], Reinforce())[1])


def test_a_bound_cuts_it(folders: dict[str, Path]):
    found = learnt(folders, [own_path()], OPD(teaching=Teaching(bound=0.5)))
    same(found[1], learnt(folders, [with_advantages(0.5, -0.5)], Reinforce())[1])


def test_it_stays_as_it_is_at_the_beginning_of_a_batch(folders: dict[str, Path]):
    """The student moves between the steps of a batch; what it is taught there does not."""
    teacher = double(folders["teacher"])
    settings = LearnerSettings()
    subject = Learner(double(folders["student"]), settings, seed=0, version=V0, teachers={"teacher": teacher})
    report = subject.learn([own_path()], OPD(epochs=3))
    assert subject.step == 3
    assert report.teacher_kl == pytest.approx(0.0, abs=1e-6)  # -(0.693 - 0.693) / 2 in each of the three
    assert subject.logprobs([own_path()], 1.0)[0][2] > math.log(0.2)


def test_each_prompt_is_scored_by_its_own_teacher_and_one_student_is_updated(folders: dict[str, Path]):
    samples = [own_path(), own_path(teacher="other"), own_path()]
    found = learnt(folders, samples, OPD())
    wanted = [
        with_advantages(math.log(2), -math.log(2)),
        with_advantages(-math.log(2), math.log(2)),
        with_advantages(math.log(2), -math.log(2)),
    ]
    same(found[1], learnt(folders, wanted, Reinforce())[1])


def test_what_an_engine_said_counts_as_what_a_model_here_says(folders: dict[str, Path]):
    said = [math.nan, math.nan, math.log(0.4), math.log(0.2)]
    remote = own_path(teacher="far away", said=said)
    same(learnt(folders, [remote], OPD())[1], learnt(folders, [own_path()], OPD())[1])


# ---- whole distributions ----


def test_the_distribution_is_kl_of_student_and_teacher_at_every_context(folders: dict[str, Path]):
    def row(table: dict[int, dict[int, float]], last: int) -> list[float]:
        rest = (1 - sum(table[last].values())) / (6 - len(table[last]))
        return [table[last].get(token, rest) for token in range(6)]

    wanted = [
        sum(s * math.log(s / t) for s, t in zip(row(STUDENT, last), row(TEACHER_OF_D, last), strict=True))
        for last in (U, B)
    ]
    part = Teaching(signal="distribution")
    loss, _ = learnt(folders, [own_path()], OPD(teaching=part))
    assert loss == pytest.approx(sum(wanted) / 2, rel=1e-6)
    nearly, _ = learnt(folders, [own_path()], OPD(teaching=part.model_copy(update={"top_k": 5})))
    assert nearly == pytest.approx(loss, rel=1e-6)  # the rest is one token
    less, _ = learnt(folders, [own_path()], OPD(teaching=part.model_copy(update={"top_k": 1})))
    assert 0 < less < loss


@pytest.mark.parametrize("top_k", [None, 3])
def test_its_gradient_is_that_of_finite_differences(
    random_folders: dict[str, Path], tmp_path: Path, top_k: int | None
):
    samples = [replace(sample, teacher="teacher") for sample in random_samples(3)]
    algorithm = OPD(teaching=Teaching(signal="distribution", top_k=top_k), correction=None)
    student = double(write_gpt2(tmp_path))  # float64 all through
    _, gradient = learnt(random_folders, samples, algorithm, student=student)
    name, weight = next(
        (name, p) for name, p in student.module.named_parameters() if name.endswith("c_attn.weight")
    )
    step, at = 1e-5, (1, 2)
    losses: list[float] = []
    for moved in (step, -2 * step):
        with torch.no_grad():
            weight[at] += moved
        losses.append(learnt(random_folders, samples, algorithm, student=student)[0])
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(float(gradient[name][at]), rel=1e-4)


def test_the_top_k_of_an_engine_is_that_of_a_model_here(random_folders: dict[str, Path]):
    samples = [replace(sample, teacher="teacher") for sample in random_samples(4)]
    teacher = double(random_folders["teacher"])
    remote = [_with_top(sample, teacher, k=3) for sample in samples]
    algorithm = OPD(teaching=Teaching(signal="distribution", top_k=3))
    here, far = learnt(random_folders, samples, algorithm), learnt(random_folders, remote, algorithm)
    assert far[0] == pytest.approx(here[0], rel=1e-5)
    for name, found in far[1].items():
        assert as_array(found) == pytest.approx(as_array(here[1][name]), rel=1e-3, abs=1e-6)


def _with_top(sample: Sample, teacher: Policy, *, k: int) -> Sample:
    with torch.no_grad():
        output = teacher.module(input_ids=torch.tensor(sample.token_ids[None].astype(np.int64)))
    logprobs = output.logits[0, :-1, : teacher.tokenizer_size].log_softmax(-1)
    top, ids = (as_array(part) for part in logprobs.topk(k, dim=-1))
    unknown = np.full((1, k), np.nan)
    return replace(
        sample,
        teacher="far away",
        extras={
            TEACHER_TOP_IDS: np.concatenate([unknown, ids]).astype(np.float32),
            TEACHER_TOP: np.concatenate([unknown, top]).astype(np.float32),
        },
    )


@pytest.mark.parametrize("signal", ["sampled", "distribution"])
def test_micro_batches_of_several_teachers_give_one_gradient(random_folders: dict[str, Path], signal: str):
    folders = {**random_folders, "other": random_folders["student"]}
    names = ("teacher", "other", "teacher", "other", "teacher")
    samples = [replace(s, teacher=name) for s, name in zip(random_samples(5), names, strict=True)]
    algorithm = OPD(teaching=Teaching.model_validate({"signal": signal}))
    whole = learnt(folders, samples, algorithm)
    cut = learnt(folders, samples, algorithm, microbatch_tokens=16)
    assert cut[0] == pytest.approx(whole[0], rel=1e-9)
    for name, found in cut[1].items():
        assert as_array(found) == pytest.approx(as_array(whole[1][name]), rel=1e-6, abs=1e-9)


# ---- records ----


def test_what_was_taught_survives_record_and_wire():
    top = np.array([[math.nan] * 2] * 2 + [[-0.1, -2.5]] * 2, dtype=np.float32)
    ids = np.array([[0, 0], [0, 0], [3, 7], [4, 9]], dtype=np.int32)
    logprobs = np.array([math.nan, math.nan, -0.5, -2.0], dtype=np.float32)
    made = replace(
        trajectory("a", None), teacher="math", taught=(Taught("0.3", logprobs, ids, top),), history="h-1"
    )
    read = decode_trajectory(encode_trajectory(made))
    assert (read.teacher, read.history, len(read.taught)) == ("math", "h-1", 1)
    (sample,) = credit([[read]], OPD())
    there = sample_from_wire(sample_to_wire(sample))
    assert there.teacher == "math"
    assert there.extras[TEACHER] == pytest.approx(logprobs, nan_ok=True)
    assert there.extras[TEACHER_TOP] == pytest.approx(top, nan_ok=True)
    assert there.extras[TEACHER_TOP_IDS].astype(int).tolist() == ids.tolist()
    plain = decode_trajectory(encode_trajectory(trajectory("a", 1.0)))
    assert (plain.teacher, plain.taught, plain.history) == ("", (), "")


def test_without_a_use_for_rewards_none_is_needed():
    buffer = Buffer(zero_spread="keep", fewest=1, needs_reward=False)
    buffer.open(GroupId("g"), [ProgramId("a")], V0)
    assert buffer.add(trajectory("a", None)) == ()
    (group,) = buffer.take(1, V0, 0).batch
    (sample,) = credit([group.members], OPD())
    assert sample.advantages.tolist() == [0.0] * 4


def test_a_turn_from_a_history_votes_in_no_statistic_and_is_taught_all_the_same():
    span = (Span.fed(Producer.TEMPLATE, [1, 2]), sampled([3, 4]))
    fresh = replace(trajectory("h", None, group="h", sequences=(span,)), history="h-1", teacher="t")
    scored = [trajectory("a", 1.0), trajectory("b", 0.0)]
    buffer = Buffer(zero_spread="keep", fewest=1)
    buffer.open(GroupId("h"), [ProgramId("h")], V0)
    assert buffer.add(fresh) == ()
    samples = credit([scored, [fresh]], GRPO(zero_spread="keep", teaching=Teaching()))
    advantages = {sample.origin: float(sample.advantages[-1]) for sample in samples}
    assert advantages == {"a": 1.0, "b": -1.0, "h": 0.0}
    (learnt_from,) = (sample for sample in samples if sample.origin == "h")
    assert learnt_from.mask.tolist() == [False, False, True, True]  # the history is context alone


# ---- bad input ----


def test_what_cannot_be_taught_is_refused(folders: dict[str, Path], tmp_path: Path):
    with pytest.raises(ConfigError, match=r"has no teacher; assign one to every task"):
        learnt(folders, [own_path(teacher="")], OPD())
    with pytest.raises(RecordError, match=r"teacher 'far away' gave no teacher of a token"):
        learnt(folders, [own_path(teacher="far away")], OPD())
    half = [math.nan, math.nan, -1.0, math.nan]
    with pytest.raises(RecordError, match=r"gave no teacher of a token"):
        learnt(folders, [own_path(teacher="far away", said=half)], OPD())
    whole = OPD(teaching=Teaching(signal="distribution"))
    with pytest.raises(ConfigError, match=r"is an engine, which gives no whole distributions; give top_k"):
        learnt(folders, [own_path(teacher="far away")], whole)
    stranger = write_model(tmp_path, texts=18)
    with pytest.raises(
        ConfigError, match=r"teacher math: .* \(18 tokens\) and of the policy .* \(6 tokens\)"
    ):
        load_reference(stranger, double(folders["student"]), "float32", role="teacher math")


def test_parts_that_do_not_fit_are_refused():
    with pytest.raises(ValidationError, match="leaves nothing to learn from but a teacher"):
        Reinforce(advantage=NoReward())
    with pytest.raises(ValidationError, match='a group of equal rewards, too; give zero_spread = "keep"'):
        GRPO(teaching=Teaching())
    with pytest.raises(ValidationError, match='top_k is for signal = "distribution"'):
        Teaching(top_k=3)
    with pytest.raises(ValidationError, match='bound is for signal = "sampled"'):
        Teaching(signal="distribution", bound=1.0)
