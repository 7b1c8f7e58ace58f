"""New weights in a core that runs: exact under either policy, refused when anything is wrong."""

from pathlib import Path

import numpy as np
import pytest
from torch import Tensor
from transformers import PreTrainedModel

from engine_models import Desk, load, make_core, make_folder, prompt, publish, reference_logprobs
from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.runtime.engines.wire import (
    CommitReply,
    CommitRequest,
    FinishReason,
    ScoreReply,
    ScoreRequest,
)
from sostenuto.trainer.publication.manifest import Manifest
from test_engine_core import assert_exact


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("old"), seed=1)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return load(make_folder(tmp_path_factory.mktemp("new"), seed=2)).module


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory, new: PreTrainedModel) -> Manifest:
    return publish(tmp_path_factory.mktemp("published"), new, "0.1")


@pytest.fixture
def desk(old: Path) -> Desk:
    return Desk(make_core(old))


def update(desk: Desk, manifest: Manifest, **policy: str) -> CommitReply:
    desk.core.weights.stage(manifest)
    return desk.core.commit(CommitRequest.model_validate({"version": manifest.version, **policy}))


def start(desk: Desk, name: str, tokens: int = 6, **options: object) -> list[int]:
    """Run a request until it has some tokens."""
    context = prompt(20, seed=4)
    desk.submit(name, context, max_new_tokens=16, **options)
    for _ in range(tokens):
        desk.core.step()
    return context


def test_recompute_continues_exactly_under_the_new_weights(desk: Desk, old: Path, new: PreTrainedModel):
    context = start(desk, "a")
    publication = publish(old, new, "0.1")
    reply = update(desk, publication, running="recompute")
    assert reply.recomputed_requests == 1
    desk.run()
    answer = desk.reply("a")
    cut = answer.versions[0].end
    assert [span.version for span in answer.versions] == ["0.0", "0.1"]
    assert (answer.versions[0].start, answer.versions[1].start, answer.versions[1].end) == (0, cut, 16)
    assert answer.cached_tokens + answer.prefilled_tokens == len(context)
    assert_exact(load(old).module, context, answer.token_ids[:cut], answer.logprobs[:cut])
    assert_exact(new, context + answer.token_ids[:cut], answer.token_ids[cut:], answer.logprobs[cut:])
    assert answer.pause_s == reply.pause_s


def test_continue_keeps_the_old_kv_for_that_request_alone(
    desk: Desk, manifest: Manifest, new: PreTrainedModel
):
    context = start(desk, "a")
    before = desk.core.load().prefilled_tokens
    reply = update(desk, manifest, running="continue", held="drop")
    assert reply.recomputed_requests == 0
    desk.run()
    answer = desk.reply("a")
    cut = answer.versions[0].end
    assert desk.core.load().prefilled_tokens == before
    after = reference_logprobs(new, context + answer.token_ids, len(context) + cut)
    assert not np.allclose(answer.logprobs[cut:], after, atol=1e-3), "the old KV made no difference"
    # Its KV is of the old version: it is not held, and nobody gets it.
    assert desk.core.load().held_programs == 0
    turn = desk.turn("b", [*context, *answer.token_ids, 1], program_id="a")
    assert turn.cached_tokens == 0
    assert_exact(new, [*context, *answer.token_ids, 1], turn.token_ids, turn.logprobs)


def test_a_group_member_does_not_copy_kv_of_a_dropped_version(
    desk: Desk, manifest: Manifest, new: PreTrainedModel
):
    context = start(desk, "a")
    update(desk, manifest, running="continue", held="drop")
    desk.submit("b", context)
    desk.run()
    assert desk.reply("b").cached_tokens == 0
    assert_exact(new, context, desk.reply("b").token_ids, desk.reply("b").logprobs)


