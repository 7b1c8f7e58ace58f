"""What a client wants of its tools: what the engine is asked for, and what is refused and why."""

import json
from pathlib import Path
from typing import cast

import pytest

import rendering_models as small
from gateways import Json, always, fronted
from sostenuto.runtime.config import GatewaySettings
from sostenuto.runtime.engines.wire import Feature
from sostenuto.runtime.gateway.terms import Terms
from sostenuto.types import Purpose

PLACE: Json = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
NO_GRAMMAR: Json = {"features": frozenset[Feature]()}
# Opens the reasoning, and has no tokens for its marks.
UNMARKED = small.CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}")


def chat(choice: object = None, **tool: object) -> tuple[str, Json]:
    functions = [
        {"type": "function", "function": {"name": name, "parameters": PLACE, **tool}}
        for name in ("look", "find")
    ]
    asked = {"messages": [{"role": "user", "content": "Hello"}], "tools": functions}
    return "/v1/chat/completions", asked | ({"tool_choice": choice} if choice else {})


def messages(choice: object = None, **tool: object) -> tuple[str, Json]:
    tools = [{"name": name, "input_schema": PLACE, **tool} for name in ("look", "find")]
    asked: Json = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 50, "tools": tools}
    return "/v1/messages", asked | ({"tool_choice": choice} if choice else {})


def responses(choice: object = None, **tool: object) -> tuple[str, Json]:
    tools = [{"type": "function", "name": name, "parameters": PLACE, **tool} for name in ("look", "find")]
    return "/v1/responses", {"input": "Hello", "tools": tools} | ({"tool_choice": choice} if choice else {})


