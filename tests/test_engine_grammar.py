"""Turns that follow a grammar: what comes out, decoded, is accepted; what cannot be served is refused."""

import json
import math
import re
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import jsonschema
import pytest
from pydantic import Field
from tokenizers import Tokenizer

from engine_models import Desk, make_core, make_folder, prompt
from grammar_models import END, byte_fallback, byte_level, folder_with, guided
from rendering_models import prefixed
from sostenuto.errors import EngineError
from sostenuto.runtime.engines.client import launch_embedded
from sostenuto.runtime.engines.embedded.grammar.vocabulary import token_bytes
from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.runtime.engines.embedded.settings import EmbeddedSettings
from sostenuto.runtime.engines.wire import Feature, FinishReason, GenerateRequest, Grammar, Sampling
from sostenuto.tools.decorator import tool
from sostenuto.tools.schema import read_tool
from sostenuto.types import EngineId

KINDS = {"byte level": byte_level, "byte fallback": byte_fallback}


@tool()
def search(
    query: Annotated[str, Field(max_length=6)],
    limit: Annotated[int, Field(ge=1, le=99)] = 5,
    kind: Literal["near", "far"] | None = None,
) -> str:
    """Search."""
    return query


@tool()
def mark(rows: Annotated[list[bool], Field(max_length=3)], exact: bool) -> str:
    """Mark."""
    return f"{rows} {exact}"


TOOLS = {"search": read_tool(search), "mark": read_tool(mark)}


def calls_schema() -> dict[str, Any]:
    """An array of calls of typed tools."""
    items = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": one.schema.parameters},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name, one in TOOLS.items()
    ]
    return {"type": "array", "items": {"anyOf": items}, "minItems": 1, "maxItems": 2}


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_with(tmp_path_factory.mktemp("model"), KINDS[cast("str", request.param)]())


@pytest.fixture
def desk(folder: Path) -> Desk:
    return Desk(make_core(folder))


@pytest.fixture
def byte_desk(tmp_path: Path) -> Desk:
    return Desk(make_core(folder_with(tmp_path, byte_level())))


def tokenizer_of(desk: Desk) -> Tokenizer:
    return cast("Any", desk.core)._model.tokenizer  # noqa: SLF001 - the tokenizer that the engine decodes with


def stop_of(tokenizer: Tokenizer) -> int:
    return id_of(tokenizer, END if tokenizer.token_to_id(END) is not None else "</s>")


def id_of(tokenizer: Tokenizer, piece: str) -> int:
    token = tokenizer.token_to_id(piece)
    assert token is not None, piece
    return token


async def written(desk: Desk, grammar: Grammar, **fields: float) -> list[str]:
    """What some hot turns write, each ended by the stop token."""
    tokenizer, texts = tokenizer_of(desk), list[str]()
    stop = stop_of(tokenizer)
    for seed in range(6):
        base = Sampling(temperature=5.0, seed=seed, stop_token_ids=(stop,), grammar=grammar)
        sampling = base.model_copy(update=fields)
        reply = await guided(desk, str(seed), sampling)
        assert (reply.finish_reason, reply.matched) == (FinishReason.STOP, stop)
        assert all(map(math.isfinite, reply.logprobs))
        texts.append(tokenizer.decode(reply.token_ids[:-1], skip_special_tokens=False))
    return texts


async def test_hot_tool_calls_are_accepted_by_their_schemas_and_by_the_tools(desk: Desk):
    schema = calls_schema()
    texts = await written(desk, Grammar(json_schema=json.dumps(schema)))
    assert len(set(texts)) == len(texts)
    names: set[str] = set()
    for text in texts:
        calls = json.loads(text)
        jsonschema.validate(calls, schema)
        for call in calls:
            names.add(call["name"])
            arguments = TOOLS[call["name"]].read_arguments(json.dumps(call["arguments"]))
            assert isinstance(arguments, dict)
    assert names == {"search", "mark"}


async def test_truncation_and_penalties_choose_among_what_the_grammar_allows(desk: Desk):
    fields = {"top_k": 3, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.5, "presence_penalty": 2.0}
    grammar = Grammar(regex="[ab]{4}(true|é)[a-c]{2}")
    for text in await written(desk, grammar, **fields):
        assert re.fullmatch("[ab]{4}(true|é)[a-c]{2}", text)


async def test_characters_of_several_bytes_are_written_whole(desk: Desk):
    for text in await written(desk, Grammar(regex="[é日😀ß]{3}")):
        assert re.fullmatch("[é日😀ß]{3}", text)


