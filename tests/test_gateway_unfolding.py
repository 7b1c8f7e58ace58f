"""What a stream tells of a turn, whatever the turn says and however its tokens come."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripted import write_tokenizer_folder
from sostenuto.runtime.gateway.unfolding import Unfolding
from sostenuto.runtime.rendering.choice import open_renderer
from sostenuto.runtime.rendering.folder import ModelFolder
from sostenuto.runtime.rendering.renderer import Renderer
from sostenuto.types import Message, ToolCall

PIECES = st.sampled_from(
    [
        "Hello",
        " ",
        "\n",
        "<b>",
        "<",
        "tool",
        "_call>",
        "{",
        '"name"',
        "é",
        "日本",
        "😀",
        "a < b",
        "[x]",
        "</think>",
    ]
)
TEXTS = st.lists(PIECES, max_size=12).map("".join)
CUTS = st.lists(st.integers(1, 5), min_size=1, max_size=40)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return open_renderer(ModelFolder.open(write_tokenizer_folder(tmp_path_factory.mktemp("model"))))


class Clock:
    """Each look is much later than the one before."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def told(renderer: Renderer, ids: Sequence[int], cuts: Sequence[int]) -> tuple[str, str, Message]:
    """What was told before the end, in all, and what the turn says."""
    unfolding = Unfolding(renderer, (), Clock())
    early, start = "", 0
    for cut in cuts:
        early += unfolding.feed(ids[start : start + cut]).content
        start += cut
    turn = renderer.parse(ids, finished=True)
    return early, early + unfolding.end(turn).content, turn.message


@given(text=TEXTS, cuts=CUTS, data=st.data())
def test_what_is_told_is_what_the_turn_says(
    renderer: Renderer, text: str, cuts: list[int], data: st.DataObject
):
    calls = data.draw(st.sampled_from([(), (ToolCall("look", '{"place": "a"}'),)]))
    ids = renderer.write([Message("user", "x")], Message("assistant", text, calls), ())
    early, whole, message = told(renderer, ids, cuts)
    assert message.content.startswith(early)
    assert whole == message.content


def test_a_plain_text_is_told_before_its_end(renderer: Renderer):
    ids = renderer.write([Message("user", "x")], Message("assistant", "one two three four five"), ())
    early, _, _ = told(renderer, ids, [1] * (len(ids) - 1))
    assert early.startswith("one two three")


def test_a_tool_call_is_never_told_as_text(renderer: Renderer):
    said = Message("assistant", "I look.", (ToolCall("look", '{"place": "attic"}'),))
    ids = renderer.write([Message("user", "x")], said, ())
    early, whole, _ = told(renderer, ids, [1] * len(ids))
    assert whole == "I look."
    assert "I look.".startswith(early)


@pytest.mark.parametrize("stop", ["three", "three four", "five"])
def test_a_stop_string_is_held_back(renderer: Renderer, stop: str):
    ids = renderer.write([Message("user", "x")], Message("assistant", "one two three four five"), ())
    unfolding, early = Unfolding(renderer, (), Clock(), stops=[stop]), ""
    for id_ in ids:
        if stop in renderer.parse(ids[: ids.index(id_) + 1], finished=False).message.content:
            break
        early += unfolding.feed([id_]).content
    assert stop not in early
    assert "one two three four five".split(stop, maxsplit=1)[0].startswith(early)