CHOICES = {
    "chat: required": chat("required"),
    "chat: a function": chat({"type": "function", "function": {"name": "find"}}),
    "chat: some": chat(
        {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "required",
                "tools": [{"type": "function", "function": {"name": "find"}}],
            },
        }
    ),
    "messages: any": messages({"type": "any"}),
    "messages: a tool": messages({"type": "tool", "name": "find"}),
    "responses: required": responses("required"),
    "responses: a function": responses({"type": "function", "name": "find"}),
    "responses: some": responses({"type": "allowed_tools", "mode": "required", "tools": [{"name": "find"}]}),
}
STRICT = {
    "tools.0.function.strict": chat(strict=True),
    "tools.0.strict of messages": messages(strict=True),
    "tools.0.strict of responses": responses(strict=True),
}
HELD = {**{name: (*asked, "tool_choice") for name, asked in CHOICES.items()}} | {
    name: (*asked, name.partition(" ")[0]) for name, asked in STRICT.items()
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.write_folder(tmp_path_factory.mktemp("model"))


def tags_of(format_: object) -> list[Json]:
    """Every tag of a structural tag whose content is JSON."""
    if isinstance(format_, list):
        return [tag for part in cast("list[object]", format_) for tag in tags_of(part)]
    if not isinstance(format_, dict):
        return []
    one = cast("Json", format_)
    if one.get("type") == "tag" and one["content"]["type"] == "json_schema":
        return [one]
    return tags_of(list(one.values()))


@pytest.mark.parametrize("asked", CHOICES)
async def test_a_forced_call_is_held_to_its_tools_and_the_model_is_told_of_all(model: Path, asked: str):
    path, body = CHOICES[asked]
    async with fronted(model, always("yes")) as front:
        assert (await front.post(path, body)).status == 200
        assert (await front.post(path, {**body, "tool_choice": None})).status == 200
        forced, free = front.engine.requests
        assert forced.token_ids == free.token_ids
        assert free.sampling.grammar is None
        assert forced.sampling.grammar is not None
        tag = json.loads(forced.sampling.grammar.structural_tag or "")
        names = {json.loads(each["begin"].partition("\n")[2] + "0}")["name"] for each in tags_of(tag)}
        assert names == ({"find", "look"} if asked.endswith(("required", "any")) else {"find"})
        assert all(each["content"]["json_schema"] == PLACE for each in tags_of(tag))


@pytest.mark.parametrize("asked", STRICT)
async def test_a_strict_tool_is_held_to_its_schema_among_text(model: Path, asked: str):
    path, body = STRICT[asked]
    async with fronted(model, always("yes")) as front:
        assert (await front.post(path, body)).status == 200
        (request,) = front.engine.requests
        assert request.sampling.grammar is not None
        assert '"triggered_tags"' in (request.sampling.grammar.structural_tag or "")


async def test_strict_is_ignored_where_the_gateway_is_told_so(model: Path):
    path, body = chat(strict=True)
    for features in (frozenset({Feature.GRAMMAR}), frozenset[Feature]()):
        settings = GatewaySettings(strict_tools=False)
        async with fronted(model, always("yes"), settings=settings, engine={"features": features}) as front:
            assert (await front.post(path, body)).status == 200
            assert front.engine.requests[0].sampling.grammar is None


def told_of(reply: Json) -> tuple[str, str]:
    return reply["error"]["param"], reply["error"]["message"]


@pytest.mark.parametrize("asked", HELD)
async def test_an_engine_without_grammars_refuses_by_key_and_remedy(model: Path, asked: str):
    path, body, key = HELD[asked]
    async with fronted(model, always("yes"), engine=NO_GRAMMAR) as front:
        reply = await front.post(path, body)
        assert reply.status == 400
        assert told_of(reply.json)[0] == key
        assert "llguidance" in told_of(reply.json)[1]
        assert front.engine.requests == []


@pytest.mark.parametrize("asked", HELD)
async def test_a_form_that_no_grammar_can_say_is_refused(tmp_path: Path, asked: str):
    path, body, key = HELD[asked]
    folder = small.write_folder(tmp_path, UNMARKED, small.prefixed())
    async with fronted(folder, always("yes")) as front:
        reply = await front.post(path, body)
        assert (reply.status, told_of(reply.json)[0]) == (400, key)
        assert "the form in which this model writes calls" in told_of(reply.json)[1]


@pytest.mark.parametrize("asked", HELD)
async def test_a_program_that_is_trained_cannot_force_calls(model: Path, asked: str):
    path, body, key = HELD[asked]
    async with fronted(model, always("yes")) as front:
        resident = front.gateway.sessions.open("task-1", Terms(purpose=Purpose.TRAIN))
        key_of_it = front.gateway.keys.mint("task-1")
        reply = await front.post(path, body, {"Authorization": f"Bearer {key_of_it}"})
        assert (reply.status, told_of(reply.json)[0]) == (400, key)
        assert "training recomputes the whole distribution" in told_of(reply.json)[1]
        assert front.engine.requests == []
        front.gateway.sessions.end(resident)


@pytest.mark.parametrize(
    "asked",
    [
        chat({"type": "function", "function": {"name": "b"}}),
        chat(
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"function": {"name": "b"}}]},
            }
        ),
        messages({"type": "tool", "name": "b"}),
        messages({"type": "tool"}),
        responses({"type": "function", "name": "b"}),
        responses({"type": "allowed_tools", "mode": "required", "tools": []}),
    ],
)
async def test_a_choice_of_what_is_not_there_is_refused(model: Path, asked: tuple[str, Json]):
    path, body = asked
    async with fronted(model, always("yes")) as front:
        reply = await front.post(path, body)
        assert (reply.status, told_of(reply.json)[0]) == (400, "tool_choice")


async def test_what_the_engine_says_of_a_schema_comes_under_the_key_that_asked(model: Path):
    path, body = chat("required")
    async with fronted(model, always("yes"), engine={"refuses": 400}) as front:
        reply = await front.post(path, body)
        assert (reply.status, told_of(reply.json)[0]) == (400, "tool_choice")
        assert "its schema cannot be held to" in told_of(reply.json)[1]
