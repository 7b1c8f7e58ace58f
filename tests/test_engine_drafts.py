"""Guesses of a draft model, and what holds for every drafter."""

from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

from drafter_models import assert_same_as_plain, draft_desk, make_like, make_mtp_folder, mtp_desk, share
from engine_models import (
    Desk,
    load,
    make_core,
    make_folder,
    prompt,
)
from sostenuto.runtime.engines.embedded.speculation.draft_kv import DraftKv
from sostenuto.runtime.engines.wire import PauseMode
from speculation_models import TEMPERATURE, chi_square_p, draw_many, guesses, joint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("target"), "qwen3", seed=1)


@pytest.fixture(scope="module")
def module(folder: Path) -> PreTrainedModel:
    return load(folder).module


@pytest.fixture(scope="module")
def like(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_like(tmp_path_factory.mktemp("like"), folder)


def test_a_draft_model_changes_no_token(folder: Path, like: Path, module: PreTrainedModel):
    desk = draft_desk(folder, like)
    assert_same_as_plain(Desk(make_core(folder)), desk, module)
    assert share(desk) > 0.3


def test_a_draft_model_that_is_the_model_is_always_right(folder: Path):
    desk = draft_desk(folder, folder, most=4)
    desk.submit("a", prompt(20), max_new_tokens=41, sampling={"seed": 4})
    desk.run(steps=10)
    assert guesses(desk) == (32, 32)


def test_three_tokens_have_their_joint_distribution_with_a_draft_model(
    folder: Path, like: Path, module: PreTrainedModel
):
    desk = draft_desk(folder, like, concurrency=64)
    drawn = draw_many(desk, prompt(12, seed=2), count=1200)
    assert 0.1 < share(desk) < 0.95
    assert chi_square_p(joint(module, prompt(12, seed=2), TEMPERATURE), drawn) > 0.01


def test_a_long_context_is_caught_up_over_several_steps(folder: Path, like: Path):
    desk = draft_desk(folder, like, kv_tokens=8000)
    for i in range(3):
        desk.submit(str(i), prompt(400, seed=i), max_new_tokens=20, sampling={"temperature": 0.0})
    desk.run()
    assert guesses(desk)[1] > 0
    plain = Desk(make_core(folder))
    for i in range(3):
        options = {"max_new_tokens": 20, "sampling": {"temperature": 0.0}}
        assert desk.reply(str(i)).token_ids == plain.turn(str(i), prompt(400, seed=i), **options).token_ids


def test_kv_of_the_draft_model_has_a_budget_and_goes_with_its_program(folder: Path, like: Path):
    kv = DraftKv(load(like).shape, budget_tokens=600)
    context = np.array(prompt(100), dtype=np.int32)
    first = kv.row("a", context, 4, ["a", "b", "c"])
    assert first is not None
    first.tokens = context[:90]
    assert kv.row("b", context, 4, ["a", "b", "c"]) is not None
    assert kv.row("c", context, 4, ["a", "b", "c"]) is None
    again = kv.row("a", np.append(context[:60], 1).astype(np.int32), 4, ["a"])
    assert again is first
    assert len(first.tokens) == 60
    assert kv.row("c", context, 4, ["c"]) is not None
    assert kv.width == 512
    kv.forget("c")
    kv.forget("c")
    assert kv.width == 256
    assert kv.row("long", np.zeros(700, dtype=np.int32), 4, []) is None


VARIED: list[dict[str, object]] = [
    {"temperature": 0.0, "repetition_penalty": 1.4},
    {"temperature": 0.8, "presence_penalty": 0.7, "frequency_penalty": 0.3},
    {"temperature": 1.2, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 0.7, "min_p": 0.2, "frequency_penalty": 1.0},
    {"temperature": 0.0},
]


@pytest.mark.parametrize("source", ["draft", "mtp"])
def test_nothing_is_lost_to_preemption_pauses_and_the_lower_tier(
    source: str, folder: Path, like: Path, tmp_path: Path
):
    """Whatever the sampling settings: in a pool that is too small, through each pause, over two turns."""
    if source == "mtp":
        folder = make_mtp_folder(tmp_path, "glm4_moe")
        desk = mtp_desk(folder, kv_tokens=150, lower_tokens=512)
    else:
        desk = draft_desk(folder, like, kv_tokens=150, lower_tokens=512)
    plain = Desk(make_core(folder))
    contexts = [prompt(20, seed=i) for i in range(len(VARIED))]
    for turn in range(2):
        for i, context in enumerate(contexts):
            options = {"program_id": f"p{i}", "max_new_tokens": 40, "sampling": {"seed": i, **VARIED[i]}}
            for each in (plain, desk):
                each.submit(f"{turn}-{i}", context, **options)
        plain.run()
        run_with_pauses(desk)
        for i, context in enumerate(contexts):
            reply, expected = desk.reply(f"{turn}-{i}"), plain.reply(f"{turn}-{i}")
            assert reply.token_ids == expected.token_ids
            np.testing.assert_allclose(reply.logprobs, expected.logprobs, rtol=2e-6, atol=2e-5)
            contexts[i] = [*context, *reply.token_ids, 3]
    drafted, accepted = guesses(desk)
    assert 0 < accepted < drafted
    assert desk.core.load().prefilled_tokens > plain.core.load().prefilled_tokens


def run_with_pauses(desk: Desk) -> None:
    """To the end; every seventh step is followed by a pause in which the running keep or lose their KV."""
    for step in range(1, 3000):
        if not desk.core.busy:
            return
        desk.core.step()
        assert desk.core.load().used_kv_tokens <= 150
        if step % 7 == 0:
            desk.core.pause(PauseMode.RETRACT if step % 2 else PauseMode.KEEP, lambda _: None)
            desk.core.step()
            desk.core.resume()
    raise AssertionError("still busy")
