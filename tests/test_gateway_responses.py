"""The gateway's surface for clients of OpenAI's Responses, over HTTP."""

import json
from pathlib import Path
from typing import Any

import pytest

from gateways import Front, Json, Reply, always, fronted
from scripted import Script, calls, says, write_tokenizer_folder
from sostenuto.runtime.config import GatewaySettings
from sostenuto.runtime.gateway.replies import Past, Replies
from sostenuto.types import Message, ToolCall

LOOK: Json = {
    "type": "function",
    "name": "look",
    "description": "Look at a place.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    "strict": True,
}
PROGRAM = {"X-Program-Id": "a"}
TOOL_THEN_TEXT: Script = lambda _: (calls(("look", '{"place": "attic"}')), says("It is dusty."))  # noqa: E731
THINKS: Script = lambda _: [  # noqa: E731
    Message("assistant", "So be it.", (ToolCall("look", '{"place": "attic"}'),), "Where was it?"),
    says("It is dusty."),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer_folder(tmp_path_factory.mktemp("model"))


async def send(front: Front, given: object, headers: dict[str, str] | None = None, **more: object) -> Reply:
    return await front.post("/v1/responses", {"model": "default", "input": given, **more}, headers)


def events_of(body: bytes) -> list[tuple[str, Any]]:
    """The name and the data of each."""
    found: list[tuple[str, Any]] = []
    for block in body.decode().strip().split("\n\n"):
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def result_of(call: Json) -> Json:
    return {"type": "function_call_output", "call_id": call["call_id"], "output": "dust"}


async def test_items_go_on_token_by_token(model: Path):
    async with fronted(model, THINKS) as front:
        asked = [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]
        first = await send(front, asked, PROGRAM, instructions="You help.", tools=[LOOK])
        assert first.json["status"] == "completed"
        reasoning, message, call = first.json["output"]
        assert reasoning["content"] == [{"type": "reasoning_text", "text": "Where was it?"}]
        assert message["content"][0]["text"] == "So be it."
        details = first.json["usage"]["output_tokens_details"]
        assert 0 < details["reasoning_tokens"] < first.json["usage"]["output_tokens"]
        assert (call["name"], call["arguments"]) == ("look", '{"place": "attic"}')
        history = [*asked, *first.json["output"], result_of(call)]
        second = await send(front, history, PROGRAM, instructions="You help.", tools=[LOOK])
        assert second.headers["X-Sostenuto-Record"] == "extended"
        assert second.json["output"][0]["content"][0]["text"] == "It is dusty."
        usage = second.json["usage"]
        assert usage["input_tokens_details"]["cached_tokens"] == first.json["usage"]["total_tokens"]
    (record,) = front.ended.records
    assert len(record.sequences) == 1


async def test_the_id_of_a_reply_stands_for_all_that_came_before_it(model: Path):
    async with fronted(model, TOOL_THEN_TEXT) as front:
        first = await send(front, "Hello", PROGRAM, instructions="You help.", tools=[LOOK])
        (call,) = first.json["output"]
        after = {"previous_response_id": first.json["id"], "instructions": "You help.", "tools": [LOOK]}
        second = await send(front, [result_of(call)], PROGRAM, **after)
        assert second.headers["X-Sostenuto-Record"] == "extended"
        assert second.json["previous_response_id"] == first.json["id"]
        after["previous_response_id"] = second.json["id"]
        third = await send(front, "And now?", PROGRAM, **after)
        assert third.headers["X-Sostenuto-Record"] == "extended"
        assert third.json["usage"]["input_tokens"] > second.json["usage"]["input_tokens"]
    (record,) = front.ended.records
    assert len(record.sequences) == 1


async def test_a_reply_that_is_not_there_is_said_so(model: Path):
    async with fronted(model, always("yes")) as front:
        kept = await send(front, "Hello", PROGRAM)
        unkept = await send(front, "Hi", PROGRAM, store=False)
        ephemeral = await send(front, "Hello")
        for previous, headers in (
            (kept.json["id"], {"X-Program-Id": "b"}),
            (kept.json["id"], None),
            (unkept.json["id"], PROGRAM),
            (ephemeral.json["id"], None),
            ("resp_none", PROGRAM),
        ):
            reply = await send(front, "More", headers, previous_response_id=previous)
            error = reply.json["error"]
            assert (reply.status, error["code"]) == (400, "previous_response_not_found")
            assert error["param"] == "previous_response_id"
        front.gateway.sessions.release("a")
        reply = await send(front, "More", PROGRAM, previous_response_id=kept.json["id"])
        assert reply.status == 400


async def test_a_stream_says_the_same_as_a_reply(model: Path):
    async with fronted(model, THINKS) as front:
        whole = await send(front, "Hello", tools=[LOOK])
        streamed = await send(front, "Hello", tools=[LOOK], stream=True)
        events = events_of(streamed.body)
    assert all(name == data["type"] for name, data in events)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert [events[0][0], events[-1][0]] == ["response.created", "response.completed"]
    said: dict[str, str] = {"reasoning_text": "", "output_text": "", "function_call_arguments": ""}
    for name, data in events:
        if name.endswith(".delta"):
            said[name.split(".")[1]] += data["delta"]
    assert said == {
        "reasoning_text": "Where was it?",
        "output_text": "So be it.",
        "function_call_arguments": '{"place": "attic"}',
    }
    done = [data["item"] for name, data in events if name == "response.output_item.done"]
    assert done == events[-1][1]["response"]["output"]
    assert [item["type"] for item in done] == [item["type"] for item in whole.json["output"]]
    assert events[-1][1]["response"]["usage"] == whole.json["usage"]


async def test_text_is_told_while_it_is_sampled(model: Path):
    said = "a story of many words, one after the other"
    async with fronted(model, always(said), engine={"token_s": 0.05}) as front:
        streamed = await send(front, "Hello", stream=True)
    events = events_of(streamed.body)
    deltas = [data["delta"] for name, data in events if name == "response.output_text.delta"]
    assert len(deltas) > 1
    (done,) = [data["text"] for name, data in events if name == "response.output_text.done"]
    assert "".join(deltas) == done == said
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))


