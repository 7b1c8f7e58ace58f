"""What clients ask for and cannot have, in each dialect: an error of its form, and no engine is asked."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gateways import Front, Json, Reply, always, fronted
from scripted import write_tokenizer_folder
from sostenuto.runtime.gateway.terms import Terms
from sostenuto.types import Limits, Purpose

IMAGE = "data:image/png;base64,iVBORw0KGgo="
AGENT = {"SOSTENUTO_AGENT_KEY": "agent-key-0123456789", "SOSTENUTO_ADMIN_KEY": "admin-key-0123456789"}
BROKEN: Json = {"type": "object", "properties": {"a": {"type": "thing"}}}


class Dialect:
    """How one surface says things."""

    def __init__(self, path: str, prompt: Json, **more: Any) -> None:  # noqa: ANN401
        self.path = path
        self.prompt = prompt
        self.more = more

    def body(self, **changes: object) -> Json:
        return {"model": "default", **self.prompt, **changes}

    def told(self, reply: Reply) -> tuple[str | None, str]:
        """Key and message of an error, whose form is checked."""
        error = reply.json["error"]
        if self.path == "/v1/messages":
            assert reply.json["type"] == "error"
            assert set(error) == {"type", "message", "param"}
        else:
            assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["type"], str)
        return error["param"], error["message"]


def says(content: object) -> Json:
    return {"messages": [{"role": "user", "content": content}]}


def of(key: str, text: str) -> Json:
    return {key: text}


def tool(schema: Json) -> Json:
    return {"type": "function", "function": {"name": "look", "parameters": schema}}


CHAT = Dialect(
    "/v1/chat/completions",
    says("Hello"),
    long=says,
    image=(says([{"type": "image_url", "image_url": {"url": IMAGE}}]), "messages.0.content.0"),
    shown=(
        {
            "messages": [
                {"role": "user", "content": "Look"},
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "look"}}],
                },
                {
                    "role": "tool",
                    "tool_call_id": "c",
                    "content": [{"type": "image_url", "image_url": {"url": IMAGE}}],
                },
            ]
        },
        "messages.2.content.0",
    ),
    tools=({"tools": [tool(BROKEN)]}, "tools.0.function.parameters.properties.a.type"),
    not_object=({"tools": [tool({"type": "array"})]}, "tools.0.function.parameters"),
)
MESSAGES = Dialect(
    "/v1/messages",
    {**says("Hello"), "max_tokens": 20},
    long=says,
    image=(
        says(
            [
                {
                    "type": "image",
                    "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="},
                }
            ]
        ),
        "messages.0.content.0",
    ),
    shown=(
        {
            "messages": [
                {"role": "user", "content": "Look"},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "c",
                            "content": [{"type": "image", "source": {"type": "url", "url": IMAGE}}],
                        }
                    ],
                },
            ]
        },
        "messages.2.content.0.content.0",
    ),
    tools=({"tools": [{"name": "look", "input_schema": BROKEN}]}, "tools.0.input_schema.properties.a.type"),
    not_object=({"tools": [{"name": "look", "input_schema": {"type": "array"}}]}, "tools.0.input_schema"),
)
RESPONSES = Dialect(
    "/v1/responses",
    {"input": "Hello"},
    long=partial(of, "input"),
    image=(
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": IMAGE}]}]},
        "input.0.content.0",
    ),
    shown=(
        {
            "input": [
                {"role": "user", "content": "Look"},
                {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": [{"type": "input_image", "image_url": IMAGE}],
                },
            ]
        },
        "input.2.output.0",
    ),
    tools=(
        {"tools": [{"type": "function", "name": "look", "parameters": BROKEN}]},
        "tools.0.parameters.properties.a.type",
    ),
    not_object=(
        {"tools": [{"type": "function", "name": "look", "parameters": {"type": "array"}}]},
        "tools.0.parameters",
    ),
)
COMPLETIONS = Dialect("/v1/completions", {"prompt": "Hello"}, long=partial(of, "prompt"))
DIALECTS = {"chat": CHAT, "messages": MESSAGES, "responses": RESPONSES, "completions": COMPLETIONS}
WITH_MESSAGES = {name: one for name, one in DIALECTS.items() if one is not COMPLETIONS}
WITH_CHOICES = {"chat": CHAT, "completions": COMPLETIONS}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer_folder(tmp_path_factory.mktemp("model"))


async def refused(
    front: Front, dialect: Dialect, body: Json, status: int, headers: dict[str, str] | None = None
) -> tuple[str | None, str]:
    """What the error says; nothing was sampled, also when a stream was asked for."""
    told: set[tuple[str | None, str]] = set()
    for streams in (False, True):
        reply = await front.post(dialect.path, {**body, "stream": streams}, headers)
        assert reply.status == status, reply.body
        told.add(dialect.told(reply))
    assert front.engine.requests == []
    assert len(told) == 1
    return told.pop()


@pytest.mark.parametrize("name", DIALECTS)
async def test_a_model_that_is_not_served(model: Path, name: str):
    dialect = DIALECTS[name]
    async with fronted(model, always("yes")) as front:
        key, message = await refused(front, dialect, dialect.body(model="gpt-9"), 404)
        assert key == "model"
        assert "'gpt-9' is not served here; ask for" in message


@pytest.mark.parametrize("name", WITH_MESSAGES)
@pytest.mark.parametrize("what", ["image", "shown"])
async def test_an_image_to_a_model_of_text(model: Path, name: str, what: str):
    dialect = DIALECTS[name]
    changes, field = dialect.more[what]
    async with fronted(model, always("yes")) as front:
        key, message = await refused(front, dialect, dialect.body(**changes), 400)
        assert key == field
        assert "this model reads text, not" in message


@pytest.mark.parametrize("name", WITH_MESSAGES)
@pytest.mark.parametrize("what", ["tools", "not_object"])
async def test_a_tool_whose_schema_is_none(model: Path, name: str, what: str):
    dialect = DIALECTS[name]
    changes, field = dialect.more[what]
    async with fronted(model, always("yes")) as front:
        key, _ = await refused(front, dialect, dialect.body(**changes), 400)
        assert key == field


@pytest.mark.parametrize("name", DIALECTS)
async def test_a_conversation_beyond_the_context(model: Path, name: str):
    dialect = DIALECTS[name]
    async with fronted(model, always("yes")) as front:
        body = dialect.body(**dialect.more["long"]("word " * 2000))
        _, message = await refused(front, dialect, body, 400)
        assert "context ends at" in message or "prompt is too long" in message


@pytest.mark.parametrize("name", WITH_CHOICES)
async def test_several_choices_in_a_program_that_is_trained(model: Path, name: str):
    dialect = DIALECTS[name]
    async with fronted(model, always("yes"), environment=AGENT) as front:
        resident = front.gateway.sessions.open("task-1", Terms(purpose=Purpose.TRAIN))
        own = {"Authorization": f"Bearer {front.gateway.keys.mint('task-1')}"}
        key, message = await refused(front, dialect, dialect.body(n=2), 400, own)
        assert key == "n"
        assert "one choice at a time" in message
        front.gateway.sessions.end(resident)


@pytest.mark.parametrize("name", DIALECTS)
async def test_two_names_for_one_program(model: Path, name: str):
    dialect = DIALECTS[name]
    async with fronted(model, always("yes")) as front:
        body = dialect.body(program_id="one")
        _, message = await refused(front, dialect, body, 400, {"X-Program-Id": "two"})
        assert "'one'" in message
        assert "'two'" in message


@pytest.mark.parametrize("name", DIALECTS)
async def test_a_key_that_nobody_gave_and_one_whose_program_is_over(model: Path, name: str):
    dialect = DIALECTS[name]
    async with fronted(model, always("yes"), environment=AGENT) as front:
        for key in ("", "Bearer unknown-key"):
            _, message = await refused(
                front, dialect, dialect.body(), 401, {"Authorization": key} if key else None
            )
            assert "key" in message
        resident = front.gateway.sessions.open("task-1", Terms(limits=Limits()))
        own = {"Authorization": f"Bearer {front.gateway.keys.mint('task-1')}"}
        front.gateway.keys.program_over("task-1")
        front.gateway.sessions.end(resident)
        _, message = await refused(front, dialect, dialect.body(), 401, own)
        assert "over" in message


async def test_release_of_a_program_that_is_not_there(model: Path):
    admin = {"Authorization": f"Bearer {AGENT['SOSTENUTO_ADMIN_KEY']}"}
    async with fronted(model, always("yes"), environment=AGENT) as front:
        reply = await front.post("/programs/release", {"program_id": "nobody"}, admin)
        assert reply.status == 404
        assert reply.json["error"]["param"] == "program_id"
        assert "'nobody'" in reply.json["error"]["message"]


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b'{"a": NaN}'])
async def test_a_body_that_is_no_object(model: Path, name: str, data: bytes):
    dialect = DIALECTS[name]
    async with fronted(model, always("yes")) as front:
        reply = await front.post(dialect.path, None, data=data)
        assert reply.status == 400
        dialect.told(reply)
