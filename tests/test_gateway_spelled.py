"""Forced calls of models that spell arguments out: what the grammar allows is read as valid calls."""

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from family_models import renderer_of
from sostenuto.runtime.engines.embedded.grammar.grammars import Grammars
from sostenuto.runtime.engines.embedded.grammar.guide import Guide
from sostenuto.runtime.engines.wire import Feature, Grammar
from sostenuto.runtime.gateway.choosing import Choice, held_to
from sostenuto.runtime.gateway.dialects.dialect import Served
from sostenuto.runtime.gateway.spelled_arguments import SpellingError, spelled_arguments
from sostenuto.runtime.rendering.folder import ModelFolder
from sostenuto.runtime.rendering.library import LibraryRenderer
from sostenuto.runtime.rendering.spelling import Spelling
from sostenuto.runtime.rendering.vocabulary import Vocabulary
from sostenuto.tools.wire import ToolSchema

pytestmark = pytest.mark.timeout(300)

Json = dict[str, Any]

FAMILIES = ("qwen3.5", "glm-5", "glm-4.5", "minimax-m2")
WORD = {"type": "string", "maxLength": 5}
SCHEMAS: dict[str, Json] = {
    "bounded": {"properties": {"word": WORD, "again": {"type": "string", "minLength": 2, "maxLength": 3}}},
    "choices": {"properties": {"color": {"enum": ["red", "grün"]}, "size": {"enum": [1, 2.5, None]}}},
    "values": {
        "properties": {
            "whole": {"type": "integer", "minimum": 0, "maximum": 99},
            "flag": {"type": "boolean"},
            "rows": {
                "type": "array",
                "items": {"type": "integer", "maximum": 9, "minimum": 0},
                "maxItems": 3,
            },
        }
    },
    "patterned": {"properties": {"code": {"type": "string", "pattern": "^[a-f]{2,4}$"}}},
    "referred": {
        "properties": {"at": {"$ref": "#/$defs/point"}},
        "$defs": {
            "point": {
                "type": "object",
                "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
                "required": ["x"],
                "additionalProperties": False,
            }
        },
    },
    "nothing": {"properties": {}},
}


def tool(name: str, *, optional: bool = False) -> ToolSchema:
    schema = SCHEMAS[name]
    required = [] if optional else list(schema["properties"])
    parameters = {"type": "object", "required": required, "additionalProperties": False, **schema}
    return ToolSchema(name=name, description="It.", parameters=parameters, timeout_s=1.0)


class Stand:
    """A family's renderer over a small tokenizer, and the grammars of that tokenizer."""

    def __init__(self, family: str, place: Path) -> None:
        self.renderer: LibraryRenderer = renderer_of(family, place)
        tokenizer = ModelFolder.open(place).tokenizer_json
        self.vocabulary = Vocabulary(tokenizer)
        known = Tokenizer.from_str(tokenizer)
        self.grammars = Grammars(known, known.get_vocab_size(with_added_tokens=True))

    def grammar(self, choice: Choice) -> Grammar:
        served = Served(
            model="m", aliases=frozenset(), context_tokens=lambda: 4096,
            stop_token_ids=self.renderer.stop_token_ids, texts=None, created=0,  # pyright: ignore[reportArgumentType]
            renderer=self.renderer, features=lambda: frozenset({Feature.GRAMMAR}),
        )  # fmt: skip
        grammar, _ = held_to(choice, served)
        assert grammar is not None
        return grammar

    async def guide(self, choice: Choice) -> Guide:
        return await self.grammars.guide(self.grammar(choice), frozenset(self.renderer.stop_token_ids[:1]))