async def test_a_reply_that_is_cut_is_incomplete(model: Path):
    async with fronted(model, always("a long story")) as front:
        cut = await send(front, "Hello", max_output_tokens=1)
        assert cut.json["status"] == "incomplete"
        assert cut.json["incomplete_details"] == {"reason": "max_output_tokens"}
        streamed = await send(front, "Hello", max_output_tokens=1, stream=True)
        assert events_of(streamed.body)[-1][0] == "response.incomplete"


async def test_log_probabilities_come_when_they_are_included(model: Path):
    async with fronted(model, always("yes")) as front:
        reply = await send(front, "Hello", include=["message.output_text.logprobs"])
        logprobs = reply.json["output"][0]["content"][0]["logprobs"]
        assert len(logprobs) == reply.json["usage"]["output_tokens"]
        assert {entry["logprob"] for entry in logprobs} == {-0.5}


async def test_a_failure_in_a_stream_that_has_begun_is_an_event_of_it(model: Path):
    settings = GatewaySettings(keep_alive_s=0.02)
    async with fronted(model, always("yes"), settings=settings, engine={"decode_s": 0.15}) as front:
        front.engine.broken = "the GPU fell off"
        streamed = await send(front, "Hello", stream=True)
    last = streamed.body.decode().strip().split("\n\n")[-1]
    ((name, data),) = events_of(last.encode())
    assert (name, data["type"], data["code"]) == ("error", "error", "engine_failure")
    assert "GPU" in data["error"]["message"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": {}}, "input"),
        ({"input": [{"role": "assistant", "content": "So"}]}, "input"),
        ({"input": [{"role": "king", "content": "So"}]}, "input.0.role"),
        ({"input": [{"content": "So"}]}, "input.0.role"),
        ({"input": [{"type": "computer_call_output"}]}, "input.0.type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
        ({"input": [{"type": "function_call", "call_id": "x"}]}, "input.0.name"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tools": [{**LOOK, "parameters": {"type": "thing"}}]}, "tools.0.parameters.type"),
        ({"tools": [LOOK], "tool_choice": {"type": "function", "name": "b"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
async def test_bad_input_is_400_and_names_the_key(model: Path, changes: Json, field: str):
    async with fronted(model, always("yes")) as front:
        reply = await front.post("/v1/responses", {"input": "Hello", **changes})
        assert (reply.status, reply.json["error"]["param"]) == (400, field)
        assert front.resident == 0


def test_of_many_replies_the_oldest_are_forgotten():
    replies = Replies(kept=2)
    for name in ("a", "b", "c"):
        replies.keep(name, Past((Message("user", name),)))
    assert [replies.find(name) is not None for name in ("a", "b", "c")] == [False, True, True]


def test_of_long_replies_only_the_newest_stays():
    replies = Replies(characters=10)
    for name in ("a", "b"):
        replies.keep(name, Past((Message("user", "word " * 9),)))
    assert (len(replies), replies.find("b") is not None) == (1, True)
