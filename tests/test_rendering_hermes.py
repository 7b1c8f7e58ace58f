"""Reading turns: well-formed calls are found, malformed ones become a sentence, nothing raises."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sostenuto.runtime.rendering import hermes
from sostenuto.types import ToolCall


def test_text_reasoning_and_several_calls_are_told_apart() -> None:
    turn = hermes.read(
        '<think>\nfirst\n</think>\n\nI look.\n<tool_call>{"name":"a","arguments":{"x":1}}</tool_call>'
        '<tool_call>\n{"name": "b", "arguments": "{\\"y\\": 2}"}\n</tool_call> Done.'
    )
    assert turn == hermes.HermesTurn(
        "I look.\n Done.", "first", (ToolCall("a", '{"x": 1}'), ToolCall("b", '{"y": 2}'))
    )


def test_a_closing_tag_inside_an_argument_is_text() -> None:
    code = "print('</tool_call>')"
    call = ToolCall("python", json.dumps({"code": code}))
    assert hermes.read(hermes.write_call(call)).calls == (call,)


def test_reasoning_that_the_prompt_opened_is_reasoning() -> None:
    assert hermes.read("hm</think>yes", thinking=True) == hermes.HermesTurn("yes", "hm")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('<tool_call>{"name": "a"', "Tool call 1 is not valid JSON"),
        ("<tool_call>{name: a}</tool_call>", "Tool call 1 is not valid JSON"),
        ('<tool_call>{"name": "a"}', "not closed with </tool_call>"),
        ('<tool_call>{"arguments": {}}</tool_call>', 'has no "name"'),
        ('<tool_call>{"name": "a", "arguments": [1]}</tool_call>', "not an object"),
        ("<tool_call>[]</tool_call>", "is not a JSON object"),
        ('<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>', "NaN"),
        ("hello </tool_call>", "</tool_call> without <tool_call>"),
        ("<tool_call>" + "[" * 100_000, "not valid JSON"),
        ("<think> and on", "close it with </think>"),
        ('<tool_call>{"name":"a"}</tool_call><tool_call>{</tool_call>', "Tool call 2"),
    ],
)
def test_what_is_malformed_is_said_and_no_call_counts(text: str, says: str) -> None:
    turn = hermes.read(text)
    assert turn.problem is not None
    assert says in turn.problem
    assert turn.calls == ()


@given(
    st.lists(
        st.sampled_from(["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name":', '"a"}', "{", "1"])
    )
)
def test_reading_never_raises(parts: list[str]) -> None:
    hermes.read("".join(parts))


@given(st.text(min_size=1), st.dictionaries(st.text(), st.integers() | st.text() | st.none()))
def test_a_written_call_is_read_again(name: str, arguments: dict[str, object]) -> None:
    call = ToolCall(name, json.dumps(arguments, ensure_ascii=False))
    assert hermes.read(hermes.write("", [call])).calls == (call,)
