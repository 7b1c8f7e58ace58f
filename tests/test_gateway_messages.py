"""The gateway's surface for Anthropic's clients, over HTTP."""

import json
from pathlib import Path
from typing import Any

import pytest

from gateways import Front, Json, Reply, always, fronted
from scripted import Script, calls, says, write_tokenizer_folder
from sostenuto.runtime.config import GatewaySettings
from sostenuto.types import Message, ToolCall

LOOK: Json = {
    "name": "look",
    "description": "Look at a place.",
    "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}
HELLO: list[Json] = [{"role": "user", "content": "Hello"}]
TOOL_THEN_TEXT: Script = lambda _: (calls(("look", '{"place": "attic"}')), says("It is dusty."))  # noqa: E731
THINKS: Script = lambda _: [  # noqa: E731
    Message("assistant", "So be it.", (ToolCall("look", '{"place": "attic"}'),), "Where was it?")
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer_folder(tmp_path_factory.mktemp("model"))


async def send(
    front: Front, messages: list[Json], headers: dict[str, str] | None = None, **more: object
) -> Reply:
    body = {"model": "default", "max_tokens": 200, "messages": messages, **more}
    return await front.post("/v1/messages", body, {"anthropic-version": "2026-10-21", **(headers or {})})


def events_of(body: bytes) -> list[tuple[str, Any]]:
    """The name and the data of each."""
    found: list[tuple[str, Any]] = []
    for block in body.decode().strip().split("\n\n"):
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


async def test_a_tool_call_and_its_result_go_on_token_by_token(model: Path):
    async with fronted(model, TOOL_THEN_TEXT) as front:
        program = {"X-Program-Id": "a"}
        system = [{"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral"}}]
        first = await send(front, HELLO, program, system=system, tools=[LOOK])
        assert first.json["stop_reason"] == "tool_use"
        (call,) = first.json["content"]
        assert (call["type"], call["name"], call["input"]) == ("tool_use", "look", {"place": "attic"})
        result = {
            "type": "tool_result",
            "tool_use_id": call["id"],
            "content": [{"type": "text", "text": "dust"}],
        }
        history = [*HELLO, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        second = await send(front, history, program, system=system, tools=[LOOK])
        assert second.headers["X-Sostenuto-Record"] == "extended"
        assert second.json["content"] == [{"type": "text", "text": "It is dusty."}]
        assert second.json["stop_reason"] == "end_turn"
        seen = first.json["usage"]["input_tokens"] + first.json["usage"]["output_tokens"]
        assert second.json["usage"]["cache_read_input_tokens"] == seen
        assert second.json["usage"]["input_tokens"] > 0
    (record,) = front.ended.records
    assert len(record.sequences) == 1


async def test_a_stream_says_the_same_as_a_reply_in_named_events(model: Path):
    async with fronted(model, THINKS) as front:
        thinking = {"type": "enabled", "budget_tokens": 1024}
        whole = await send(front, HELLO, tools=[LOOK], thinking=thinking)
        streamed = await send(front, HELLO, tools=[LOOK], thinking=thinking, stream=True)
        events = events_of(streamed.body)
    assert all(name == data["type"] for name, data in events)
    names = [name for name, _ in events]
    assert (names[0], names[-2:]) == ("message_start", ["message_delta", "message_stop"])
    blocks: list[Json] = []
    for name, data in events:
        if name == "content_block_start":
            assert data["index"] == len(blocks)
            blocks.append(data["content_block"])
        elif name == "content_block_delta":
            delta = data["delta"]
            match delta["type"]:
                case "text_delta":
                    blocks[-1]["text"] += delta["text"]
                case "thinking_delta":
                    blocks[-1]["thinking"] += delta["thinking"]
                case "input_json_delta":
                    blocks[-1]["input"] = json.loads(delta["partial_json"])
                case _:
                    assert delta["type"] == "signature_delta"
    for block in [*blocks, *whole.json["content"]]:
        block.pop("id", None)
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"]
    assert blocks == whole.json["content"]
    closing = events[-2][1]
    assert closing["delta"]["stop_reason"] == "tool_use"
    assert closing["usage"]["output_tokens"] == whole.json["usage"]["output_tokens"]


async def test_text_is_told_while_it_is_sampled(model: Path):
    said = "a story of many words, one after the other"
    async with fronted(model, always(said), engine={"token_s": 0.05}) as front:
        streamed = await send(front, HELLO, stream=True)
    deltas = [data["delta"] for name, data in events_of(streamed.body) if name == "content_block_delta"]
    assert len(deltas) > 1
    assert "".join(delta["text"] for delta in deltas) == said


async def test_reasoning_goes_back_and_forth_and_is_shown_only_to_those_who_asked(model: Path):
    async with fronted(model, THINKS) as front:
        program = {"X-Program-Id": "a"}
        first = await send(front, HELLO, program, tools=[LOOK], thinking={"type": "adaptive"})
        content = first.json["content"]
        assert content[0]["thinking"] == "Where was it?"
        result = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": "dust"}
        history = [*HELLO, {"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
        second = await send(front, history, program, tools=[LOOK])
        assert [block["type"] for block in second.json["content"]] == ["text", "tool_use"]
        assert second.headers["X-Sostenuto-Record"] == "extended"


async def test_what_claude_code_writes_anew_into_each_system_prompt_does_not_rewrite_history(model: Path):
    async with fronted(model, always("yes")) as front:
        program = {"X-Claude-Code-Session-Id": "a"}

        def system(number: int) -> list[Json]:
            header = {"type": "text", "text": f"x-anthropic-billing-header: cch={number};"}
            return [header, {"type": "text", "text": "You help."}]

        first = await send(front, HELLO, program, system=system(1))
        said = {"role": "assistant", "content": first.json["content"]}
        more = {"role": "user", "content": "More"}
        second = await send(front, [*HELLO, said, more], program, system=system(2))
        assert second.headers["X-Sostenuto-Record"] == "extended"


async def test_the_end_of_a_reply_has_its_reason(model: Path):
    async with fronted(model, always("a long story")) as front:
        cut = await send(front, HELLO, max_tokens=1)
        assert (cut.json["stop_reason"], cut.json["usage"]["output_tokens"]) == ("max_tokens", 1)
        told = await send(front, HELLO, stop_sequences=["END", "story"])
        assert (told.json["stop_reason"], told.json["stop_sequence"]) == ("stop_sequence", "story")


async def test_a_stream_pings_while_its_program_waits(model: Path):
    settings = GatewaySettings(keep_alive_s=0.02)
    async with fronted(model, always("yes"), settings=settings, engine={"decode_s": 0.15}) as front:
        streamed = await send(front, HELLO, stream=True)
    names = [name for name, _ in events_of(streamed.body)]
    assert names[0] == "ping"
    assert names[-1] == "message_stop"


async def test_a_failure_in_a_stream_that_has_begun_is_an_event_of_it(model: Path):
    settings = GatewaySettings(keep_alive_s=0.02)
    async with fronted(model, always("yes"), settings=settings, engine={"decode_s": 0.15}) as front:
        front.engine.broken = "the GPU fell off"
        streamed = await send(front, HELLO, stream=True)
    name, data = events_of(streamed.body)[-1]
    assert (name, data["error"]["type"]) == ("error", "overloaded_error")


async def test_tokens_are_counted_as_the_call_would_be_rendered(model: Path):
    async with fronted(model, always("yes")) as front:
        prompt = {"model": "default", "messages": HELLO, "system": "You help.", "tools": [LOOK]}
        counted = await front.post("/v1/messages/count_tokens", prompt)
        called = await front.post("/v1/messages", {**prompt, "max_tokens": 9})
        assert counted.json == {"input_tokens": called.json["usage"]["input_tokens"]}
        untold = await front.post("/v1/messages/count_tokens", {**prompt, "tool_choice": {"type": "none"}})
        assert untold.json["input_tokens"] < counted.json["input_tokens"]
        wrong = await front.post("/v1/messages/count_tokens", {"messages": []})
        assert (wrong.status, wrong.json["error"]["param"]) == (400, "messages")
        assert len(front.ended.records) == 1


async def test_results_and_words_of_one_message_stay_in_their_order(model: Path):
    async with fronted(model, always("yes")) as front:
        history: list[Json] = [
            *HELLO,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t", "content": "dust"},
                    {"type": "text", "text": "Go on."},
                ],
            },
        ]
        await send(front, history, {"X-Program-Id": "a"}, tools=[LOOK])
        (resident,) = front.gateway.sessions.all()
        (lane,) = resident.session.lanes
        text = front.engine.renderer.parse(lane.record.token_ids, finished=False).message.content
        assert text.index("dust") < text.index("Go on.")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "So"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}
                ]
            },
            "messages.0.content.0.content.0",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]},
            "messages.0.content.0.name",
        ),
        ({"system": [{"type": "image"}]}, "system.0"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.input_schema"),
        ({"tools": [{"name": "a", "input_schema": {"type": "thing"}}]}, "tools.0.input_schema.type"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool", "name": "b"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"top_p": 2}, "top_p"),
    ],
)
async def test_bad_input_is_400_and_names_the_key(model: Path, changes: Json, field: str):
    async with fronted(model, always("yes")) as front:
        body = {"max_tokens": 9, "messages": HELLO, **changes}
        reply = await front.post("/v1/messages", {k: v for k, v in body.items() if v is not None})
        assert (reply.status, reply.json["type"]) == (400, "error")
        error = reply.json["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", field)
        assert reply.headers["Request-Id"]


async def test_refusals_have_the_names_that_its_clients_know(model: Path):
    async with fronted(model, always("yes"), environment={"SOSTENUTO_AGENT_KEY": "a" * 24}) as front:
        unknown = await send(front, HELLO)
        assert (unknown.status, unknown.json["error"]["type"]) == (401, "authentication_error")
        key = {"x-api-key": "a" * 24}
        other = await send(front, HELLO, key, model="gpt-9")
        assert (other.status, other.json["error"]["type"]) == (404, "not_found_error")
        long = await send(front, [{"role": "user", "content": "word " * 2000}], key)
        assert (long.status, long.json["error"]["message"][:20]) == (400, "prompt is too long: ")
        bearer = await send(front, HELLO, {"Authorization": "Bearer " + "a" * 24})
        assert bearer.status == 200
