"""The OpenAPI document of the gateway."""

from pathlib import Path
from typing import Any

import jsonschema
import pytest
from jsonschema.protocols import Validator

from gateways import HELLO, LOOK, always, fronted
from scripted import write_tokenizer_folder
from sostenuto.runtime.gateway.openapi import BODIES


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer_folder(tmp_path_factory.mktemp("model"))


def validator(document: dict[str, Any], path: str) -> Validator:
    """Of the body that is posted there."""
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return jsonschema.Draft202012Validator({**schema, "components": document["components"]})


async def test_every_model_call_is_described_and_is_there(model: Path):
    async with fronted(model, always("yes")) as front:
        document = (await front.get("/openapi.json")).json
        described = {path for path in document["paths"] if not path.startswith("/p/")} - {"/v1/models"}
        assert described == set(BODIES)
        for path in BODIES:
            assert (await front.post(path, {})).status == 400
            assert (await front.post(f"/p/x{path}", {})).status == 400


@pytest.mark.parametrize(
    ("path", "good", "bad"),
    [
        ("/v1/chat/completions", {"messages": HELLO, "tools": [LOOK]}, {"messages": []}),
        ("/v1/completions", {"prompt": [65, 66]}, {"prompt": "a", "n": 0}),
        ("/v1/messages", {"messages": HELLO[1:], "max_tokens": 4}, {"messages": HELLO[1:]}),
        (
            "/inference/v1/generate",
            {"token_ids": [65], "sampling_params": {"max_tokens": 4}},
            {"token_ids": "a"},
        ),
    ],
)
async def test_what_the_document_allows_is_taken_and_what_it_does_not_is_refused(
    model: Path, path: str, good: dict[str, Any], bad: dict[str, Any]
):
    async with fronted(model, always("yes")) as front:
        described = validator((await front.get("/openapi.json")).json, path)
        assert described.is_valid(good)
        assert not described.is_valid(bad)
        assert (await front.post(path, good)).status == 200
        assert (await front.post(path, bad)).status == 400
