"""The gateway's surfaces that take tokens and give tokens, as vLLM and SGLang have them, over HTTP."""

import base64
import io
from pathlib import Path

import numpy as np
import pytest

from gateways import Json, always, events_of, fronted
from scripted import write_tokenizer_folder
from sostenuto.runtime.engines.wire import Feature, FinishReason, GenerateReply, WireVersionSpan
from sostenuto.runtime.gateway.turn import Standing, Told
from sostenuto.types import Version

INFERENCE, SGLANG = "/inference/v1/generate", "/generate"
PROMPT = [40, 41, 42, 43]
EXPERTS = {"features": frozenset({Feature.ROUTED_EXPERTS})}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer_folder(tmp_path_factory.mktemp("model"))


def inference(**sampling: object) -> Json:
    return {"model": "default", "token_ids": PROMPT, "sampling_params": sampling}


def sglang(changes: Json | None = None, **sampling: object) -> Json:
    return {"input_ids": PROMPT, "sampling_params": sampling, **(changes or {})}


async def test_tokens_in_tokens_out_as_a_train_client_reads_it(model: Path):
    asked = inference(
        stop_token_ids=[9], logprobs=1, skip_special_tokens=False, routed_experts_prompt_start=0, seed=3
    )
    async with fronted(model, always("yes")) as front:
        reply = await front.post(INFERENCE, {**asked, "request_id": "r-1"}, {"X-Session-ID": "s"})
        (choice,) = reply.json["choices"]
        (request,) = front.engine.requests
        assert reply.json["request_id"] == "r-1"
        assert choice["finish_reason"] == "stop"
        assert [(one["token"], one["logprob"]) for one in choice["logprobs"]["content"]] == [
            (f"token_id:{id_}", -0.5) for id_ in choice["token_ids"]
        ]
        assert choice["weight_versions"] == [{"version": "0.0", "start": 0, "end": len(choice["token_ids"])}]
        assert "routed_experts" not in choice
        assert (9 in request.sampling.stop_token_ids, request.sampling.seed) == (True, 3)
        # Without a limit there is room to the end of the context.
        assert request.max_new_tokens == 512 - len(PROMPT)
        seen = [*PROMPT, *choice["token_ids"]]
        again = await front.post(INFERENCE, {**asked, "token_ids": [*seen, 50]}, {"X-Session-ID": "s"})
        assert again.headers["X-Sostenuto-Record"] == "extended"
        assert again.json["usage"]["prompt_tokens_details"]["cached_tokens"] == len(seen)


async def test_experts_come_from_where_they_are_asked_for(model: Path):
    async with fronted(model, always("yes"), engine=EXPERTS) as front:
        asked = inference(routed_experts_prompt_start=3)
        (choice,) = (await front.post(INFERENCE, asked)).json["choices"]
        experts = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
        last = len(PROMPT) + len(choice["token_ids"]) - 2
        assert experts[:, :, 0].tolist() == [[at, 2 * at] for at in range(3, last + 1)]
    (record,) = front.ended.records
    assert record.experts[0] is not None
    assert record.experts[0].shape == (last + 1, 2, 1)


async def test_the_salt_and_the_place_among_waiting_requests_reach_the_engine(model: Path):
    async with fronted(model, always("yes")) as front:
        await front.post(INFERENCE, {**inference(), "cache_salt": "v7", "priority": 5})
        await front.post(SGLANG, sglang({"extra_key": "v8", "priority": 5}))
        assert [(one.salt, one.priority) for one in front.engine.requests] == [("v7", -5), ("v8", 5)]


async def test_a_stream_of_tokens_says_the_same_as_a_reply(model: Path):
    async with fronted(model, always("yes")) as front:
        asked = inference(logprobs=1, n=2)
        whole = await front.post(INFERENCE, asked)
        streamed = await front.post(INFERENCE, {**asked, "stream": True})
        *chunks, done = events_of(streamed.body)
        assert done == "[DONE]"
        assert [choice for chunk in chunks for choice in chunk["choices"]] == whole.json["choices"]


async def test_tokens_are_told_as_they_are_sampled_each_once(model: Path):
    async with fronted(model, always("one two three"), engine={"token_s": 0.01}) as front:
        asked = {**inference(logprobs=0), "stream": True, "stream_options": {"include_usage": True}}
        *chunks, last, usage, done = events_of((await front.post(INFERENCE, asked)).body)
        choices = [chunk["choices"][0] for chunk in (*chunks, last)]
        ids = [id_ for choice in choices for id_ in choice["token_ids"]]
        names = [one["token"] for choice in choices for one in choice["logprobs"]["content"]]
        assert done == "[DONE]"
        assert len(chunks) == len(ids) == usage["usage"]["completion_tokens"]
        assert names == [f"token_id:{id_}" for id_ in ids]
        assert [choice["finish_reason"] for choice in choices] == [None] * len(chunks) + ["stop"]
        assert choices[-1]["weight_versions"][0]["end"] == len(ids)
    (record,) = front.ended.records
    assert record.trained_tokens == len(ids)


