"""Publications of what guesses: a draft model or a head, with the model or alone."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import PreTrainedModel

from drafter_models import FREE, draft_desk, make_like, make_mtp_folder, mtp_desk, of_drafter
from engine_models import (
    Desk,
    load,
    make_core,
    make_folder,
    prompt,
    publish,
)
from sostenuto.runtime.engines.embedded.publications import Publications
from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.runtime.engines.embedded.speculation.draft import DraftModel
from sostenuto.runtime.engines.embedded.speculation.mtp import load_head
from sostenuto.runtime.engines.embedded.weights import Weights
from sostenuto.runtime.engines.wire import CommitRequest
from sostenuto.trainer.publication.shared_memory import SharedMemorySender
from sostenuto.trainer.publication.snapshot import unique_tensors
from sostenuto.types import Version
from test_engine_core import assert_exact


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("target"), "qwen3", seed=1)


@pytest.fixture(scope="module")
def module(folder: Path) -> PreTrainedModel:
    return load(folder).module


@pytest.fixture(scope="module")
def like(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_like(tmp_path_factory.mktemp("like"), folder)


@pytest.fixture(scope="module")
def mtp_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mtp_folder(tmp_path_factory.mktemp("mtp"), "glm4_moe")


def test_a_draft_model_is_published_on_its_own_and_guesses_better(
    folder: Path, tmp_path: Path, module: PreTrainedModel
):
    desk = draft_desk(folder, make_folder(tmp_path / "bad", "qwen3", seed=9))
    desk.turn("a", prompt(20), max_new_tokens=40)
    desk.submit("b", prompt(20), max_new_tokens=40)
    for _ in range(5):
        desk.core.step()
    desk.core.weights.stage(of_drafter(publish(tmp_path, module, "0.1"), "draft"))
    reply = desk.core.commit(CommitRequest(version="0.1"))
    assert (reply.recomputed_requests, reply.dropped_programs) == (0, 0)
    desk.run()
    load_ = desk.core.load()
    assert load_.speculation is not None
    assert load_.speculation.version == "0.1"
    # It has the model's own weights now; the model has the version that it had.
    since, before = load_.speculation.since_update, load_.speculation.before_update
    assert since.accepted == since.drafted > 0
    assert before.accepted < 0.5 * before.drafted
    assert desk.core.capabilities().version == "0.0"
    assert [span.version for span in desk.reply("b").versions] == ["0.0"]
    assert_exact(module, prompt(20), desk.reply("b").token_ids, desk.reply("b").logprobs)


def test_a_draft_model_that_is_not_published_only_guesses_worse(folder: Path, tmp_path: Path):
    desk = draft_desk(folder, folder)
    desk.turn("a", prompt(20), max_new_tokens=40)
    new = load(make_folder(tmp_path / "new", "qwen3", seed=5)).module
    desk.core.weights.stage(publish(tmp_path, new, "0.1"))
    desk.core.commit(CommitRequest(version="0.1"))
    reply = desk.turn("b", prompt(20), max_new_tokens=40)
    assert_exact(new, prompt(20), reply.token_ids, reply.logprobs)
    speculation = desk.core.load().speculation
    assert speculation is not None
    assert speculation.version == "0.0"
    assert speculation.before_update.accepted == speculation.before_update.drafted
    assert speculation.since_update.accepted < 0.5 * speculation.since_update.drafted


def test_both_are_published_together_or_neither_is(folder: Path, tmp_path: Path):
    desk = draft_desk(folder, make_folder(tmp_path / "bad", "qwen3", seed=9))
    new = load(make_folder(tmp_path / "new", "qwen3", seed=5)).module
    plain = publish(tmp_path, new, "0.1")
    drafter = of_drafter(plain, "all").tensors
    both = plain.model_copy(update={"selector": "all", "tensors": (*plain.tensors, *drafter)})
    half = plain.model_copy(update={"selector": "all", "tensors": (*plain.tensors, *drafter[1:])})
    with pytest.raises(Refusal, match="is missing"):
        desk.core.weights.stage(half)
    with pytest.raises(Refusal, match="not prepared"):
        desk.core.commit(CommitRequest(version="0.1"))
    desk.core.weights.stage(both)
    desk.core.commit(CommitRequest(version="0.1"))
    reply = desk.turn("b", prompt(20), max_new_tokens=40)
    assert_exact(new, prompt(20), reply.token_ids, reply.logprobs)
    speculation = desk.core.load().speculation
    assert speculation is not None
    assert speculation.version == "0.1"
    assert speculation.since_update.accepted == speculation.since_update.drafted > 0
    # An engine without a drafter takes its part of it, and refuses what has no part for it.
    lone = Desk(make_core(folder))
    with pytest.raises(Refusal, match="no drafter in this engine"):
        lone.core.weights.stage(of_drafter(plain, "draft"))
    lone.core.weights.stage(both)
    lone.core.commit(CommitRequest(version="0.1"))
    assert lone.turn("b", prompt(20), max_new_tokens=40).token_ids == reply.token_ids


def test_a_head_is_published_by_its_own_tensors_alone(mtp_folder: Path, tmp_path: Path):
    desk = mtp_desk(mtp_folder)
    before = desk.turn("a", prompt(20), max_new_tokens=30)
    _, head = load_head(load(mtp_folder), mtp_folder)
    names = set(head.weights.state_dict())
    assert "layers.0.eh_proj.weight" in names
    assert not any("embed_tokens" in name or "shared_head.head" in name for name in names)
    with torch.no_grad():
        for parameter in head.weights.parameters():
            parameter.mul_(0.5)
    desk.core.weights.stage(of_drafter(publish(tmp_path, cast("Any", head.weights), "0.1"), "draft"))
    desk.core.commit(CommitRequest(version="0.1"))
    assert desk.turn("b", prompt(20), max_new_tokens=30).token_ids == before.token_ids


def test_a_head_that_knows_the_model_is_always_right_once_it_is_published(tmp_path: Path):
    folder = make_mtp_folder(tmp_path / "markov", "glm4_moe", simple=True)
    desk = mtp_desk(folder)
    desk.turn("a", prompt(20), max_new_tokens=41, sampling={"temperature": 0.0})
    _, head = load_head(load(folder), folder)
    state = head.weights.state_dict()
    with torch.no_grad():
        state["layers.0.eh_proj.weight"].copy_(torch.eye(32, 64))
    desk.core.weights.stage(of_drafter(publish(tmp_path, cast("Any", head.weights), "0.1"), "draft"))
    desk.core.commit(CommitRequest(version="0.1"))
    desk.turn("b", prompt(20, seed=1), max_new_tokens=41, sampling={"temperature": 0.0})
    speculation = desk.core.load().speculation
    assert speculation is not None
    assert speculation.before_update.accepted < 0.5 * speculation.before_update.drafted
    # Four tokens of a step, three of them guessed.
    assert speculation.since_update.accepted == speculation.since_update.drafted == 30


def test_a_sender_says_whose_weights_it_sends(tmp_path: Path, module: PreTrainedModel):
    sender = SharedMemorySender(tmp_path, shared_memory=tmp_path)
    named = [(f"draft.{name}", tensor) for name, tensor in unique_tensors(cast("Any", module).state_dict())]
    manifest = sender.publish(Version(0, 1), named, selector="draft")
    assert manifest.selector == "draft"
    source = DraftModel(load(make_folder(tmp_path / "bad", "qwen3", seed=9)), budget_tokens=999, step_s=FREE)
    weights = Publications(Weights(module, Version(0, 0)), Weights(source.weights, Version(0, 0)))
    weights.stage(manifest)
    assert not weights.commit("0.1").target
    sender.close()
    assert weights.drafter is not None
    assert (weights.version, weights.drafter.version) == (Version(0, 0), Version(0, 1))
