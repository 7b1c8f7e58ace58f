"""The experts of generation, from the engine's reply through the record to the trainer's forward pass."""

import base64
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine_models import Desk, make_core, make_folder
from fakes import FakeRenderer
from sostenuto.errors import ConfigError, EngineError, RecordError
from sostenuto.records import Experts, Trajectory, validate
from sostenuto.runtime.engines.wire import GenerateReply, RoutedExperts
from sostenuto.runtime.records import decode_trajectory, encode_trajectory
from sostenuto.runtime.rendering.conversation import Conversation
from sostenuto.runtime.rendering.experts import ExpertLog
from sostenuto.trainer.algorithms import GRPO
from sostenuto.trainer.learner import Learner
from sostenuto.trainer.model import load_policy
from sostenuto.trainer.samples import Sample, trajectory_samples
from sostenuto.trainer.settings import LearnerSettings
from sostenuto.trainer.wire import sample_from_wire, sample_to_wire
from sostenuto.types import GroupId, Message, ProgramId, Purpose, StopReason, Version

V0 = Version(0, 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(
        tmp_path_factory.mktemp("moe"), "qwen3_moe", seed=3, vocab_size=0x80, max_position_embeddings=256
    )


@pytest.fixture(scope="module")
def record(folder: Path) -> Trajectory:
    """Three turns of one program."""
    desk, conversation = Desk(make_core(folder)), Conversation(FakeRenderer())
    conversation.begin((Message("user", "hello"),))
    for turn in range(3):
        reply = say(desk, conversation, f"r{turn}")
        assert reply.routed_experts is not None
        assert reply.routed_experts.start == (0 if turn == 0 else reply.cached_tokens)
        if turn < 2:
            conversation.observe((Message("tool", "ok"),))
    return trajectory(conversation)


def say(desk: Desk, conversation: Conversation, name: str) -> GenerateReply:
    context = list(conversation.token_ids)
    reply = desk.turn(name, context, program_id="p", routed_experts=True,
                      routed_experts_from=conversation.routed_tokens)  # fmt: skip
    conversation.sent()
    conversation.sampled(reply, started_s=0.0, ended_s=1.0)
    return reply


def trajectory(conversation: Conversation) -> Trajectory:
    return Trajectory(
        ProgramId("p"), GroupId("g"), "t", Purpose.TRAIN, conversation.seen_sequences(), 1.0,
        StopReason.ANSWERED, experts=conversation.seen_experts(),
    )  # fmt: skip


def test_a_record_has_the_experts_of_every_token_but_the_last(record: Trajectory):
    validate(record)
    (experts,) = record.experts
    assert experts is not None
    assert experts.shape == (sum(map(len, record.sequences[0])) - 1, 2, 2)
    assert int(experts.min()) >= 0


def test_a_record_comes_back_with_its_experts(record: Trajectory):
    back = decode_trajectory(encode_trajectory(record))
    assert back.experts[0] is not None
    np.testing.assert_array_equal(back.experts[0], record.experts[0])
    two = replace(record, sequences=record.sequences * 2, experts=(None, *record.experts))
    assert decode_trajectory(encode_trajectory(two)).experts[0] is None


def test_a_record_without_experts_is_written_as_before(record: Trajectory):
    data = encode_trajectory(replace(record, experts=()))
    assert b"experts" not in data
    assert decode_trajectory(data).experts == ()


def test_experts_that_do_not_fit_a_record_are_refused(record: Trajectory):
    with pytest.raises(RecordError, match="experts of 2 sequences, there are 1"):
        validate(replace(record, experts=record.experts * 2))
    (experts,) = record.experts
    assert experts is not None
    with pytest.raises(RecordError, match="sequence 0: experts of shape"):
        validate(replace(record, experts=(np.concatenate([experts, experts]),)))


def test_a_rewritten_history_begins_without_experts(record: Trajectory):
    log = ExpertLog()
    log.add(told(0, 4), context=5)
    log.close()
    assert log.tokens == 0
    first, second = log.sequences(2)
    assert first is not None
    assert second is None
    log.add(told(0, 2), context=3)
    assert [part is not None and len(part) for part in log.sequences(2)] == [4, 2]


def test_what_was_told_of_a_token_first_stays_and_gaps_are_unknown():
    log = ExpertLog()
    log.add(told(0, 3, number=1), context=4)
    log.add(told(1, 4, number=2), context=6)
    log.add(told(7, 1, number=3), context=9)
    (experts,) = log.sequences(1)
    assert experts is not None
    assert experts[:, 0, 0].tolist() == [1, 1, 1, 2, 2, -1, -1, 3]


def told(start: int, count: int, *, number: int = 0) -> RoutedExperts:
    data = base64.b64encode(np.full((count, 2, 2), number, dtype="<i2").tobytes()).decode()
    return RoutedExperts(start=start, shape=(count, 2, 2), data=data)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (told(3, 3), "up to 6 of 5 tokens"),
        (RoutedExperts(start=0, shape=(3, 2, 2), data=told(0, 2).data), r"not \(3, 2, 2\) numbers"),
        (RoutedExperts(start=0, shape=(1, 2, 2), data="?"), r"not \(1, 2, 2\) numbers"),
    ],
)
def test_an_engine_that_tells_nonsense_of_experts_is_named(wrong: RoutedExperts, named: str):
    with pytest.raises(EngineError, match=named):
        ExpertLog().add(wrong, context=5)