def test_drop_forgets_the_held_and_keep_lets_them_go_on(old: Path, manifest: Manifest, new: PreTrainedModel):
    for policy, cached in (("drop", 0), ("keep", 27)):
        desk = Desk(make_core(old))
        context = prompt(20, seed=4)
        first = desk.turn("r0", context, program_id="p")
        reply = update(desk, manifest, held=policy)
        assert reply.dropped_programs == (policy == "drop")
        context = [*context, *first.token_ids, 5, 6]
        second = desk.turn("r1", context, program_id="p")
        assert second.cached_tokens == cached
        assert [span.version for span in second.versions] == ["0.1"]
        expected = reference_logprobs(new, context + second.token_ids, len(context))
        assert np.allclose(second.logprobs, expected, rtol=2e-6, atol=1e-5) == (policy == "drop")


def test_a_score_is_of_one_version(desk: Desk, manifest: Manifest, new: PreTrainedModel):
    token_ids = prompt(400)
    answers: list[ScoreReply | Refusal] = []
    desk.core.score(ScoreRequest(token_ids=token_ids, start=1), answers.append)
    desk.core.step()
    update(desk, manifest)
    desk.run()
    assert isinstance(answers[0], ScoreReply)
    assert answers[0].version == "0.1"
    np.testing.assert_allclose(
        answers[0].logprobs, reference_logprobs(new, token_ids, 1), rtol=2e-6, atol=1e-5
    )


def broken(manifest: Manifest, **fields: object) -> Manifest:
    """The manifest with its second tensor changed."""
    first, second, *rest = manifest.tensors
    return manifest.model_copy(update={"tensors": (first, second.model_copy(update=fields), *rest)})


def test_weights_that_are_wrong_are_refused_by_tensor_and_the_old_go_on(desk: Desk, manifest: Manifest):
    name = manifest.tensors[1].name
    shape = manifest.tensors[1].shape
    wrong = {
        f"'{name}': has shape": broken(manifest, shape=(*shape[:-1], shape[-1] + 1)),
        f"'{name}': has dtype bfloat16": broken(manifest, dtype="bfloat16"),
        f"'{name}': its bytes do not have the checksum": broken(manifest, checksum=1),
        f"'{name}': ends after": broken(manifest, offset=1 << 30),
        "'other': the model has no such tensor": broken(manifest, name="other"),
        f"'{name}': is missing": manifest.model_copy(
            update={"tensors": (manifest.tensors[0], *manifest.tensors[2:])}
        ),
        "is given twice": manifest.model_copy(update={"tensors": (*manifest.tensors, manifest.tensors[0])}),
        "cannot be mapped": manifest.model_copy(update={"path": manifest.path + ".gone"}),
    }
    reply = desk.turn("a", prompt(9), hold=False)
    for message, publication in wrong.items():
        with pytest.raises(Refusal, match=message):
            desk.core.weights.stage(publication)
        with pytest.raises(Refusal, match="not prepared"):
            desk.core.commit(CommitRequest(version="0.1"))
    desk.core.flush()
    assert desk.turn("b", prompt(9)).logprobs == reply.logprobs
    assert desk.core.capabilities().version == "0.0"


def test_versions_never_go_back(desk: Desk, manifest: Manifest):
    update(desk, manifest)
    for stale in ("0.1", "0.0"):
        with pytest.raises(Refusal, match=r"is not newer than 0\.1"):
            desk.core.weights.stage(manifest.model_copy(update={"version": stale}))
    desk.core.weights.stage(manifest.model_copy(update={"version": "1.0"}))
    desk.core.weights.abandon("1.0")
    with pytest.raises(Refusal, match="not prepared"):
        desk.core.commit(CommitRequest(version="1.0"))


def test_tied_weights_stay_tied_and_an_update_can_follow_an_update(
    desk: Desk, manifest: Manifest, old: Path, new: PreTrainedModel
):
    update(desk, manifest)
    first = desk.turn("a", prompt(9))
    assert_exact(new, prompt(9), first.token_ids, first.logprobs)
    back = load(old).module
    update(desk, publish(old, back, "0.2"))
    second = desk.turn("b", prompt(9))
    assert_exact(back, prompt(9), second.token_ids, second.logprobs)


