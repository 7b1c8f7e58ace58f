"""Calls that a client forces: with random weights, every reply is a call that is valid for its schema."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import rendering_models as small
from forced_models import Real, random_model, real_gateway
from gateways import events_of
from sostenuto.runtime.rendering.choice import open_renderer
from sostenuto.runtime.rendering.folder import ModelFolder
from sostenuto.runtime.rendering.library import LibraryRenderer

pytestmark = pytest.mark.timeout(900)
"""Each runs a real engine for many turns."""

Json = dict[str, Any]

MODELS = {
    "of the library": (small.THINKING, small.byte_level, "qwen3"),
    "by its template": (small.CHATML, small.byte_level, "llama"),
    "without marks of its own": (small.CHATML, small.prefixed, "llama"),
}


def closed(**properties: Json) -> Json:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


WORD = {"type": "string", "maxLength": 5}
TOOLS: dict[str, Json] = {
    "nested": closed(
        at=closed(
            x={"type": "integer", "minimum": -9, "maximum": 99}, deeper=closed(flag={"type": "boolean"})
        )
    ),
    "choices": closed(color={"enum": ["red", "grün", "青"]}, size={"enum": [1, 2.5, None]}),
    "lists": closed(rows={"type": "array", "items": closed(word=WORD), "minItems": 1, "maxItems": 3}),
    "unicode.words": closed(größe=WORD, 名前={"type": "string", "pattern": "^[あ-ん]{2,4}$"}),
    "numbers": closed(some={"type": "number"}, whole={"type": "integer", "maximum": 1000, "minimum": 0}),
    "either": {
        "type": "object",
        "properties": {"one": {"anyOf": [{"$ref": "#/$defs/word"}, {"type": "null"}]}, "other": WORD},
        "required": ["one"],
        "additionalProperties": False,
        "$defs": {"word": WORD},
    },
    "nothing": closed(),
}
THINKS = small.CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}")
CHAT = "/v1/chat/completions"
ASKED = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1500}


def function(name: str, **more: object) -> Json:
    return {"type": "function", "function": {"name": name, "parameters": TOOLS[name], **more}}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    template, tokenizer, kind = MODELS[request.param]
    return random_model(tmp_path_factory.mktemp("model"), template, tokenizer(), kind)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("plain"), small.CHATML, small.byte_level())


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("thinker"), THINKS, small.byte_level())


def check_calls(calls: list[tuple[str, str]], allowed: Collection[str]) -> None:
    assert calls
    for name, arguments in calls:
        assert name in allowed
        jsonschema.validate(json.loads(arguments, parse_constant=pytest.fail), TOOLS[name])


def calls_of(message: Json) -> list[tuple[str, str]]:
    made = [call["function"] for call in message.get("tool_calls", ())]
    return [(call["name"], call["arguments"]) for call in made]


def streamed_calls(events: list[Any]) -> list[tuple[str, str]]:
    names: list[str] = []
    arguments: list[str] = []
    for event in events[:-1]:
        for call in event["choices"][0]["delta"].get("tool_calls", ()):
            if call["index"] == len(names):
                names.append(call["function"]["name"])
                arguments.append("")
            arguments[call["index"]] += call["function"]["arguments"]
    return list(zip(names, arguments, strict=True))


def test_one_of_the_models_is_rendered_by_the_library(tmp_path: Path):
    template, tokenizer, kind = MODELS["of the library"]
    folder = random_model(tmp_path, template, tokenizer(), kind)
    assert isinstance(open_renderer(ModelFolder.open(folder)), LibraryRenderer)


async def test_a_named_function_is_called_once_with_valid_arguments(model: Path, tmp_path: Path):
    async with real_gateway(model, tmp_path) as real:
        for seed, name in enumerate(TOOLS):
            choice = {"type": "function", "function": {"name": name}}
            body = {**ASKED, "tools": [function(one) for one in TOOLS], "tool_choice": choice, "seed": seed}
            reply = await real.post(CHAT, body)
            assert reply.status == 200, reply.body
            chosen = reply.json["choices"][0]
            assert (chosen["finish_reason"], chosen["message"]["content"]) == ("tool_calls", None)
            streamed = events_of((await real.post(CHAT, {**body, "stream": True})).body)
            assert streamed[-2]["choices"][0]["finish_reason"] == "tool_calls"
            for calls in (calls_of(chosen["message"]), streamed_calls(streamed)):
                assert len(calls) == 1
                check_calls(calls, {name})


async def test_a_required_call_is_of_any_tool_and_there_may_be_several(plain: Path, tmp_path: Path):
    body = {**ASKED, "tools": [function(name) for name in TOOLS], "tool_choice": "required"}
    names: set[str] = set()
    counts: set[int] = set()
    async with real_gateway(plain, tmp_path) as real:
        for seed in range(12):
            calls = await whole(real, {**body, "seed": seed}, TOOLS.keys())
            names |= {name for name, _ in calls}
            counts.add(len(calls))
            assert len(await whole(real, {**body, "seed": seed, "parallel_tool_calls": False}, names)) <= 1
        two = ["lists", "choices"]
        among = {"mode": "required", "tools": [function(name) for name in two]}
        choice = {"type": "allowed_tools", "allowed_tools": among}
        for seed in range(4):
            await whole(real, {**body, "tool_choice": choice, "seed": seed}, set(two))
    assert len(names) > 1
    assert max(counts) > 1


async def test_anthropics_and_responses_choices_force_as_well(plain: Path, tmp_path: Path):
    anthropic = [{"name": name, "input_schema": schema} for name, schema in TOOLS.items() if name.isalpha()]
    functions = [{"type": "function", "name": name, "parameters": s} for name, s in TOOLS.items()]
    async with real_gateway(plain, tmp_path) as real:
        choices: list[Json] = [
            {"type": "any", "disable_parallel_tool_use": True},
            {"type": "tool", "name": "lists"},
        ]
        for choice in choices:
            body = {**ASKED, "model": "default", "tools": anthropic, "tool_choice": choice}
            reply = (await real.post("/v1/messages", body)).json
            assert reply["stop_reason"] == "tool_use", reply
            (block,) = (block for block in reply["content"] if block["type"] != "thinking")
            check_calls([(block["name"], json.dumps(block["input"]))], {choice.get("name", block["name"])})
        asked = {"input": "Hello", "max_output_tokens": 1500, "tools": functions}
        for choice in ("required", {"type": "function", "name": "nested"}):
            body = {**asked, "tool_choice": choice, "parallel_tool_calls": False}
            reply = (await real.post("/v1/responses", body)).json
            (item,) = (item for item in reply["output"] if item["type"] != "reasoning")
            check_calls(
                [(item["name"], item["arguments"])], TOOLS.keys() if choice == "required" else {"nested"}
            )


async def test_reasoning_may_come_first_and_ends(thinker: Path, tmp_path: Path):
    body = {**ASKED, "tools": [function("choices")], "tool_choice": "required", "parallel_tool_calls": False}
    thoughts: list[str] = []
    async with real_gateway(thinker, tmp_path) as real:
        for seed in range(6):
            (chosen,) = (await real.post(CHAT, {**body, "seed": seed})).json["choices"]
            assert chosen["finish_reason"] == "tool_calls"
            check_calls(calls_of(chosen["message"]), {"choices"})
            thoughts.append(chosen["message"].get("reasoning_content", ""))
    assert any(thoughts)
    assert max(map(len, thoughts)) > 100


async def test_calls_of_strict_tools_are_valid_and_the_turn_is_free(plain: Path, tmp_path: Path):
    tools = [function("choices", strict=True), function("numbers")]
    made: list[tuple[str, str]] = []
    free = 0
    async with real_gateway(plain, tmp_path) as real:
        for seed in range(12):
            reply = await real.post(CHAT, {**ASKED, "tools": tools, "seed": seed, "max_tokens": 600})
            assert reply.status == 200, reply.body
            message = reply.json["choices"][0]["message"]
            made += calls_of(message)
            free += bool(message["content"])
    assert free
    assert made, "with these seeds some turns have calls"
    for name, arguments in made:
        if name == "choices":
            check_calls([(name, arguments)], {"choices"})
        else:
            assert isinstance(json.loads(arguments), dict)


async def test_an_answer_of_a_schema_may_come_in_the_place_of_a_call(plain: Path, tmp_path: Path):
    schema = closed(word=WORD)
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    body = {**ASKED, "tools": [function("choices", strict=True)], "response_format": form}
    kinds: set[str] = set()
    async with real_gateway(plain, tmp_path) as real:
        for seed in range(12):
            message = (await real.post(CHAT, {**body, "seed": seed})).json["choices"][0]["message"]
            if calls := calls_of(message):
                check_calls(calls, {"choices"})
            else:
                jsonschema.validate(json.loads(message["content"]), schema)
            kinds.add("call" if calls else "text")
    assert kinds == {"call", "text"}


async def whole(real: Real, body: Json, allowed: Collection[str]) -> list[tuple[str, str]]:
    """The calls of a reply, valid ones; none of one that was cut off at its limit."""
    chosen = (await real.post(CHAT, body)).json["choices"][0]
    calls = calls_of(chosen["message"])
    if chosen["finish_reason"] != "length":
        check_calls(calls, allowed)
    return calls
