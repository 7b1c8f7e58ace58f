"""`@tool`: the schema that the model is told, and the check of what it writes."""

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from sostenuto.errors import ConfigError
from sostenuto.tools.decorator import tool
from sostenuto.tools.schema import InvalidArguments, read_tool


class Place(BaseModel):
    title: str
    row: int


@tool(timeout_s=3, serial=True, output_bytes=100)
def search(
    query: str,
    limit: Annotated[int, Field(ge=1, description="How many at most.")] = 5,
    kind: Literal["a", "b"] | None = None,
    json: Place | None = None,
) -> str:
    """Search the shelves.

    Looks at every shelf
    there is.

    Args:
        query (str): What to look for,
            in plain words.
        json: A place.

    Returns:
        What was found.
    """
    return query


def refused(function: Callable[..., Any], text: str) -> str:
    outcome = read_tool(function).read_arguments(text)
    assert isinstance(outcome, InvalidArguments)
    return outcome.message


def test_schema_comes_from_hints_and_docstring():
    schema = read_tool(search).schema
    properties = schema.parameters["properties"]
    assert isinstance(properties, dict)
    assert schema.description == "Search the shelves.\n\nLooks at every shelf there is."
    assert properties["query"] == {"type": "string", "description": "What to look for, in plain words."}
    assert properties["limit"] == {
        "type": "integer", "minimum": 1, "default": 5, "description": "How many at most.",
    }  # fmt: skip
    assert schema.parameters["required"] == ["query"]
    assert (schema.timeout_s, schema.serial, schema.output_bytes) == (3, True, 100)


def test_a_property_called_title_stays_and_made_up_titles_go():
    text = json.dumps(read_tool(search).schema.parameters)
    assert '"title": {"type": "string"}' in text
    assert text.count('"title"') == 2  # the property, and its place in `required`


def test_sphinx_fields_describe_arguments():
    @tool
    def add(a: int, b: int) -> int:
        """Add.

        :param a: the first
        :param int b: the second,
            on two lines
        :returns: the sum
        """
        return a + b

    properties: Any = read_tool(add).schema.parameters["properties"]
    assert (properties["a"]["description"], properties["b"]["description"]) == (
        "the first", "the second, on two lines",
    )  # fmt: skip
    assert read_tool(add).schema.description == "Add."


def test_only_what_was_written_is_passed_so_that_defaults_are_the_functions_own():
    assert read_tool(search).read_arguments('{"query": "x"}') == {"query": "x"}
    given_place = read_tool(search).read_arguments('{"query": "x", "json": {"title": "t", "row": 1}}')
    assert given_place == {"query": "x", "json": Place(title="t", row=1)}


def test_empty_text_is_no_arguments():
    @tool
    def now() -> str:
        """Tell the time."""
        return ""

    assert read_tool(now).read_arguments("") == {}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"query": "x", "limt": 3}', "no argument 'limt': did you mean 'limit'?"),
        ("{}", "argument 'query' is missing"),
        ('{"query": 3}', "argument 'query': Input should be a valid string, not 3"),
        ('{"query": "x", "limit": "3"}', "argument 'limit'"),
        ('{"query": "x", "limit": true}', "argument 'limit'"),
        ('{"query": "x", "limit": 0}', "greater than or equal to 1"),
        ('{"query": "x", "kind": "c"}', "argument 'kind"),
        ('{"query": "x", "json": {"title": "t", "row": "1"}}', "argument 'json.row'"),
        ("query=x", "not JSON"),
        ('{"query": "x"', "not JSON"),
        ('["x"]', "not a JSON object"),
        ("null", "not a JSON object"),
        ('{"a0": "x"}', "no argument 'a0'"),
        ('{"query": "\\ud800"}', "not JSON"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_refusal_says_what_is_wrong(text: str, says: str):
    message = refused(search, text)
    assert message.startswith("search: ")
    assert says in message
    assert len(message) < 1000


@given(st.text() | st.recursive(st.none() | st.floats() | st.text(), st.lists).map(json.dumps))
def test_no_text_makes_the_check_raise(text: str):
    outcome = read_tool(search).read_arguments(text)
    assert isinstance(outcome, dict | InvalidArguments)


def test_what_cannot_be_described_is_refused_at_definition():
    with pytest.raises(ConfigError, match=r"bare: argument 'x': no type; annotate it"):

        @tool  # pyright: ignore[reportUnknownArgumentType]
        def bare(x) -> str:  # noqa: ANN001 # pyright: ignore[reportUnknownParameterType, reportMissingParameterType]
            """Bare."""
            return ""

    with pytest.raises(ConfigError, match=r"argument 'rest': \*\*rest cannot be described"):

        @tool
        def loose(**rest: str) -> str:
            """Loose."""
            return ""

    with pytest.raises(ConfigError, match="silent: no docstring"):

        @tool
        def silent(x: str) -> str:
            return x

    with pytest.raises(ConfigError, match="timeout_s is 0"):

        @tool(timeout_s=0)
        def instant(x: str) -> str:
            """Instant."""
            return x

    with pytest.raises(ConfigError, match="name 'a b'"):

        @tool(name="a b")
        def spaced(x: str) -> str:
            """Spaced."""
            return x

    with pytest.raises(ConfigError, match=r"Twice\.same: defined twice in one class"):

        class Twice:  # pyright: ignore[reportUnusedClass]
            @tool
            def same(self) -> str:  # pyright: ignore[reportRedeclaration]
                """First."""
                return ""

            @tool
            def same(self) -> str:  # noqa: F811
                """Second."""
                return ""


def test_a_type_without_a_json_form_is_refused_by_argument():
    @tool
    def call(name: str, back: Callable[[], int]) -> str:
        """Call."""
        return name

    with pytest.raises(ConfigError, match=r"tool call: argument 'back'.*use str, int"):
        read_tool(call)


def test_a_type_that_cannot_be_read_is_refused_by_argument():
    @tool  # pyright: ignore[reportUnknownArgumentType]
    def call(name: "Nowhere") -> str:  # noqa: F821 # pyright: ignore[reportUndefinedVariable, reportUnknownParameterType]
        """Call."""
        return ""

    with pytest.raises(ConfigError, match=r"argument 'name': its type 'Nowhere' cannot be read"):
        read_tool(call)  # pyright: ignore[reportUnknownArgumentType]
