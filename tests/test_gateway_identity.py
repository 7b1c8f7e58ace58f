"""Which program a request is of, and whether its messages go on with what was said."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sostenuto.runtime.gateway.identity import NOBODY, Identity, Strength, identify
from sostenuto.runtime.gateway.keys import Keys, Scope
from sostenuto.runtime.gateway.matching import Match, match, same
from sostenuto.runtime.gateway.turn import Refused
from sostenuto.types import Message, ToolCall

EXPLICIT, WEAK = Strength.EXPLICIT, Strength.WEAK

CONTEXT = {
    "session_type_id": "t",
    "session_id": "s",
    "trajectory_id": "x",
    "parent_trajectory_id": "p",
    "trajectory_final": True,
}

SAID: list[tuple[dict[str, str], str | None, dict[str, Any], Identity]] = [
    ({}, None, {}, NOBODY),
    ({}, "a", {}, Identity("a", EXPLICIT)),
    ({"X-Program-Id": "a"}, None, {}, Identity("a", EXPLICIT)),
    ({"X-Program-Id": "a", "X-Program-Final": "TRUE"}, None, {}, Identity("a", EXPLICIT, is_final=True)),
    ({"X-Program-Id": "a", "X-Parent-Program-Id": "p"}, None, {}, Identity("a", EXPLICIT, "p")),
    ({}, None, {"program_id": "a"}, Identity("a", EXPLICIT)),
    ({}, None, {"extra_body": {"program_id": "a"}}, Identity("a", EXPLICIT)),
    ({"X-Program-Id": "a"}, None, {"program_id": "a", "user": "u"}, Identity("a", EXPLICIT)),
    ({}, None, {"nvext": {"agent_context": CONTEXT}}, Identity("x", EXPLICIT, "p", is_final=True)),
    (
        {"X-Dynamo-Session-ID": "d", "X-Dynamo-Parent-Session-ID": "p", "X-Dynamo-Session-Final": "1"},
        None,
        {},
        Identity("d", EXPLICIT, "p", is_final=True),
    ),
    ({"X-Session-ID": "s", "X-Parent-Session-ID": "p"}, None, {"user": "u"}, Identity("s", EXPLICIT, "p")),
    ({"X-Claude-Code-Session-Id": "c"}, None, {}, Identity("c", WEAK)),
    (
        {"X-Claude-Code-Session-Id": "c", "X-Claude-Code-Agent-Id": "1"},
        None,
        {},
        Identity("c/1", WEAK, "c"),
    ),
    ({"Session-Id": "codex"}, None, {}, Identity("codex", WEAK)),
    ({}, None, {"user": "u", "prompt_cache_key": "k"}, Identity("k", WEAK)),
    ({}, None, {"user": "Jane Doe"}, NOBODY),
    ({"X-Session-ID": "s", "X-Parent-Session-ID": "p"}, "a", {"user": "u"}, Identity("a", EXPLICIT)),
    ({"X-Program-Final": "1"}, "a", {}, Identity("a", EXPLICIT, is_final=True)),
    ({"X-Program-Id": "a", "X-Parent-Program-Id": "p"}, "a", {}, Identity("a", EXPLICIT, "p")),
]


@pytest.mark.parametrize(("headers", "path", "body", "expected"), SAID)
def test_the_surest_hint_decides(
    headers: dict[str, str], path: str | None, body: dict[str, Any], expected: Identity
):
    assert identify(headers, path, body) == expected


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"X-Program-Id": "a b"}, {}),
        ({"X-Program-Id": "x" * 201}, {}),
        ({"X-Program-Id": "é"}, {}),
        ({}, {"program_id": 7}),
        ({}, {"program_id": ["a"]}),
        ({"X-Program-Id": "a"}, {"program_id": "b"}),
        ({"X-Program-Id": "a", "X-Parent-Program-Id": "p q"}, {}),
    ],
)
def test_what_cannot_be_a_name_is_refused(headers: dict[str, str], body: dict[str, Any]):
    with pytest.raises(Refused) as error:
        identify(headers, None, body)
    assert error.value.field == "program_id"


def test_a_key_opens_what_it_is_for_and_says_when_that_is_over():
    keys = Keys()
    keys.add("metrics-key-of-the-operator", {Scope.METRICS})
    minted = keys.mint("task-1")
    other = keys.mint("task-2")
    found = keys.find(minted)
    assert found is not None
    assert found.program == "task-1"
    assert [found.may(scope) for scope in (Scope.AGENT, Scope.METRICS, Scope.ADMIN)] == [True, False, False]
    assert keys.find("metrics-key") is None
    keys.program_over("task-1")
    over, still = keys.find(minted), keys.find(other)
    assert over is not None
    assert over.is_over
    assert still is not None
    assert not still.is_over


def test_keys_of_programs_that_are_over_are_forgotten_in_the_end():
    keys = Keys(remembered=2)
    minted = [keys.mint(f"task-{number}") for number in range(4)]
    for number in range(4):
        keys.program_over(f"task-{number}")
    assert [keys.find(key) is not None for key in minted] == [False, False, True, True]


TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)
ARGUMENTS = st.dictionaries(TEXTS, st.integers() | TEXTS | st.booleans(), max_size=3)


@given(
    content=TEXTS,
    arguments=ARGUMENTS,
    indent=st.sampled_from([None, 0, 2]),
    blanks=st.sampled_from(["", " ", "\n"]),
)
def test_a_turn_that_a_client_writes_anew_is_the_same(
    content: str, arguments: dict[str, Any], indent: int | None, blanks: str
):
    known = Message("assistant", content, (ToolCall("look", json.dumps(arguments)),), "I think.")
    anew = json.dumps(arguments, indent=indent, ensure_ascii=False, sort_keys=True)
    asked = Message("assistant", blanks + content.strip() + blanks, (ToolCall("look", anew),))
    assert same(known, asked)


@pytest.mark.parametrize(
    "changes",
    [
        {"content": "no"},
        {"role": "user"},
        {"tool_calls": ()},
        {"tool_calls": (ToolCall("look", '{"x": 2}'),)},
        {"tool_calls": (ToolCall("find", '{"x": 1}'),)},
        {"reasoning": "Other."},
    ],
)
def test_what_says_something_else_is_another(changes: dict[str, Any]):
    known = Message("assistant", "yes", (ToolCall("look", '{"x": 1}'),), "I think.")
    assert not same(known, replace(known, **changes))


def test_a_path_and_another_name_of_ours_contradict_each_other():
    with pytest.raises(Refused, match="leave one of them out"):
        identify({"X-Program-Id": "b"}, "a", {})


def test_a_history_goes_on_only_behind_an_answer():
    asked = (Message("user", "Hello"),)
    said = (*asked, Message("assistant", "Hi"))
    more = (*said, Message("user", "Why?"))
    cases = {
        (said, more, True): Match.CONTINUES,
        (asked, asked, False): Match.SAME,
        (said, said, True): Match.DIFFERS,
        (said, asked, True): Match.DIFFERS,
        (asked, more, False): Match.DIFFERS,
    }
    for (known, given_, answered), expected in cases.items():
        assert match(known, (), given_, (), answered=answered) is expected