def test_the_trainer_runs_the_recorded_experts_when_it_is_told_to(folder: Path, record: Trajectory):
    (sample,) = trajectory_samples(record, advantage=1.0)
    sample = sample_from_wire(sample_to_wire(sample))
    ran = {replay: experts_run(folder, [sample], replay) for replay in (False, True)}
    assert sample.experts is not None
    other = (sample.experts + 1) % 8
    moved = replace(sample, experts=other)
    np.testing.assert_array_equal(ran[True], sample.experts[: len(ran[True])])
    np.testing.assert_array_equal(experts_run(folder, [moved], True), other[: len(ran[True])])
    np.testing.assert_array_equal(experts_run(folder, [moved], False), ran[False])


def experts_run(folder: Path, samples: list[Sample], replay: bool) -> Experts:
    learner = Learner(
        load_policy(folder, "float32"), LearnerSettings(routing_replay=replay), seed=0, version=V0
    )
    assert learner.policy.routers is not None
    with learner.policy.routers.recording() as seen:
        learner.logprobs(samples, 1.0)
    return np.stack([layer.numpy() for layer in seen], axis=1)


def test_a_policy_step_on_recorded_experts_reports_equal_engines(folder: Path, record: Trajectory):
    learner = Learner(
        load_policy(folder, "float32"), LearnerSettings(routing_replay=True), seed=0, version=V0
    )
    samples = trajectory_samples(record, advantage=1.0)
    (found,) = learner.logprobs(samples, 1.0)
    mask = samples[0].mask
    np.testing.assert_allclose(found[mask], samples[0].logprobs[mask], atol=1e-4, rtol=0)
    assert learner.learn(samples, GRPO(correction=None)).refused == ""


def test_replay_without_a_mixture_or_without_experts_is_refused(
    folder: Path, tmp_path: Path, record: Trajectory
):
    settings = LearnerSettings(routing_replay=True)
    with pytest.raises(ConfigError, match="routing_replay: LlamaForCausalLM has no routers"):
        Learner(load_policy(make_folder(tmp_path), "float32"), settings, seed=0, version=V0)
    learner = Learner(load_policy(folder, "float32"), settings, seed=0, version=V0)
    bare = trajectory_samples(replace(record, experts=()), advantage=1.0)
    with pytest.raises(RecordError, match="no sample has experts"):
        learner.learn(bare, GRPO())
    (sample,) = trajectory_samples(record, advantage=1.0)
    assert sample.experts is not None
    wrong = replace(sample, experts=sample.experts[:, :1])
    with pytest.raises(RecordError, match=r"\[1, 2\] layers and experts of a token, the model has \[2, 2\]"):
        learner.learn([wrong], GRPO())