def walk(guide: Guide, stop: int, dice: random.Random, most: int = 3000) -> list[int]:
    """Any tokens that are allowed, the shortest way out of what was thought first."""
    taken: list[int] = []
    while guide.problem is None and not guide.is_over and len(taken) < most:
        allowed = guide.tokens()
        if stop in allowed:
            return taken
        taken.append(dice.choice(allowed))
        guide.take(taken[-1])
    assert guide.is_over, guide.problem
    return taken


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("family", FAMILIES)
async def test_whatever_the_grammar_allows_is_read_as_a_valid_call(tmp_path: Path, family: str, name: str):
    stand = Stand(family, tmp_path)
    stop = stand.renderer.stop_token_ids[0]
    for optional in (False, True):
        asked = tool(name, optional=optional)
        choice = Choice(tools=(asked,), forced=frozenset({name}), several=False)
        for seed in range(4):
            guide = await stand.guide(choice)
            # Past what is thought, which random tokens fill to its limit.
            for token in stand.vocabulary.encode("</think>", continues=True):
                if token in guide.tokens():
                    guide.take(token)
            ids = walk(guide, stop, random.Random(seed))
            whole = [*stand.vocabulary.encode("</think>", continues=True), *ids, stop]
            turn = stand.renderer.parse(whole, finished=True, tools=[asked])
            assert turn.problem is None, stand.vocabulary.decode(whole)
            (call,) = turn.message.tool_calls
            assert call.name == name
            jsonschema.validate(json.loads(call.arguments), asked.parameters)


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_text_of_any_length_ends_where_its_mark_stands(tmp_path: Path, family: str):
    stand = Stand(family, tmp_path)
    form = stand.renderer.call_form
    assert form is not None
    assert form.spelling is not None
    parameters: Json = {
        "type": "object",
        "properties": {"text": {"type": "string"}, "line": {"type": "integer"}},
        "required": ["text"],
    }
    edit = ToolSchema(name="edit", description="It.", parameters=parameters, timeout_s=1.0)
    choice = Choice(tools=(edit,), forced=frozenset({"edit"}), several=False)
    text = "  if x < 3:\n\treturn '<b>é</b>'\n" * 60
    for arguments in ({"text": text}, {"text": text, "line": 7}, {"text": ""}):
        guide = await stand.guide(choice)
        body = form.spelling.written(json.dumps(arguments))
        before = "".join(form.thinking or ())
        written = f"{before}{form.open}{form.begin}edit{form.middle}{body}{form.end}{form.close}"
        for token in stand.vocabulary.encode(written, continues=True):
            assert token in guide.tokens(), stand.vocabulary.decode([token])
            guide.take(token)
        assert guide.is_over or stand.renderer.stop_token_ids[0] in guide.tokens()
    guide = await stand.guide(choice)
    wrong = (
        f"{before}{form.open}{form.begin}edit{form.middle}{form.spelling.begin}line{form.spelling.middle}7"
    )
    allowed = True
    for token in stand.vocabulary.encode(wrong, continues=True):
        allowed = allowed and token in guide.tokens()
        guide.take(token)
    assert not allowed, "what is required may be left out"


async def test_strict_tools_stand_among_text(tmp_path: Path):
    stand = Stand("qwen3.5", tmp_path)
    asked = tool("choices")
    guide = await stand.guide(Choice(tools=(asked,), strict={"choices": "tools.0.function.strict"}))
    told = (
        "</think>\n\nI look.\n\n<tool_call>\n<function=choices>\n<parameter=color>\nred\n</parameter>\n"
        "<parameter=size>\nnull\n</parameter>\n</function>\n</tool_call>"
    )
    for token in stand.vocabulary.encode(told, continues=True):
        assert token in guide.tokens(), stand.vocabulary.decode([token])
        guide.take(token)


def test_what_cannot_be_held_to_is_named():
    spelling = Spelling("<p=", ">", "</p>")
    schema = {"properties": {"x": {"type": "string", "pattern": "a", "maxLength": 3}}}
    with pytest.raises(SpellingError, match="x: pattern beside minLength or maxLength"):
        spelled_arguments(spelling, schema)


def test_a_schema_without_properties_allows_any_arguments():
    found = spelled_arguments(Spelling("<p=", ">", "</p>"), {"type": "object"})
    assert found["type"] == "tags_with_separator"
    closed = spelled_arguments(
        Spelling("<p=", ">", "</p>"), {"properties": {}, "additionalProperties": False}
    )
    assert closed == {"type": "const_string", "value": ""}
