"""Pausing the embedded engine's core: in every mode nothing is lost, and who waits goes on afterwards."""

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from engine_models import Desk, load, make_core, make_folder, prompt, publish, reference_logprobs
from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.runtime.engines.wire import CommitRequest, FinishReason, PauseMode
from test_engine_core import assert_exact

MODES = list(PauseMode)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def module(folder: Path) -> PreTrainedModel:
    return load(folder).module


@pytest.fixture
def desk(folder: Path) -> Desk:
    return Desk(make_core(folder))


def pause(desk: Desk, mode: PauseMode) -> list[Refusal | None]:
    """The answers to the call, as they come."""
    answers: list[Refusal | None] = []
    desk.core.pause(mode, answers.append)
    return answers


def start(desk: Desk, *names: str, tokens: int = 20, steps: int = 5) -> None:
    for i, name in enumerate(names):
        desk.submit(name, prompt(20, seed=i), max_new_tokens=tokens, sampling={"seed": i})
    for _ in range(steps):
        desk.core.step()


@pytest.mark.parametrize("mode", MODES)
def test_new_requests_wait_for_resume_and_the_engine_has_nothing_to_do(desk: Desk, mode: PauseMode):
    assert pause(desk, mode) == [None]
    desk.submit("new", prompt(9))
    assert not desk.core.busy
    assert desk.core.load().waiting == 1
    desk.core.resume()
    desk.core.resume()
    desk.run()
    reply = desk.reply("new")
    assert len(reply.token_ids) == 8
    assert reply.pause_s > 0


def test_keep_leaves_the_running_with_their_kv(desk: Desk, module: PreTrainedModel):
    start(desk, "a", "b")
    before = desk.core.load()
    assert pause(desk, PauseMode.KEEP) == [None]
    assert not desk.core.busy
    assert desk.core.load().used_kv_tokens == before.used_kv_tokens
    desk.core.resume()
    desk.run()
    assert desk.core.load().prefilled_tokens == before.prefilled_tokens
    for i, name in enumerate("ab"):
        reply = desk.reply(name)
        assert len(reply.token_ids) == 20
        assert_exact(module, prompt(20, seed=i), reply.token_ids, reply.logprobs)
        assert reply.pause_s > 0


def test_retract_gives_up_the_rows_and_loses_no_token(desk: Desk, module: PreTrainedModel):
    start(desk, "a", "b")
    before = desk.core.load()
    assert pause(desk, PauseMode.RETRACT) == [None]
    load_ = desk.core.load()
    assert (load_.running, load_.waiting, load_.used_kv_tokens) == (0, 2, 0)
    desk.core.resume()
    desk.run()
    assert desk.core.load().prefilled_tokens > before.prefilled_tokens
    for i, name in enumerate("ab"):
        reply = desk.reply(name)
        assert len(reply.token_ids) == 20
        assert reply.cached_tokens + reply.prefilled_tokens == 20
        assert_exact(module, prompt(20, seed=i), reply.token_ids, reply.logprobs)


def test_abort_answers_the_running_with_what_they_have_and_holds_their_kv(folder: Path):
    desk = Desk(make_core(folder, concurrency=1))
    start(desk, "a", "b")
    assert pause(desk, PauseMode.ABORT) == [None]
    assert desk.reply("a").finish_reason is FinishReason.ABORT
    assert 0 < len(desk.reply("a").token_ids) < 20
    assert "b" not in desk.answers
    assert desk.core.load().held_programs == 1
    desk.core.resume()
    desk.run()
    assert len(desk.reply("b").token_ids) == 20


def test_finish_is_answered_when_the_last_running_request_has_ended(folder: Path):
    desk = Desk(make_core(folder, concurrency=2))
    start(desk, "a", "b", "c")
    answers = pause(desk, PauseMode.FINISH)
    assert answers == []
    while desk.core.busy:
        assert answers == []
        desk.core.step()
    assert answers == [None]
    assert set(desk.answers) == {"a", "b"}
    assert len(desk.reply("a").token_ids) == 20
    assert pause(desk, PauseMode.FINISH) == [None]
    desk.core.resume()
    desk.run()
    assert len(desk.reply("c").token_ids) == 20


def test_finish_also_ends_a_request_that_lost_its_row_for_want_of_room(folder: Path):
    desk = Desk(make_core(folder, kv_tokens=60))
    start(desk, "a", "b", tokens=30, steps=1)
    while not desk.core.load().waiting:
        desk.core.step()
    answers = pause(desk, PauseMode.FINISH)
    desk.submit("new", prompt(9))
    while desk.core.busy:
        desk.core.step()
    assert answers == [None]
    assert set(desk.answers) == {"a", "b"}