async def test_a_rollout_of_sglangs_shape_has_its_meta_info(model: Path):
    asked = sglang(
        {"return_logprob": True, "rid": "r-1", "return_prompt_token_ids": True},
        max_new_tokens=20,
        temperature=0.7,
        top_k=-1,
        sampling_seed=11,
        skip_special_tokens=False,
    )
    async with fronted(model, always("yes")) as front:
        reply = (await front.post(SGLANG, asked)).json
        (request,) = front.engine.requests
        ids, meta = reply["output_ids"], reply["meta_info"]
        assert reply["text"] == "yes"
        assert reply["prompt_token_ids"] == PROMPT
        assert meta["output_token_logprobs"] == [[-0.5, id_, None] for id_ in ids]
        assert meta["finish_reason"] == {"type": "stop", "matched": ids[-1]}
        assert (meta["id"], meta["weight_version"]) == ("r-1", "0.0")
        assert meta["weight_versions"] == [{"version": "0.0", "start": 0, "end": len(ids)}]
        assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (4, len(ids), 0)
        assert (request.sampling.seed, request.sampling.temperature, request.max_new_tokens) == (11, 0.7, 20)


async def test_a_reply_that_was_cut_says_at_which_length(model: Path):
    async with fronted(model, always("word " * 50)) as front:
        meta = (await front.post(SGLANG, sglang(max_new_tokens=5))).json["meta_info"]
        assert meta["finish_reason"] == {"type": "length", "length": 5}


async def test_sglangs_experts_and_most_probable_tokens(model: Path):
    async with fronted(model, always("yes"), engine=EXPERTS) as front:
        changes = {
            "return_logprob": True,
            "top_logprobs_num": 2,
            "return_text_in_logprobs": True,
            "return_routed_experts": True,
            "routed_experts_start_len": 2,
        }
        reply = (await front.post(SGLANG, sglang(changes))).json
        experts = np.frombuffer(base64.b64decode(reply["meta_info"]["routed_experts"]), "<i4")
        last = len(PROMPT) + len(reply["output_ids"]) - 2
        assert experts.reshape(-1, 2).tolist() == [[at, 2 * at] for at in range(2, last + 1)]
        (first, *_), *_ = reply["meta_info"]["output_top_logprobs"]
        assert first == reply["meta_info"]["output_token_logprobs"][0]
        assert isinstance(first[2], str)


async def test_a_text_of_sglangs_shape_is_streamed_whole(model: Path):
    async with fronted(model, always("yes")) as front:
        asked = {"text": "Say it: ", "stream": True}
        one, done = events_of((await front.post(SGLANG, asked)).body)
        assert (one["text"], done) == ("yes", "[DONE]")


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (INFERENCE, {}, "token_ids"),
        (INFERENCE, {"token_ids": []}, "token_ids"),
        (INFERENCE, {"token_ids": "x"}, "token_ids"),
        (INFERENCE, {"token_ids": [1.5]}, "token_ids"),
        (INFERENCE, {"token_ids": [40, 10**9]}, "token_ids"),
        (INFERENCE, {"token_ids": PROMPT, "sampling_params": []}, "sampling_params"),
        (INFERENCE, inference(max_tokens=0), "sampling_params.max_tokens"),
        (INFERENCE, inference(logprobs=-1), "sampling_params.logprobs"),
        (INFERENCE, inference(prompt_logprobs=1), "sampling_params.prompt_logprobs"),
        (INFERENCE, inference(n=0), "sampling_params.n"),
        (INFERENCE, {**inference(), "cache_salt": "a\0b"}, "cache_salt"),
        (INFERENCE, {**inference(), "features": {"mm_hashes": {}}}, "features"),
        (SGLANG, {}, "input_ids"),
        (SGLANG, {"text": "a", "input_ids": [40]}, "input_ids"),
        (SGLANG, {"text": ["a", "b"]}, "text"),
        (SGLANG, {"text": ""}, "text"),
        (SGLANG, {"input_ids": [[40], [41]]}, "input_ids"),
        (SGLANG, sglang(n=2), "sampling_params.n"),
        (SGLANG, sglang(regex="a", json_schema="{}"), "sampling_params.regex"),
        (SGLANG, sglang({"lora_path": "x"}), "lora_path"),
        (SGLANG, sglang({"return_logprob": True, "logprob_start_len": 0}), "logprob_start_len"),
        (SGLANG, sglang({"return_routed_experts": True}), "return_routed_experts"),
    ],
)
async def test_bad_input_is_400_and_names_the_key(model: Path, path: str, body: Json, field: str):
    async with fronted(model, always("yes")) as front:
        reply = await front.post(path, body)
        assert (reply.status, reply.json["error"]["param"]) == (400, field)
        assert front.engine.requests == []


async def test_what_the_engine_refuses_is_the_requests_fault(model: Path):
    async with fronted(model, always("yes"), engine={"refuses": 400}) as front:
        for path, body in ((INFERENCE, inference()), (SGLANG, sglang())):
            reply = await front.post(path, body)
            assert (reply.status, "Retry-After" in reply.headers) == (400, False)


def test_the_oldest_version_of_a_reply_is_the_lowest_number_not_the_first_text():
    spans = [WireVersionSpan(version=text, start=at, end=at + 1) for at, text in enumerate(("0.9", "0.10"))]
    reply = GenerateReply(
        token_ids=[1, 2],
        logprobs=[0.0, 0.0],
        versions=spans,
        finish_reason=FinishReason.STOP,
        cached_tokens=0,
        prefilled_tokens=1,
        queue_s=0,
        prefill_s=0,
        decode_s=0,
    )
    told = Told(reply=reply, turn=None, prompt_token_ids=(1,), standing=Standing.BEGUN)
    assert told.version == Version(0, 9)
