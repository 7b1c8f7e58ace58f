"""The gateway's chat surface, over HTTP."""

from pathlib import Path

import anyio
import pytest

from gateways import HELLO, LOOK, Front, Json, Reply, always, events_of, fronted
from hosts import until
from scripted import calls, says, write_tokenizer_folder
from sostenuto.runtime.config import GatewaySettings
from sostenuto.runtime.engines.wire import Feature
from sostenuto.runtime.gateway.terms import Terms
from sostenuto.scheduler.settings import SchedulerSettings

TOOL_THEN_TEXT = (calls(("look", '{"place": "attic"}')), says("It is dusty."))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer_folder(tmp_path_factory.mktemp("model"))


async def two_turns(front: Front, headers: dict[str, str]) -> tuple[Json, Json]:
    """A tool call and what follows its result, as an agent sends them."""
    first = await front.chat(HELLO, headers=headers, tools=[LOOK], return_token_ids=True)
    message = first.json["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "dust"}
    second = await front.chat([*HELLO, message, result], headers=headers, tools=[LOOK], return_token_ids=True)
    assert second.headers["X-Sostenuto-Record"] == "extended"
    return first.json, second.json


async def test_a_tool_call_and_its_result_go_on_token_by_token(model: Path):
    async with fronted(model, lambda _: TOOL_THEN_TEXT) as front:
        first, second = await two_turns(front, {"X-Program-Id": "a"})
        choice = first["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        call = choice["message"]["tool_calls"][0]
        assert call["function"] == {"name": "look", "arguments": '{"place": "attic"}'}
        assert second["choices"][0]["message"]["content"] == "It is dusty."
        assert second["choices"][0]["finish_reason"] == "stop"
        seen = [*first["prompt_token_ids"], *choice["token_ids"]]
        assert second["prompt_token_ids"][: len(seen)] == seen
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == len(seen)
    (record,) = front.ended.records
    (sequence,) = record.sequences
    ids = [id_ for span in sequence for id_ in span.token_ids.tolist()]
    assert ids == [*second["prompt_token_ids"], *second["choices"][0]["token_ids"]]
    assert record.trained_tokens == len(choice["token_ids"]) + len(second["choices"][0]["token_ids"])


async def test_while_the_client_runs_its_tool_the_program_acts_and_its_kv_is_held(model: Path):
    async with fronted(model, lambda _: TOOL_THEN_TEXT) as front:
        await front.chat(HELLO, headers={"X-Program-Id": "a"}, tools=[LOOK])
        (phase,) = front.dispatcher.scheduler.snapshot().phases.values()
        assert phase == "acting"
        assert list(front.engine.held) == ["gateway/1"]


async def test_programs_that_are_idle_keep_nobody_out(model: Path):
    one_at_a_time = SchedulerSettings(live_programs=1, prepare_ahead=1)
    async with fronted(model, always("yes"), scheduler=one_at_a_time) as front:
        for name in "abc":
            with anyio.fail_after(10):
                reply = await front.chat(HELLO, headers={"X-Program-Id": name})
            assert reply.json["choices"][0]["message"]["content"] == "yes"
        assert front.resident == 3


async def test_a_client_that_rewrites_reasoning_blanks_and_arguments_still_continues(model: Path):
    said = calls(("look", '{"place": "attic"}'))
    async with fronted(model, lambda _: (said, says("ok"))) as front:
        first = await front.chat(HELLO, headers={"X-Program-Id": "a"}, tools=[LOOK])
        message = first.json["choices"][0]["message"]
        call = message["tool_calls"][0]
        written_anew = {**call, "function": {"name": "look", "arguments": '{ "place" : "attic"}'}}
        kept = {"role": "assistant", "content": "", "tool_calls": [written_anew]}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "dust"}
        second = await front.chat([*HELLO, kept, result], headers={"X-Program-Id": "a"}, tools=[LOOK])
        assert second.headers["X-Sostenuto-Record"] == "extended"


async def test_a_rewritten_history_is_a_branch_and_says_so(model: Path):
    async with fronted(model, always("yes"), engine={"may_rewrite": True}) as front:
        first = await front.chat(HELLO, headers={"X-Program-Id": "a"})
        message = {**first.json["choices"][0]["message"], "content": "no"}
        second = await front.chat(
            [*HELLO, message, {"role": "user", "content": "Why?"}], headers={"X-Program-Id": "a"}
        )
        assert second.headers["X-Sostenuto-Record"] == "branched"
    (record,) = front.ended.records
    assert len(record.sequences) == 2
    assert [sum(int(span.mask.sum()) for span in sequence) > 0 for sequence in record.sequences] == [
        True,
        True,
    ]


async def test_parallel_calls_of_one_program_are_lanes_of_one_record(model: Path):
    async with (
        fronted(model, always("yes"), engine={"decode_s": 0.05}) as front,
        anyio.create_task_group() as group,
    ):
        for text in ("one", "two", "three"):
            asked = [{"role": "user", "content": text}]
            group.start_soon(lambda asked=asked: front.chat(asked, headers={"X-Program-Id": "a"}))
    (record,) = front.ended.records
    assert len(record.sequences) == 3
    assert record.metrics["lanes"] == 3


async def test_unlabelled_calls_are_programs_of_their_own_and_hold_nothing(model: Path):
    async with fronted(model, always("yes")) as front:
        one, other = await front.chat(HELLO), await front.chat(HELLO)
        assert one.headers["X-Sostenuto-Program"] != other.headers["X-Sostenuto-Program"]
        assert front.resident == 0
        assert len(front.ended.records) == 2


async def test_nobody_gets_into_an_unlabelled_call_by_guessing_its_name(model: Path):
    async with (
        fronted(model, always("yes"), engine={"decode_s": 0.3}) as front,
        anyio.create_task_group() as group,
    ):
        group.start_soon(front.chat, HELLO)
        await until(lambda: front.engine.decoding == 1)
        for name in ("~1", "1", "gateway/1", "gateway/2"):
            await front.chat(HELLO, headers={"X-Program-Id": name})
        refused = await front.chat(HELLO, headers={"X-Program-Id": "~ 1"})
        assert refused.status == 400
    assert len(front.ended.records) == 5


async def test_a_stream_says_the_same_as_a_reply(model: Path):
    async with fronted(model, lambda _: TOOL_THEN_TEXT) as front:
        streamed = await front.chat(
            HELLO,
            tools=[LOOK],
            stream=True,
            stream_options={"include_usage": True},
            return_token_ids=True,
        )
        *chunks, usage, done = events_of(streamed.body)
        assert done == "[DONE]"
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == len(chunks[-1]["choices"][0]["token_ids"])
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert deltas[0]["role"] == "assistant"
        pieces = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert all(isinstance(piece["index"], int) for piece in pieces)
        assert "".join(piece["function"]["arguments"] for piece in pieces) == '{"place": "attic"}'
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_text_comes_while_it_is_sampled(model: Path):
    said = "one two three four five six seven eight nine ten"
    async with fronted(model, always(said), engine={"token_s": 0.05}) as front:
        url, body = front.gateway.url + "/v1/chat/completions", {"messages": HELLO, "stream": True}
        pieces: list[bytes] = []
        async with front.http.post(url, json=body) as response:
            async for piece, _ in response.content.iter_chunks():
                pieces.append(piece)
                if b"three" in piece:
                    assert front.engine.turns == {"gateway/1": 1}
                    assert front.resident == 1
        chunks = events_of(b"".join(pieces))[:-1]
        told = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
        assert "".join(told) == said
        assert len([text for text in told if text]) > 3


async def test_a_stream_stays_alive_while_its_program_waits(model: Path):
    settings = GatewaySettings(keep_alive_s=0.02)
    async with fronted(model, always("yes"), settings=settings, engine={"decode_s": 0.15}) as front:
        streamed = await front.chat(HELLO, stream=True)
        before, _, _ = streamed.body.partition(b"data: ")
        assert before.startswith(b": ")
        assert events_of(streamed.body)[-1] == "[DONE]"


async def test_a_repeated_call_joins_the_first_and_does_not_run_twice(model: Path):
    async with fronted(model, always("yes"), engine={"decode_s": 0.05}) as front:
        headers = {"X-Program-Id": "a", "x-stainless-retry-count": "0"}
        again = {**headers, "x-stainless-retry-count": "1"}
        replies: list[Reply] = []

        async def ask(with_headers: dict[str, str]) -> None:
            replies.append(await front.chat(HELLO, headers=with_headers))

        async with anyio.create_task_group() as group:
            group.start_soon(ask, headers)
            await anyio.sleep(0.02)
            group.start_soon(ask, again)
        late = await front.chat(HELLO, headers=again)
        assert late.headers["X-Sostenuto-Record"] == "repeated"
        assert {reply.json["choices"][0]["message"]["content"] for reply in [*replies, late]} == {"yes"}
        assert front.engine.turns == {"gateway/1": 1}
    (record,) = front.ended.records
    assert len(record.sequences) == 1


async def test_a_client_that_goes_away_frees_all_that_it_held(model: Path):
    async with fronted(model, always("yes"), engine={"decode_s": 30.0}) as front:
        with anyio.move_on_after(0.1):
            await front.chat(HELLO, headers={"X-Program-Id": "a"})
        await until(lambda: not front.engine.decoding and not front.resident)
        front.engine.decode_s = 0.0
        reply = await front.chat(HELLO, headers={"X-Program-Id": "a"})
        assert reply.status == 200
    (record,) = front.ended.records
    assert len(record.sequences) == 1


async def test_an_engine_that_refuses_is_503_and_the_gateway_goes_on(model: Path):
    async with fronted(model, always("yes")) as front:
        front.engine.broken = "the GPU fell off"
        reply = await front.chat(HELLO, headers={"X-Program-Id": "a"})
        assert (reply.status, "GPU" in reply.json["error"]["message"]) == (503, True)
        assert "Retry-After" in reply.headers
        front.engine.broken = ""
        assert (await front.chat(HELLO, headers={"X-Program-Id": "a"})).status == 200


async def test_a_program_that_says_it_is_final_frees_at_once(model: Path):
    async with fronted(model, always("yes"), engine={"may_rewrite": True}) as front:
        await front.chat(HELLO, headers={"X-Program-Id": "a"})
        assert front.resident == 1
        await front.chat(HELLO, headers={"X-Program-Id": "a", "X-Program-Final": "true"})
        assert front.resident == 0
        assert len(front.ended.records) == 1


async def test_a_sub_agent_belongs_to_the_program_of_its_parent(model: Path):
    async with fronted(model, always("yes")) as front:
        one = await front.chat(HELLO, headers={"X-Session-ID": "main"})
        child = {"X-Session-ID": "sub", "X-Parent-Session-ID": "main"}
        other = await front.chat([{"role": "user", "content": "Find it."}], headers=child)
        assert one.headers["X-Sostenuto-Program"] == other.headers["X-Sostenuto-Program"]
        assert len(front.gateway.sessions) == 1
    (record,) = front.ended.records
    assert len(record.sequences) == 2


async def test_a_silent_program_is_over_after_a_while(model: Path):
    settings = GatewaySettings(hold_s=0.05, forget_s=0.2)
    async with fronted(model, always("yes"), settings=settings) as front:
        await front.chat(HELLO, headers={"X-Program-Id": "a"})
        await until(lambda: not len(front.gateway.sessions))
        assert len(front.ended.records) == 1


async def test_several_choices_are_several_sequences(model: Path):
    async with fronted(model, always("yes")) as front:
        reply = await front.chat(HELLO, n=3)
        assert [choice["index"] for choice in reply.json["choices"]] == [0, 1, 2]
        assert len(front.ended.records) == 3


async def test_choices_of_one_seed_have_each_its_own(model: Path):
    async with fronted(model, always("yes")) as front:
        await front.chat(HELLO, n=3, seed=2**31 - 2)
        assert sorted(request.sampling.seed for request in front.engine.requests) == [
            0,
            2**31 - 2,
            2**31 - 1,
        ]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n"),
        ({"stop": [""]}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logit_bias": {"3": 1}}, "logit_bias"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "thing"}}}]},
            "tools.0.function.parameters.type",
        ),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages.0.content.0.type"),
        ({"tools": [LOOK], "tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
        ({"tools": [LOOK], "tool_choice": {"type": "function", "function": {"name": "b"}}}, "tool_choice"),
    ],
)
async def test_bad_input_is_400_and_names_the_key(model: Path, changes: Json, field: str):
    async with fronted(model, always("yes")) as front:
        reply = await front.post("/v1/chat/completions", {"messages": HELLO, **changes})
        assert (reply.status, reply.json["error"]["param"]) == (400, field)
        assert front.resident == 0


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"messages": NaN}'])
async def test_a_body_that_is_no_object_is_400(model: Path, data: bytes):
    async with fronted(model, always("yes")) as front:
        reply = await front.post("/v1/chat/completions", None, data=data)
        assert reply.status == 400


