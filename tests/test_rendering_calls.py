"""The forms in which models write calls: what a form writes is read as what was meant."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import JsonValue

import rendering_models as small
from family_models import renderer_of
from sostenuto.runtime.rendering.calls import FormsCalls
from sostenuto.runtime.rendering.choice import open_renderer
from sostenuto.runtime.rendering.folder import ModelFolder
from sostenuto.runtime.rendering.vocabulary import Vocabulary
from sostenuto.tools.wire import ToolSchema
from sostenuto.types import ToolCall

CALLS = [ToolCall("find.it", '{"größe": [1, {"a": "</tool_call>"}]}'), ToolCall("look", "{}")]


@pytest.mark.parametrize(
    ("family", "several"), [("qwen3", 2), ("deepseek-v3", 2), ("kimi-k2", 1), ("llama-3", 1)]
)
def test_what_the_form_of_a_family_writes_is_read_as_it_is_meant(tmp_path: Path, family: str, several: int):
    renderer = renderer_of(family, tmp_path)
    form = renderer.call_form
    assert form is not None
    assert (form.separator is not None) == (several > 1)
    vocabulary = Vocabulary(ModelFolder.open(tmp_path).tokenizer_json)
    for calls in ([*CALLS[:several]], CALLS[1:]):
        disguised = form.written([ToolCall(call.name, "{}") for call in calls])
        ids = [*vocabulary.encode(disguised, continues=True), renderer.stop_token_ids[0]]
        turn = renderer.parse(ids, finished=True)
        assert (turn.problem, turn.message.content) == (None, "")
        assert [call.name for call in turn.message.tool_calls] == [call.name for call in calls]


def test_calls_that_llama_writes_have_no_mark_of_their_own(tmp_path: Path):
    form = renderer_of("llama-3", tmp_path).call_form
    assert form is not None
    assert form.trigger == ""


@pytest.mark.parametrize("family", ["qwen3.5", "glm-5", "glm-4.5", "minimax-m2"])
def test_arguments_that_are_spelled_out_are_read_as_they_are_meant(tmp_path: Path, family: str):
    renderer = renderer_of(family, tmp_path)
    form = renderer.call_form
    assert form is not None
    assert form.spelling is not None
    assert form.trigger
    vocabulary = Vocabulary(ModelFolder.open(tmp_path).tokenizer_json)
    properties: JsonValue = {"größe": {"type": "string"}, "n": {"type": "integer"}}
    tools = [
        ToolSchema(name="find", description="", parameters={"properties": properties}, timeout_s=1.0),
        ToolSchema(name="look", description="", parameters={}, timeout_s=1.0),
    ]
    blanks = "  if x < 3:\n\treturn </b>\n\n"
    calls = [
        ToolCall("find", json.dumps({"größe": blanks, "n": 3}, ensure_ascii=False)),
        ToolCall("look", "{}"),
        ToolCall("find", '{"größe": ""}'),
    ]
    for asked in (calls, calls[:1], calls[1:2]):
        text = (form.thinking or ("", ""))[1] + replace(form, lead="").written(asked)
        ids = [*vocabulary.encode(text, continues=True), renderer.stop_token_ids[0]]
        turn = renderer.parse(ids, finished=True, tools=tools)
        assert (turn.problem, turn.message.content) == (None, "")
        read = [(call.name, json.loads(call.arguments)) for call in turn.message.tool_calls]
        assert read == [(call.name, json.loads(call.arguments)) for call in asked]


@pytest.mark.parametrize(
    ("template", "tokenizer", "form"),
    [
        (small.CHATML, small.byte_level, ("", ("<think>\n", "</think>\n\n"))),
        (small.CHATML, small.prefixed, ("", None)),
        (
            small.CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}"),
            small.byte_level,
            (None, ("", "</think>\n\n")),
        ),
    ],
)
def test_reasoning_has_a_place_where_its_marks_are_tokens(
    tmp_path: Path, template: str, tokenizer: Callable[[], str], form: tuple[object, object]
):
    renderer = open_renderer(ModelFolder.open(small.write_folder(tmp_path, template, tokenizer())))
    assert isinstance(renderer, FormsCalls)
    found = renderer.call_form
    assert found is not None
    assert (found.lead, found.thinking) == form


def test_numbers_that_no_float_holds_stay_as_they_were_written(tmp_path: Path):
    for renderer in (
        renderer_of("qwen3", tmp_path / "a"),
        open_renderer(ModelFolder.open(small.write_folder(tmp_path / "b"))),
    ):
        vocabulary = Vocabulary(small.byte_level())
        text = '<tool_call>\n{"name": "a", "arguments": {"x": 1e999, "y": [-2E+400]}}\n</tool_call>'
        turn = renderer.parse(vocabulary.encode(text, continues=True), finished=True)
        (call,) = turn.message.tool_calls
        assert call.arguments == '{"x": 1e999, "y": [-2E+400]}'
        assert json.loads(call.arguments)["x"] == float("inf")