@pytest.mark.parametrize("overtaken_by", ["keep", "resume"])
def test_a_finish_that_is_overtaken_is_refused_and_not_left_unanswered(desk: Desk, overtaken_by: str):
    start(desk, "a")
    answers = pause(desk, PauseMode.FINISH)
    if overtaken_by == "keep":
        assert pause(desk, PauseMode.KEEP) == [None]
    else:
        desk.core.resume()
    assert len(answers) == 1
    assert isinstance(answers[0], Refusal)
    assert overtaken_by in str(answers[0])
    desk.core.resume()
    desk.run()
    assert len(desk.reply("a").token_ids) == 20


def test_a_pause_turns_into_another(desk: Desk):
    start(desk, "a", "b")
    pause(desk, PauseMode.KEEP)
    pause(desk, PauseMode.RETRACT)
    assert pause(desk, PauseMode.ABORT) == [None]
    assert {desk.reply(name).finish_reason for name in "ab"} == {FinishReason.ABORT}


def test_a_request_can_be_aborted_while_the_engine_is_paused(desk: Desk):
    start(desk, "a")
    pause(desk, PauseMode.KEEP)
    desk.core.abort("a")
    assert desk.reply("a").finish_reason is FinishReason.ABORT
    assert desk.reply("a").pause_s > 0


def test_higher_priority_goes_first_among_the_waiting_and_equals_go_in_order(folder: Path):
    desk = Desk(make_core(folder, concurrency=1))
    start(desk, "running", steps=1)
    for name, priority in (("low", -1), ("first", 0), ("high", 7), ("second", 0)):
        desk.submit(name, prompt(9), priority=priority)
    desk.run()
    assert desk.order == ["running", "high", "first", "second", "low"]


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> list[PreTrainedModel]:
    """The modules that are published in turn."""
    other = load(make_folder(tmp_path_factory.mktemp("other"), seed=2)).module
    return [load(folder).module, other]


class World:
    """Does to a core whatever a seed says, and knows what was asked of it."""

    def __init__(self, folder: Path, place: Path, versions: list[PreTrainedModel], seed: int) -> None:
        self._choose = random.Random(seed)
        room = self._choose.choice([90, 150, 4096])
        self.desk = Desk(make_core(folder, kv_tokens=room, concurrency=4))
        self.asked: dict[str, list[int]] = {}
        self._place = place
        self._versions = versions
        self._updates = 0

    def act(self) -> None:
        submit, step = self._submit, self._step
        rare = [self._pause, self._resume, self._abort, self._update]
        self._choose.choice([submit, submit, step, step, step, *rare])()

    def _submit(self) -> None:
        name, choose = f"r{len(self.asked)}", self._choose
        self.asked[name] = prompt(choose.randint(1, 40), seed=len(self.asked))
        tokens, priority = choose.randint(1, 30), choose.randint(0, 1)
        self.desk.submit(name, self.asked[name], max_new_tokens=tokens, priority=priority)

    def _step(self) -> None:
        for _ in range(self._choose.randint(1, 8)):
            if self.desk.core.busy:
                self.desk.core.step()

    def _pause(self) -> None:
        pause(self.desk, self._choose.choice(MODES))

    def _resume(self) -> None:
        self.desk.core.resume()

    def _abort(self) -> None:
        self.desk.core.abort(f"r{self._choose.randint(0, len(self.asked))}")

    def _update(self) -> None:
        """Publish the other weights under the next version."""
        self._updates += 1
        version = f"0.{self._updates}"
        self.desk.core.weights.stage(publish(self._place, self._versions[self._updates % 2], version))
        self.desk.core.commit(CommitRequest(version=version, running="recompute", held="drop"))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 1 << 32))
def test_whatever_happens_every_request_is_answered_once_and_exactly(
    folder: Path, versions: list[PreTrainedModel], tmp_path_factory: pytest.TempPathFactory, seed: int
):
    world = World(folder, tmp_path_factory.mktemp("published"), versions, seed)
    for _ in range(60):
        world.act()
    world.desk.core.resume()
    world.desk.run()
    assert sorted(world.desk.order) == sorted(world.asked)
    for name, context in world.asked.items():
        assert_exact_by_version(world.desk, name, context, versions)


def assert_exact_by_version(
    desk: Desk, name: str, context: list[int], versions: list[PreTrainedModel]
) -> None:
    reply = desk.reply(name)
    assert len(reply.token_ids) == len(reply.logprobs)
    assert sum(span.end - span.start for span in reply.versions) == len(reply.token_ids)
    for span in reply.versions:
        module = versions[int(span.version.partition(".")[2]) % 2]
        known = context + reply.token_ids[: span.end]
        expected = reference_logprobs(module, known, len(context) + span.start)
        np.testing.assert_allclose(
            reply.logprobs[span.start : span.end], expected, rtol=2e-6, atol=1e-5, err_msg=name
        )
