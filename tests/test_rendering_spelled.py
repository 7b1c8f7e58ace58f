"""Calls as models write them and libraries misread them: blanks, Python's words, marks, ends that lack."""

import json
from itertools import count
from pathlib import Path

import pytest

from family_models import renderer_of
from sostenuto.runtime.gateway.unfolding import Unfolding
from sostenuto.runtime.rendering.folder import ModelFolder
from sostenuto.runtime.rendering.library import LibraryRenderer
from sostenuto.runtime.rendering.renderer import Turn
from sostenuto.runtime.rendering.vocabulary import Vocabulary
from sostenuto.tools.wire import ToolSchema

EDIT = ToolSchema(
    name="edit",
    description="Edit a file.",
    parameters={
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "text": {"type": "string"},
            "line": {"type": "integer"},
            "all": {"type": ["boolean", "null"]},
            "more": {"type": "object"},
        },
    },
    timeout_s=1.0,
)
XML = "x</think>\n\n<tool_call>\n<function=edit>\n{}</function>\n</tool_call>"
GLM = "x</think><tool_call>edit{}</tool_call>"


def xml(**values: str) -> str:
    return XML.format("".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()))


def glm(**values: str) -> str:
    pairs = (f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in values.items())
    return GLM.format("".join(pairs))


def ids_of(renderer: LibraryRenderer, place: Path, text: str) -> list[int]:
    vocabulary = Vocabulary(ModelFolder.open(place).tokenizer_json)
    return [*vocabulary.encode(text, continues=True), renderer.stop_token_ids[0]]


def read(family: str, place: Path, text: str) -> Turn:
    renderer = renderer_of(family, place)
    return renderer.parse(ids_of(renderer, place, text), finished=True, tools=[EDIT])


@pytest.mark.parametrize(("family", "write"), [("qwen3.5", xml), ("glm-5", glm)])
@pytest.mark.parametrize("text", ["    if x:\n        y\n", "  two  ", "\n\n", "", "6", "true", "<b>é</b>"])
def test_a_text_keeps_its_blanks_and_stays_a_text(tmp_path: Path, family: str, write: object, text: str):
    assert callable(write)
    turn = read(family, tmp_path, str(write(path="a.py", text=text, line="6")))
    assert turn.problem is None
    (call,) = turn.message.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("edit", {"path": "a.py", "text": text, "line": 6})


def test_what_python_writes_for_a_value_is_read(tmp_path: Path):
    turn = read("qwen3.5", tmp_path, xml(all="True", more="{'a': None}"))
    assert turn.problem is None
    assert json.loads(turn.message.tool_calls[0].arguments) == {"all": True, "more": {"a": None}}


@pytest.mark.parametrize(
    "body",
    [
        "<parameter=path>\na.py\n</parameter>\n<parameter=line>\nsix\n</parameter>\n",
        "<parameter=path>\na.py\n</parameter>\n<parameter=text>\nabout </tool_call> and more",
    ],
)
def test_a_call_that_is_not_whole_does_not_run(tmp_path: Path, body: str):
    turn = read("qwen3.5", tmp_path, XML.format(body))
    assert turn.problem is not None
    assert turn.problem.startswith("Tool call 1 is malformed")
    assert turn.message.tool_calls == ()


def test_the_last_argument_may_lack_its_mark(tmp_path: Path):
    body = '<parameter=path>\na.py\n</parameter>\n<parameter=more>\n{"a": 1}\n'
    turn = read("qwen3.5", tmp_path, XML.format(body))
    assert turn.problem is None
    assert json.loads(turn.message.tool_calls[0].arguments) == {"path": "a.py", "more": {"a": 1}}


def test_a_closing_mark_inside_of_an_argument_is_text(tmp_path: Path):
    inside = "Close with </parameter> and </function>, <parameter=path> opens."
    turn = read("qwen3.5", tmp_path, xml(path="a.md", text=inside))
    assert json.loads(turn.message.tool_calls[0].arguments) == {"path": "a.md", "text": inside}


def test_a_mark_inside_of_json_is_text(tmp_path: Path):
    call = '{"name": "edit", "arguments": {"text": "a <tool_call> b"}}'
    turn = read("qwen3", tmp_path, f"<think>\nx\n</think>\n\n<tool_call>\n{call}\n</tool_call>")
    assert (turn.problem, turn.message.reasoning, turn.message.content) == (None, "x", "")
    assert json.loads(turn.message.tool_calls[0].arguments) == {"text": "a <tool_call> b"}


@pytest.mark.parametrize("before", ["", "Let me see. "])
def test_llamas_tagged_calls_are_calls(tmp_path: Path, before: str):
    turn = read("llama-3", tmp_path, before + '<|python_tag|>{"name": "edit", "parameters": {"line": 3}}')
    assert turn.message.content == before.strip()
    assert [(call.name, call.arguments) for call in turn.message.tool_calls] == [("edit", '{"line": 3}')]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"name": "edit", "parameters": {"line": 3}}', ""),
        ('I see. <|python_tag|>{"name": "edit", "parameters": {"line": 3}}', "I see."),
        ("No call at all.", "No call at all."),
        (
            '{"an": "object", "that": "calls", "nothing": true}',
            '{"an": "object", "that": "calls", "nothing": true}',
        ),
    ],
)
def test_no_part_of_a_call_without_a_mark_is_told_as_text(tmp_path: Path, text: str, told: str):
    renderer = renderer_of("llama-3", tmp_path)
    ids = ids_of(renderer, tmp_path, text)
    clock = count()
    unfolding = Unfolding(renderer, [EDIT], lambda: float(next(clock)))
    parts = [unfolding.feed([token]).content for token in ids]
    parts.append(unfolding.end(renderer.parse(ids, finished=True, tools=[EDIT])).content)
    assert "".join(parts) == told