async def test_a_model_that_is_not_served_is_404(model: Path):
    async with fronted(model, always("yes")) as front:
        reply = await front.post("/v1/chat/completions", {"model": "gpt-9", "messages": HELLO})
        assert (reply.status, reply.json["error"]["code"]) == (404, "model_not_found")


async def test_a_conversation_beyond_the_context_is_400(model: Path):
    async with fronted(model, always("yes")) as front:
        reply = await front.chat([{"role": "user", "content": "word " * 2000}])
        assert (reply.status, reply.json["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_client_without_a_limit_does_not_ask_for_the_whole_context(model: Path):
    settings = GatewaySettings(turn_tokens=64)
    async with fronted(model, always("yes"), settings=settings, engine={"kv_tokens": 256}) as front:
        assert (await front.chat(HELLO)).status == 200
        assert (await front.chat(HELLO, max_tokens=100)).status == 200
        assert [request.max_new_tokens for request in front.engine.requests] == [64, 100]


async def test_a_body_beyond_the_limit_is_413(model: Path):
    async with fronted(model, always("yes"), settings=GatewaySettings(body_bytes=1000)) as front:
        reply = await front.chat([{"role": "user", "content": "word " * 2000}])
        assert reply.status == 413


async def test_two_names_for_one_call_contradict_each_other(model: Path):
    async with fronted(model, always("yes")) as front:
        body = {"messages": HELLO, "program_id": "b"}
        reply = await front.post("/v1/chat/completions", body, {"X-Program-Id": "a"})
        assert (reply.status, reply.json["error"]["code"]) == (400, "contradictory_identity")


async def test_with_keys_nobody_calls_without_one(model: Path):
    keys = {"SOSTENUTO_AGENT_KEY": "a" * 24, "SOSTENUTO_METRICS_KEY": "m" * 24}
    async with fronted(model, always("yes"), environment=keys) as front:
        assert (await front.chat(HELLO)).status == 401
        assert (await front.chat(HELLO, headers={"Authorization": "Bearer wrong"})).status == 401
        assert (await front.chat(HELLO, headers={"Authorization": "Bearer " + "m" * 24})).status == 403
        assert (await front.chat(HELLO, headers={"Authorization": "Bearer " + "a" * 24})).status == 200
        assert (await front.chat(HELLO, headers={"x-api-key": "a" * 24})).status == 200


async def test_a_minted_key_beats_every_hint_and_ends_with_its_program(model: Path):
    async with fronted(model, always("yes")) as front:
        sessions, keys = front.gateway.sessions, front.gateway.keys
        resident = sessions.open("task-1", Terms())
        headers = {"Authorization": f"Bearer {keys.mint('task-1')}", "X-Session-ID": "its-own"}
        reply = await front.chat(HELLO, headers=headers)
        assert reply.headers["X-Sostenuto-Program"] == resident.session.id
        keys.program_over("task-1")
        sessions.end(resident)
        gone = await front.chat(HELLO, headers=headers)
        assert (gone.status, gone.json["error"]["code"]) == (401, "program_over")


async def test_tokens_of_log_probabilities_can_be_named_by_their_ids(model: Path):
    engine = {"features": frozenset({Feature.TOP_LOGPROBS})}
    async with fronted(model, always("yes"), engine=engine) as front:
        asked: Json = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
        (plain,) = (await front.chat(HELLO, **asked)).json["choices"]
        (named,) = (await front.chat(HELLO, **asked, return_tokens_as_token_ids=True)).json["choices"]
        told = named["logprobs"]["content"]
        assert [entry["token"] for entry in told] == [f"token_id:{id_}" for id_ in named["token_ids"]]
        assert told[0]["top_logprobs"][0]["token"] == told[0]["token"]
        assert [e["logprob"] for e in told] == [e["logprob"] for e in plain["logprobs"]["content"]]
        assert plain["logprobs"]["content"][0]["token"] not in {entry["token"] for entry in told}
