"""The gateway's surface for prompts that are texts or tokens, over HTTP."""

from pathlib import Path

import pytest

from gateways import Json, always, events_of, fronted
from scripted import write_tokenizer_folder
from sostenuto.runtime.engines.wire import Feature
from sostenuto.runtime.gateway.terms import Terms
from sostenuto.types import Purpose

PATH = "/v1/completions"
PROMPT = [40, 41, 42, 43]
NAMED = {"X-Program-Id": "a"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer_folder(tmp_path_factory.mktemp("model"))


async def test_a_reinforcement_learner_gets_the_tokens_and_their_logprobs(model: Path):
    asked = {
        "model": "default",
        "prompt": PROMPT,
        "max_tokens": 32,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "n": 1,
        "seed": 7,
        "return_token_ids": True,
        "logprobs": 0,
    }
    async with fronted(model, always("yes")) as front:
        reply = await front.post(PATH, asked)
        (choice,) = reply.json["choices"]
        (request,) = front.engine.requests
        assert choice["text"] == "yes"
        assert choice["prompt_token_ids"] == PROMPT == request.token_ids
        assert choice["finish_reason"] == "stop"
        said = choice["token_ids"]
        assert choice["logprobs"]["token_logprobs"] == [-0.5] * len(said)
        assert len(choice["logprobs"]["tokens"]) == len(said)
        assert [list(top.values()) for top in choice["logprobs"]["top_logprobs"]] == [[-0.5]] * len(said)
        assert reply.json["usage"]["completion_tokens"] == len(said)
        assert (request.sampling.seed, request.top_logprobs, request.max_new_tokens) == (7, 0, 32)
    (record,) = front.ended.records
    assert record.trained_tokens == len(said)


async def test_without_logprobs_there_are_none(model: Path):
    async with fronted(model, always("yes")) as front:
        (choice,) = (await front.post(PATH, {"prompt": PROMPT})).json["choices"]
        assert choice["logprobs"] is None
        assert "token_ids" not in choice


async def test_offsets_of_tokens_add_up_to_the_text(model: Path):
    async with fronted(model, always("well, yes")) as front:
        asked = {"prompt": "Hello", "logprobs": 1, "skip_special_tokens": False}
        (choice,) = (await front.post(PATH, asked)).json["choices"]
        logprobs = choice["logprobs"]
        starts, tokens = logprobs["text_offset"], logprobs["tokens"]
        assert starts[0] == 0
        for start, token in list(zip(starts, tokens, strict=True))[:-1]:
            assert choice["text"][start : start + len(token)] == token


async def test_tokens_can_be_named_by_their_ids(model: Path):
    async with fronted(model, always("yes"), engine={"features": {Feature.TOP_LOGPROBS}}) as front:
        asked = {
            "prompt": PROMPT,
            "logprobs": 2,
            "return_tokens_as_token_ids": True,
            "return_token_ids": True,
        }
        (choice,) = (await front.post(PATH, asked)).json["choices"]
        names = [f"token_id:{id_}" for id_ in choice["token_ids"]]
        assert choice["logprobs"]["tokens"] == names
        assert choice["logprobs"]["top_logprobs"] == [{name: -0.5, "token_id:0": -2.0} for name in names]


async def test_several_prompts_with_several_choices_come_back_in_order(model: Path):
    async with fronted(model, always("yes")) as front:
        asked = {"prompt": [PROMPT, [50, 51]], "n": 2, "return_token_ids": True, "seed": 1}
        reply = await front.post(PATH, asked)
        prompts = [choice["prompt_token_ids"] for choice in reply.json["choices"]]
        assert prompts == [PROMPT, PROMPT, [50, 51], [50, 51]]
        assert reply.json["usage"]["prompt_tokens"] == 6
        seeds = sorted((request.token_ids, request.sampling.seed) for request in front.engine.requests)
        assert [seed for _, seed in seeds] == [1, 2, 1, 2]
    assert len(front.ended.records) == 4


async def test_texts_and_lists_of_texts_are_prompts_and_can_be_echoed(model: Path):
    async with fronted(model, always("yes")) as front:
        one = await front.post(PATH, {"prompt": "Say it: ", "echo": True})
        two = await front.post(PATH, {"prompt": ["Say it: ", "Again: "], "echo": True})
        assert [choice["text"] for choice in one.json["choices"]] == ["Say it: yes"]
        assert [choice["text"] for choice in two.json["choices"]] == ["Say it: yes", "Again: yes"]


async def test_control_tokens_in_a_text_stay_text(model: Path):
    async with fronted(model, always("yes")) as front:
        asked = {"prompt": "<|im_end|>", "echo": True, "return_token_ids": True}
        (choice,) = (await front.post(PATH, asked)).json["choices"]
        assert choice["text"] == "<|im_end|>yes"
        assert len(choice["prompt_token_ids"]) > 1


async def test_a_stop_text_is_no_part_of_the_reply_and_is_told(model: Path):
    async with fronted(model, always("yes, or no")) as front:
        asked = {"prompt": PROMPT, "stop": ", or"}
        (choice,) = (await front.post(PATH, asked)).json["choices"]
        assert (choice["text"], choice["stop_reason"]) == ("yes", ", or")


async def test_without_a_limit_sixteen_tokens_come(model: Path):
    async with fronted(model, always("word " * 50)) as front:
        reply = await front.post(PATH, {"prompt": PROMPT, "return_token_ids": True})
        (choice,) = reply.json["choices"]
        assert (len(choice["token_ids"]), choice["finish_reason"]) == (16, "length")


async def test_the_end_of_sequence_stops_unless_it_is_ignored(model: Path):
    async with fronted(model, always("yes")) as front:
        await front.post(PATH, {"prompt": PROMPT})
        await front.post(PATH, {"prompt": PROMPT, "ignore_eos": True, "stop_token_ids": [9]})
        stops = [request.sampling.stop_token_ids for request in front.engine.requests]
        assert stops[0] != ()
        assert stops[1] == (9,)


async def test_a_stream_says_the_same_as_a_reply(model: Path):
    async with fronted(model, always("yes")) as front:
        asked = {"prompt": PROMPT, "n": 2, "logprobs": 0, "return_token_ids": True}
        whole = await front.post(PATH, asked)
        streamed = await front.post(
            PATH, {**asked, "stream": True, "stream_options": {"include_usage": True}}
        )
        *chunks, usage, done = events_of(streamed.body)
        assert done == "[DONE]"
        assert usage["usage"] == whole.json["usage"]
        assert [choice for chunk in chunks for choice in chunk["choices"]] == whole.json["choices"]


async def test_text_is_told_while_it_is_sampled_and_never_a_stop_text(model: Path):
    said = "one two, three four, five six"
    async with fronted(model, always(said), engine={"token_s": 0.05}) as front:
        asked = {"prompt": "Count: ", "echo": True, "max_tokens": 200, "stream": True}
        for stop, expected in ((None, said), (", five", "one two, three four")):
            body = (await front.post(PATH, {**asked, "stop": stop, "return_token_ids": True})).body
            *chunks, done = events_of(body)
            choices = [chunk["choices"][0] for chunk in chunks]
            assert done == "[DONE]"
            assert len(choices) > 3
            assert "".join(choice["text"] for choice in choices) == f"Count: {expected}"
            reasons = [choice["finish_reason"] for choice in choices]
            assert reasons == [None] * (len(choices) - 1) + ["stop"]
            assert (
                front.engine.contexts[front.ended.records[-1].program_id][-3:]
                == choices[-1]["token_ids"][-3:]
            )


async def test_a_program_of_tokens_goes_on_with_its_kv(model: Path):
    async with fronted(model, always("yes")) as front:
        first = await front.post(PATH, {"prompt": PROMPT, "return_token_ids": True}, NAMED)
        seen = [*PROMPT, *first.json["choices"][0]["token_ids"]]
        second = await front.post(PATH, {"prompt": [*seen, 60, 61]}, NAMED)
        assert second.headers["X-Sostenuto-Record"] == "extended"
        assert second.json["usage"]["prompt_tokens_details"]["cached_tokens"] == len(seen)
    (record,) = front.ended.records
    assert len(record.sequences) == 1


async def test_a_trained_program_takes_one_choice_at_a_time(model: Path):
    async with fronted(model, always("yes")) as front:
        resident = front.gateway.sessions.open("task-1", Terms(purpose=Purpose.TRAIN))
        key = {"Authorization": f"Bearer {front.gateway.keys.mint('task-1')}"}
        for changes, field in (({"n": 2}, "n"), ({"top_p": 0.5}, "top_p")):
            reply = await front.post(PATH, {"prompt": PROMPT, **changes}, key)
            assert (reply.status, reply.json["error"]["param"]) == (400, field)
        front.gateway.sessions.end(resident)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [40, True]}, "prompt.0"),
        ({"prompt": [40, "x"]}, "prompt.0"),
        ({"prompt": ["x", ""]}, "prompt.1"),
        ({"prompt": [[40], []]}, "prompt.1"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [40, 2**31]}, "prompt"),
        ({"prompt": [[40], [10**30]]}, "prompt.1"),
        ({"prompt": ["x"] * 129}, "n"),
        ({"n": 129}, "n"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": 0, "echo": True}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"logit_bias": {"3": 1}}, "logit_bias"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"min_p": 2}, "min_p"),
        ({"stop": [""]}, "stop"),
    ],
)
async def test_bad_input_is_400_and_names_the_key(model: Path, changes: Json, field: str):
    async with fronted(model, always("yes")) as front:
        reply = await front.post(PATH, {"prompt": PROMPT, **changes})
        assert (reply.status, reply.json["error"]["param"]) == (400, field)
        assert front.engine.requests == []


async def test_a_prompt_beyond_the_context_is_400(model: Path):
    async with fronted(model, always("yes")) as front:
        reply = await front.post(PATH, {"prompt": [40] * 600})
        assert (reply.status, reply.json["error"]["code"]) == (400, "context_length_exceeded")
        assert reply.json["error"]["param"] == "prompt"
