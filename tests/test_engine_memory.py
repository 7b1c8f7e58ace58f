"""KV between turns in the embedded engine's core: shared, moved below and back, and never in the way."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from engine_models import Desk, load, make_core, make_folder, prompt, publish
from sostenuto.runtime.engines.embedded.core import Core
from sostenuto.runtime.engines.embedded.lanes import KvShape
from sostenuto.runtime.engines.embedded.lower import LowerTier, Parked
from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.runtime.engines.wire import CommitRequest, Feature
from sostenuto.types import Version
from test_engine_core import assert_exact

SHAPE = KvShape(layers=2, heads=2, key_size=4, value_size=6, dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def module(folder: Path) -> PreTrainedModel:
    return load(folder).module


@pytest.fixture
def desk(folder: Path) -> Desk:
    return Desk(make_core(folder))


def tiered(folder: Path, place: Path, *, kv_tokens: int = 4096, lower_tokens: int = 4096) -> Desk:
    return Desk(make_core(folder, kv_tokens=kv_tokens, lower_tokens=lower_tokens, lower_folder=place))


def settle(desk: Desk) -> None:
    """Let the copies end that are under way."""
    desk.run()
    assert not desk.core.busy


# ---- prefixes in common ----


def test_a_prefix_is_held_once_for_all_programs_that_have_it(desk: Desk):
    context = prompt(100)
    for i in range(4):
        desk.turn(f"p{i}", [*context, *prompt(10, seed=i + 1)], max_new_tokens=2)
    assert desk.core.load().held_kv_tokens == 100 + 4 * 11
    for i in range(3):
        desk.core.release(f"p{i}")
    assert desk.core.load().held_kv_tokens == 100 + 11


def test_a_prefix_of_a_program_that_has_ended_is_not_computed_again(desk: Desk, module: PreTrainedModel):
    context = prompt(100)
    desk.turn("first", context, hold=False)
    desk.turn("second", prompt(50, seed=1))
    desk.core.release("second")
    load_ = desk.core.load()
    assert (load_.used_kv_tokens, load_.cached_kv_tokens) == (0, 107 + 57)
    reply = desk.turn("late", [*context, 5, 6])
    assert reply.cached_tokens >= 100
    assert_exact(module, [*context, 5, 6], reply.token_ids, reply.logprobs)


def test_finished_prefixes_go_when_room_is_needed_and_the_longest_unused_first(folder: Path):
    desk = Desk(make_core(folder, kv_tokens=300))
    for i in range(3):
        desk.turn(f"p{i}", prompt(80, seed=i), hold=False, max_new_tokens=1)
    assert desk.turn("p0", [*prompt(80), 1], hold=False, max_new_tokens=1).cached_tokens == 80
    reply = desk.turn("large", prompt(120, seed=9), max_new_tokens=1)
    assert len(reply.token_ids) == 1
    load_ = desk.core.load()
    assert load_.used_kv_tokens + load_.cached_kv_tokens <= 300
    assert load_.evicted_programs == 0
    cached = {
        i: desk.turn(f"again{i}", [*prompt(80, seed=i), 1], hold=False, max_new_tokens=1).cached_tokens
        for i in (0, 1)
    }
    assert cached == {0: 80, 1: 0}


def test_salts_keep_programs_apart(desk: Desk, module: PreTrainedModel):
    context = prompt(60)
    desk.turn("a", context, salt="one")
    assert desk.turn("b", context, salt="two").cached_tokens == 0
    again = desk.turn("c", context, salt="one")
    assert again.cached_tokens == 59
    assert_exact(module, context, again.token_ids, again.logprobs)
    desk.submit("running", prompt(40, seed=3), salt="one", max_new_tokens=30)
    for _ in range(4):
        desk.core.step()
    assert desk.turn("other", prompt(40, seed=3), salt="two").cached_tokens == 0


def test_what_lies_in_the_trie_is_the_kv_that_the_model_computes(desk: Desk, folder: Path):
    """Branches, splits and holds copy KV about; it stays what one plain pass computes."""
    contexts = {
        "long": prompt(90), "fork": [*prompt(50), *prompt(30, seed=1)], "short": prompt(20),
        "other": prompt(40, seed=2), "deep": [*prompt(50), *prompt(30, seed=1), *prompt(9, seed=3)],
    }  # fmt: skip
    for name, context in contexts.items():
        desk.turn(name, context, max_new_tokens=1)
    for name, context in contexts.items():
        assert_same_kv(desk, folder, context, len(context), name)


def kv_in_trie(desk: Desk, context: list[int]) -> tuple[int, torch.Tensor, torch.Tensor]:
    pool = desk.core._pool  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    prefix = pool.kept.match("", np.asarray(context, dtype=np.int32))
    segments = prefix.segments()
    keys, values = (torch.cat([segment[part] for segment in segments], dim=2) for part in (0, 1))
    return prefix.tokens, keys, values


def assert_same_kv(desk: Desk, folder: Path, context: list[int], tokens: int, name: str) -> None:
    matched, keys, values = kv_in_trie(desk, context)
    assert matched == tokens, name
    plain = Desk(make_core(folder))
    plain.turn("plain", context[:tokens], max_new_tokens=1)
    _, plain_keys, plain_values = kv_in_trie(plain, context[:tokens])
    torch.testing.assert_close(keys, plain_keys[:, :, :tokens], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(values, plain_values[:, :, :tokens], rtol=2e-5, atol=2e-5)


# ---- the lower tier ----


def test_what_is_written_below_comes_back_as_it_was_whatever_the_segments(tmp_path: Path):
    lower = LowerTier(SHAPE, 100, tmp_path)
    assert lower.tokens == 96
    assert lower.tokens_s > 0
    keys, values = torch.randn(2, 2, 50, 4), torch.randn(2, 2, 50, 6)
    entry = lower.reserve("p", "", np.arange(50, dtype=np.int32), Version(0, 0))
    assert entry is not None
    cuts = [0, 3, 19, 48, 50]
    lower.write(entry, [(keys[:, :, a:b], values[:, :, a:b]) for a, b in pairwise(cuts)])
    assert lower.landed(entry)
    back = SHAPE.empty(50)
    lower.read(entry, back)
    assert torch.equal(back[0], keys)
    assert torch.equal(back[1], values)


def test_the_lower_tier_keeps_its_budget_and_forgets_what_lay_there_longest(tmp_path: Path):
    lower = LowerTier(SHAPE, 96, tmp_path)

    def park(name: str, tokens: int) -> Parked | None:
        entry = lower.reserve(name, "", np.arange(tokens, dtype=np.int32), Version(0, 0))
        if entry is not None:
            lower.landed(entry)
        return entry

    for name in "abc":
        assert park(name, 30)
    assert lower.used_tokens == 96
    assert park("d", 17)
    assert set(lower.entries) == {"b", "c", "d"}
    assert park("e", 97) is None
    assert set(lower.entries) == {"b", "c", "d"}
    assert park("f", 96)
    assert set(lower.entries) == {"f"}
    lower.drop("f")
    assert lower.used_tokens == 0


def test_blocks_that_are_being_copied_are_nobody_elses(tmp_path: Path):
    lower = LowerTier(SHAPE, 48, tmp_path)
    entry = lower.reserve("a", "", np.arange(32, dtype=np.int32), Version(0, 0))
    assert entry is not None
    assert lower.reserve("b", "", np.arange(32, dtype=np.int32), Version(0, 0)) is None
    lower.drop("a")
    assert lower.used_tokens == 32
    assert not lower.landed(entry)
    assert lower.used_tokens == 0


def test_a_disk_without_room_and_a_tier_of_nothing_are_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(Refusal, match="less than a block of 16"):
        LowerTier(SHAPE, 15, tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(Refusal, match=r"lower_tokens: no file of .* No space left on device"):
        LowerTier(SHAPE, 1600, tmp_path)
    assert list(tmp_path.iterdir()) == []


_KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from sostenuto.runtime.engines.embedded.core import Core
from sostenuto.runtime.engines.embedded.lanes import KvShape
from sostenuto.runtime.engines.embedded.lower import LowerTier
shape = KvShape(2, 2, 4, 6, torch.float32, torch.device("cpu"))
lower = LowerTier(shape, 1600, Path(sys.argv[1]))
assert lower.tokens == 1600
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_no_file(tmp_path: Path):
    killed = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], check=False, timeout=120)
    assert killed.returncode == -9
    assert list(tmp_path.iterdir()) == []


def test_an_engine_says_what_tier_it_has(folder: Path, tmp_path: Path, desk: Desk):
    facts = tiered(folder, tmp_path, lower_tokens=100).core.capabilities()
    assert facts.lower_tokens == 96
    assert facts.lower_tokens_s > 0
    assert Feature.OFFLOAD in facts.features
    assert not facts.shares_prefixes
    assert desk.core.capabilities().lower_tokens == 0
    for call in (desk.core.offload, desk.core.restore):
        with pytest.raises(Refusal, match="offload, which this engine cannot do"):
            call("p")


def test_an_offloaded_program_finds_its_kv_with_its_next_turn(
    folder: Path, tmp_path: Path, module: PreTrainedModel
):
    desk = tiered(folder, tmp_path)
    first = desk.turn("r0", prompt(100), program_id="p")
    for _ in range(2):
        desk.core.offload("p")
        settle(desk)
    load_ = desk.core.load()
    assert (load_.held_programs, load_.lower_programs, load_.lower_kv_tokens) == (0, 1, 112)
    forget_copies_above(desk)
    context = [*prompt(100), *first.token_ids, *prompt(20, seed=1)]
    reply = desk.turn("r1", context, program_id="p")
    assert reply.cached_tokens == 107
    assert_exact(module, context, reply.token_ids, reply.logprobs)
    load_ = desk.core.load()
    assert (load_.held_programs, load_.lower_programs, load_.lower_kv_tokens) == (1, 0, 0)


def forget_copies_above(desk: Desk) -> None:
    """What was offloaded stays in the pool while nobody needs the room; from now on somebody does."""
    kept = desk.core._pool.kept  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    kept.free(kept.idle_tokens)


def test_restore_brings_kv_back_ahead_of_the_turn(folder: Path, tmp_path: Path):
    desk = tiered(folder, tmp_path)
    desk.turn("r0", prompt(100), program_id="p")
    desk.core.offload("p")
    settle(desk)
    forget_copies_above(desk)
    for _ in range(2):
        desk.core.restore("p")
        settle(desk)
    desk.core.restore("nobody")
    load_ = desk.core.load()
    assert (load_.held_programs, load_.held_kv_tokens, load_.lower_programs) == (1, 107, 0)


def test_restore_takes_no_room_from_anybody(folder: Path, tmp_path: Path):
    desk = tiered(folder, tmp_path, kv_tokens=150)
    desk.turn("r0", prompt(100), program_id="p")
    desk.core.offload("p")
    settle(desk)
    desk.turn("q", prompt(60, seed=1))
    desk.core.restore("p")
    settle(desk)
    load_ = desk.core.load()
    assert (load_.held_programs, load_.lower_programs) == (1, 1)


def let_go(core: Core) -> None:
    core.release("p")


@pytest.mark.parametrize("drop", [let_go, Core.flush])
def test_what_is_given_up_below_is_gone_also_while_it_is_being_copied(
    folder: Path, tmp_path: Path, drop: Callable[[Core], None]
):
    for waits in (False, True):
        desk = tiered(folder, tmp_path)
        desk.turn("r0", prompt(100), program_id="p")
        desk.core.offload("p")
        if waits:
            settle(desk)
        drop(desk.core)
        settle(desk)
        load_ = desk.core.load()
        assert (load_.lower_programs, load_.lower_kv_tokens, load_.used_kv_tokens) == (0, 0, 0)


def test_kv_of_an_older_version_does_not_come_back_from_below(
    folder: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
):
    new = load(make_folder(tmp_path_factory.mktemp("new"), seed=2)).module
    desk = tiered(folder, tmp_path)
    context = prompt(100)
    desk.turn("r0", context, program_id="p")
    desk.core.offload("p")
    settle(desk)
    desk.core.weights.stage(publish(tmp_path, new, "0.1"))
    assert desk.core.commit(CommitRequest(version="0.1", held="drop")).dropped_programs == 1
    reply = desk.turn("r1", context, program_id="p")
    assert reply.cached_tokens == 0
    assert_exact(new, context, reply.token_ids, reply.logprobs)


def test_holders_that_are_in_the_way_go_below_and_lose_nothing(
    folder: Path, tmp_path: Path, module: PreTrainedModel
):
    desk = tiered(folder, tmp_path, kv_tokens=300)
    contexts = {f"p{i}": prompt(90, seed=i) for i in range(6)}
    for turn in range(3):
        for name, context in contexts.items():
            reply = desk.turn(f"{name}/{turn}", context, program_id=name, max_new_tokens=4)
            if turn:
                assert reply.prefilled_tokens == 1 + 5
            contexts[name] = [*context, *reply.token_ids, *prompt(5, seed=turn)]
            load_ = desk.core.load()
            assert load_.used_kv_tokens + load_.cached_kv_tokens <= 300
            assert_exact(module, context, reply.token_ids, reply.logprobs)
    assert desk.core.load().evicted_programs > 6


def test_a_request_that_loses_its_row_finds_its_kv_below(
    folder: Path, tmp_path: Path, module: PreTrainedModel
):
    desk = tiered(folder, tmp_path, kv_tokens=150)
    for i in range(4):
        desk.submit(str(i), prompt(30, seed=i), max_new_tokens=70, sampling={"seed": i})
    desk.run()
    for i in range(4):
        reply = desk.reply(str(i))
        assert len(reply.token_ids) == 70
        assert_exact(module, prompt(30, seed=i), reply.token_ids, reply.logprobs)
    # Each prompt once, and a few tokens each time that a row was lost.
    assert desk.core.load().prefilled_tokens < 4 * 30 + 40


def test_decoding_goes_on_while_kv_is_copied(folder: Path, tmp_path: Path):
    """The step after the call computes a token, whether or not the copy has ended."""
    desk = tiered(folder, tmp_path)
    desk.turn("r0", prompt(200), program_id="p")
    desk.submit("other", prompt(5), max_new_tokens=30)
    desk.core.step()
    before = desk.core.load().generated_tokens
    desk.core.offload("p")
    desk.core.step()
    assert desk.core.load().generated_tokens == before + 1
    desk.run()
    assert desk.core.load().lower_programs == 1
