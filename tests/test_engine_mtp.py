"""Guesses of a multi-token-prediction head."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from drafter_models import (
    FREE,
    MTP_CONFIGS,
    assert_same_as_plain,
    make_mtp_folder,
    mtp_desk,
    share,
)
from engine_models import (
    Desk,
    load,
    make_core,
    prompt,
)
from sostenuto.runtime.engines.embedded.attention import Chunk, Step
from sostenuto.runtime.engines.embedded.core import Core
from sostenuto.runtime.engines.embedded.speculation.mtp import Head, MultiToken, load_head
from sostenuto.runtime.engines.embedded.speculation.speculator import Speculator
from sostenuto.runtime.engines.embedded.turn import Turn
from sostenuto.runtime.engines.wire import FinishReason, Grammar, Sampling
from sostenuto.types import Version
from speculation_models import TEMPERATURE, chi_square_p, draw_many, guesses, joint


@pytest.fixture(scope="module")
def mtp_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mtp_folder(tmp_path_factory.mktemp("mtp"), "glm4_moe")


@pytest.mark.parametrize("kind", MTP_CONFIGS)
def test_a_head_changes_no_token(tmp_path: Path, kind: str):
    folder = make_mtp_folder(tmp_path, kind)
    assert_same_as_plain(Desk(make_core(folder)), mtp_desk(folder), load(folder).module)


def test_three_tokens_have_their_joint_distribution_with_a_head(mtp_folder: Path):
    desk = mtp_desk(mtp_folder, concurrency=64)
    drawn = draw_many(desk, prompt(12, seed=2), count=1200)
    assert 0 < share(desk) < 0.95
    expected = joint(load(mtp_folder).module, prompt(12, seed=2), TEMPERATURE)
    assert chi_square_p(expected, drawn) > 0.01


class _Recorded(MultiToken):
    """Keeps its guesses, with the context that each is for."""

    def __init__(self, head: Head) -> None:
        super().__init__(head, step_s=FREE)
        self.guesses: list[tuple[list[int], int]] = []

    def draft(self, chosen: Sequence[tuple[Turn, int]]) -> None:
        super().draft(chosen)
        for turn, _ in chosen:
            self.guesses.append((turn.context.tolist(), int(turn.tokens[turn.length])))


def test_the_head_has_seen_every_token_however_its_kv_came_about(mtp_folder: Path):
    """Through chunks, wrong guesses, a held turn and a prefix of another request."""
    model, head = load_head(load(mtp_folder), mtp_folder)
    source = _Recorded(head)
    speculator = Speculator(source, most=3, step_s=lambda _: 1.0)
    core = Core(model, version=Version(0, 0), kv_tokens=4096, concurrency=8, threads=1, speculator=speculator)
    desk, greedy = Desk(core), {"temperature": 0.0}
    context = prompt(30)
    for name in ("first", "second"):
        reply = desk.turn(name, context, program_id="p", max_new_tokens=12, sampling=greedy)
        context = [*context, *reply.token_ids, *prompt(5, seed=3)]
    assert desk.turn("other", context, max_new_tokens=12, sampling=greedy).cached_tokens > 40
    assert len(source.guesses) > 20
    for tokens, guess in source.guesses:
        ids, places = torch.tensor(tokens), torch.arange(len(tokens) - 1)
        step = Step((), (Chunk(0, *model.shape.empty(len(places)), 0, len(places)),))
        with torch.no_grad():
            model.forward(ids[:-1], places, places[-1:], step)
            logits = head.logits(head.advance(ids[1:], head.take_hidden(), places, step))
        assert guess == int(logits[-1].argmax())


async def test_a_request_with_a_grammar_is_not_guessed_for_and_others_beside_it_are(tmp_path: Path):
    folder = make_mtp_folder(tmp_path, "glm4_moe")
    desk, plain = mtp_desk(folder), Desk(make_core(folder))
    grammar = Grammar(regex="[a-d]{12}")
    for each in (desk, plain):
        guide = await each.core.grammars.guide(grammar, frozenset())
        sampling = Sampling(grammar=grammar, seed=1)
        each.submit_guided("guided", prompt(9), guide, max_new_tokens=30, sampling=sampling)
        each.submit("free", prompt(12), max_new_tokens=30, sampling={"seed": 2})
        each.run()
    for name in ("guided", "free"):
        assert desk.reply(name).token_ids == plain.reply(name).token_ids
    assert desk.reply("guided").finish_reason is FinishReason.STOP
    assert guesses(desk)[1] > 0