async def test_a_grammar_in_larks_notation_is_followed(desk: Desk):
    for text in await written(desk, Grammar(lark='start: "a" tail? \ntail: "b" "c" | "d"')):
        assert re.fullmatch("a(bc|d)?", text)


async def test_a_stop_token_is_allowed_exactly_when_the_grammar_is_complete(byte_desk: Desk):
    tokenizer = tokenizer_of(byte_desk)
    letter, stop = id_of(tokenizer, "a"), stop_of(tokenizer)
    guide = await byte_desk.core.grammars.guide(Grammar(regex="a{2,3}"), frozenset({stop, letter + 100_000}))
    for expected in ([letter], [letter], [letter, stop], [stop]):
        assert sorted(guide.tokens()) == sorted(expected)
        guide.take(letter if letter in expected else stop)
    assert guide.problem is None
    assert not guide.is_over


async def test_a_stop_token_that_is_text_does_not_cut_the_text(byte_desk: Desk):
    letter = id_of(tokenizer_of(byte_desk), "a")
    guide = await byte_desk.core.grammars.guide(Grammar(regex="b?ab"), frozenset({letter}))
    assert letter not in guide.tokens()


async def test_without_a_stop_token_a_turn_ends_when_nothing_can_follow(byte_desk: Desk):
    reply = await guided(byte_desk, "a", Sampling(temperature=5.0, grammar=Grammar(regex="ab{2}c?d")))
    assert tokenizer_of(byte_desk).decode(reply.token_ids) in ("abbd", "abbcd")
    assert (reply.finish_reason, reply.matched) == (FinishReason.STOP, None)


async def test_special_tokens_are_no_text_and_added_words_are(byte_desk: Desk):
    tokenizer = tokenizer_of(byte_desk)
    guide = await byte_desk.core.grammars.guide(Grammar(regex=".*"), frozenset())
    assert tokenizer.token_to_id("<tool_call>") in guide.tokens()
    assert not {tokenizer.token_to_id(END), tokenizer.token_to_id("<|im_start|>")} & set(guide.tokens())


async def test_log_probabilities_are_those_over_what_the_grammar_allows(byte_desk: Desk):
    tokenizer = tokenizer_of(byte_desk)
    sampling = Sampling(seed=3, grammar=Grammar(regex="[abc]{6}"))
    reply = await guided(byte_desk, "a", sampling, top_logprobs=50)
    assert reply.top_logprobs is not None
    letters = {tokenizer.token_to_id(letter) for letter in "abc"}
    for top, token, logprob in zip(reply.top_logprobs, reply.token_ids, reply.logprobs, strict=True):
        assert set(dict(top)) == letters
        assert sum(math.exp(value) for _, value in top) == pytest.approx(1.0, abs=1e-5)
        assert dict(top)[token] == logprob


def test_the_bytes_of_tokens_are_those_of_the_texts_that_they_make():
    texts = ("a é 日本 😀\n", '{"a": true}  x', "<0x41>", "\ufffd")
    for make in (*KINDS.values(), lambda: Tokenizer.from_str(prefixed())):
        tokenizer = make()
        of_token = token_bytes(tokenizer, tokenizer.get_vocab_size())
        for text in texts:
            ids = tokenizer.encode("a" + text, add_special_tokens=False).ids
            known = tokenizer.decode(ids, skip_special_tokens=False)
            # A blank that stands for the beginning of a text is there in the middle of one.
            assert b"".join(of_token[token] for token in ids).decode().lstrip() == known


NESTED = '{"type":"sequence","elements":['


def tagged(format_: object) -> Grammar:
    return Grammar(structural_tag=json.dumps({"type": "structural_tag", "format": format_}))


HOSTILE = {
    "a chain of rules": Grammar(
        lark="start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(3000)) + 'r3000: "a"'
    ),
    "a milliard letters": Grammar(regex="((a{1000}){1000}){1000}"),
    "a schema that is itself": Grammar(json_schema='{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/a"}}}'),
    "a hundred thousand words": Grammar(json_schema=json.dumps({"enum": [f"v{i}" for i in range(100_000)]})),
    "deep JSON": Grammar(json_schema='{"items":' * 50_000 + "{}" + "}" * 50_000),
    "no structural tag": Grammar(structural_tag='{"type": "tag"}'),
    "a tag of an unknown kind": tagged({"type": "qwen_xml_parameter", "json_schema": {}}),
    "a tag without an end": tagged({"type": "tag", "begin": "a", "content": {"type": "any_text"}}),
    "a trigger of no tag": tagged({"type": "triggered_tags", "triggers": ["a"], "tags": [{"begin": "b"}]}),
    "deep tags": Grammar(
        structural_tag='{"type":"structural_tag","format":' + NESTED * 2000 + "0" + "]}" * 2000 + "}"
    ),
    "half a JSON": Grammar(json_schema='{"type":'),
    "an unknown type": Grammar(json_schema='{"type": "nothing"}'),
    "an open group": Grammar(regex="("),
    "an unknown rule": Grammar(lark="start: nowhere"),
    "too much text": Grammar(regex="a" * 1_100_000),
}  # fmt: skip