def test_a_commit_that_fails_half_way_stops_the_engine_until_a_full_update(
    desk: Desk, manifest: Manifest, new: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
):
    start(desk, "a")
    desk.core.weights.stage(manifest)
    exchange = desk.core.weights.target._exchange  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    swapped: list[Tensor] = []

    def fail_at_the_third(live: Tensor, spare: Tensor) -> None:
        swapped.append(live)
        if len(swapped) == 3:
            raise MemoryError("injected")
        exchange(live, spare)

    with monkeypatch.context() as patch:
        patch.setattr(desk.core.weights.target, "_exchange", fail_at_the_third)
        with pytest.raises(Refusal, match="half way"):
            desk.core.commit(CommitRequest(version="0.1"))
    assert isinstance(desk.answers["a"], Refusal)
    with pytest.raises(Refusal, match="half way"):
        desk.submit("b", prompt(9))
    with pytest.raises(Refusal, match="half way"):
        desk.core.score(ScoreRequest(token_ids=[1, 2], start=1), lambda _: None)
    update(desk, manifest)
    reply = desk.turn("c", prompt(9))
    assert_exact(new, prompt(9), reply.token_ids, reply.logprobs)


def test_what_asks_for_exactly_a_version_is_served_by_no_other(desk: Desk, manifest: Manifest):
    start(desk, "a", exact_version="0.0")
    with pytest.raises(Refusal, match=r"exact_version: 0\.1 is wanted, 0\.0 is served"):
        desk.submit("b", prompt(9), exact_version="0.1")
    with pytest.raises(Refusal, match="'one' is not EPOCH"):
        desk.submit("b", prompt(9), exact_version="one")
    update(desk, manifest, running="continue")
    reply = desk.reply("a")
    assert reply.finish_reason is FinishReason.ABORT
    assert 0 < len(reply.token_ids) < 16
    assert [span.version for span in reply.versions] == ["0.0"]
    assert desk.turn("b", prompt(9), exact_version="0.1").versions[0].version == "0.1"


def test_kv_goes_on_for_as_many_versions_as_its_age_allows(
    desk: Desk, manifest: Manifest, new: PreTrainedModel
):
    context = prompt(20, seed=4)
    early = desk.turn("r0", context, program_id="early")
    keep = {"running": "continue", "held": "keep"}
    assert update(desk, manifest, **keep, oldest_kv="0.0").dropped == []
    late = desk.turn("r1", prompt(20, seed=5), program_id="late")
    shared = desk.turn("r2", context, program_id="shares")
    assert shared.cached_tokens == 19, "KV of the version before is still used"
    again = manifest.model_copy(update={"version": "0.2"})
    reply = update(desk, again, **keep, oldest_kv="0.1")
    # What was built on KV of 0.0 is as old as that.
    assert (sorted(reply.dropped), reply.dropped_programs) == (["early", "shares"], 2)
    longer = [*context, *early.token_ids, 5, 6]
    renewed = desk.turn("r3", longer, program_id="early")
    assert renewed.cached_tokens == 0
    assert_exact(new, longer, renewed.token_ids, renewed.logprobs)
    longer = [*prompt(20, seed=5), *late.token_ids, 5, 6]
    assert desk.turn("r4", longer, program_id="late").cached_tokens == 27


def test_a_request_that_runs_on_kv_that_has_become_too_old_computes_it_anew(
    desk: Desk, manifest: Manifest, new: PreTrainedModel
):
    context = start(desk, "a")
    reply = update(desk, manifest, running="continue", held="keep", oldest_kv="0.1")
    assert reply.recomputed_requests == 1
    desk.run()
    answer = desk.reply("a")
    cut = answer.versions[0].end
    assert_exact(new, context + answer.token_ids[:cut], answer.token_ids[cut:], answer.logprobs[cut:])


def test_kv_in_the_lower_tier_grows_old_as_well(old: Path, manifest: Manifest, tmp_path: Path):
    desk = Desk(make_core(old, lower_tokens=256, lower_folder=tmp_path))
    context = prompt(40, seed=4)
    first = desk.turn("r0", context, program_id="p")
    desk.core.offload("p")
    reply = update(desk, manifest, running="continue", held="keep", oldest_kv="0.1")
    assert reply.dropped == ["p"]
    assert desk.core.load().lower_programs == 0
    longer = [*context, *first.token_ids, 5, 6]
    assert desk.turn("r1", longer, program_id="p").cached_tokens == 0