@pytest.mark.parametrize("grammar", HOSTILE.values(), ids=HOSTILE)
async def test_a_grammar_that_cannot_be_served_is_refused_by_its_field(byte_desk: Desk, grammar: Grammar):
    with pytest.raises(Refusal) as refused:
        await byte_desk.core.grammars.guide(grammar, frozenset())
    assert refused.value.status == 400
    assert refused.value.message.startswith(f"sampling.grammar.{grammar.given[0]}: ")
    assert len(refused.value.message) < 500


async def test_a_recursive_schema_is_followed_as_deep_as_the_policy_goes(byte_desk: Desk):
    node = {"type": "object", "properties": {"n": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            "additionalProperties": False}  # fmt: skip
    grammar = Grammar(json_schema=json.dumps({"$ref": "#/$defs/node", "$defs": {"node": node}}))
    for text in await written(byte_desk, grammar):
        assert isinstance(json.loads(text), dict)


async def test_a_grammar_is_compiled_once(byte_desk: Desk, monkeypatch: pytest.MonkeyPatch):
    grammar = Grammar(regex="a{3}")
    await byte_desk.core.grammars.guide(grammar, frozenset())
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    guide = await byte_desk.core.grammars.guide(Grammar(regex="a{3}"), frozenset())
    assert guide.tokens() == [tokenizer_of(byte_desk).token_to_id("a")]


async def test_what_the_tokenizer_cannot_write_ends_the_request_and_not_the_engine(tmp_path: Path):
    desk = Desk(make_core(make_folder(tmp_path)))
    grammar = Grammar(regex="ab!")
    guide = await desk.core.grammars.guide(grammar, frozenset())
    desk.submit_guided("a", prompt(5), guide, sampling=Sampling(grammar=grammar))
    desk.run()
    answer = desk.answers["a"]
    assert isinstance(answer, Refusal)
    assert "after 2 tokens: nothing that could follow can be written" in answer.message
    assert len(desk.turn("b", prompt(5)).token_ids) == 8


def test_stop_strings_beside_a_grammar_are_refused(byte_desk: Desk):
    with pytest.raises(Refusal, match="stop_strings: they would cut"):
        byte_desk.submit("a", [1], sampling={"grammar": {"regex": "a"}, "stop_strings": ["a"]})


@pytest.mark.parametrize("fields", [{}, {"regex": "a", "lark": "start: 'a'"}])
def test_a_grammar_is_given_in_exactly_one_form(fields: dict[str, str]):
    with pytest.raises(ValueError, match="exactly one of json_schema, regex, lark and structural_tag"):
        Grammar.model_validate(fields)


async def test_a_missing_library_is_named_with_what_to_install(
    byte_desk: Desk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(Refusal, match=r"llguidance is not installed.*sostenuto\[grammar\]"):
        await byte_desk.core.grammars.guide(Grammar(regex="a"), frozenset())
    without = make_core(make_folder(tmp_path / "other"))
    assert Feature.GRAMMAR not in without.capabilities().features


async def test_an_engine_process_follows_grammars_and_survives_hostile_ones(tmp_path: Path):
    tokenizer = byte_level()
    model = folder_with(tmp_path / "model", tokenizer)
    settings = EmbeddedSettings(model=model, socket=tmp_path / "e.sock", kv_tokens=4096, concurrency=4)
    async with launch_embedded(settings, engine_id=EngineId("e0")) as engine:
        assert Feature.GRAMMAR in (await engine.capabilities()).features
        with pytest.raises(EngineError, match=r"sampling\.grammar\.lark: it nests too deeply"):
            await engine.generate(_request(HOSTILE["a chain of rules"], tokenizer))
        grammar = Grammar(json_schema=json.dumps(calls_schema()))
        reply = await engine.generate(_request(grammar, tokenizer))
    jsonschema.validate(json.loads(tokenizer.decode(reply.token_ids[:-1])), calls_schema())


def _request(grammar: Grammar, tokenizer: Tokenizer) -> GenerateRequest:
    sampling = Sampling(temperature=5.0, grammar=grammar, stop_token_ids=(stop_of(tokenizer),))
    return GenerateRequest(
        request_id="a", program_id="a", token_ids=[1, 2], max_new_tokens=400, sampling=sampling
    )
