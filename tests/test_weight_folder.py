"""A model folder as a publication, without torch, and what a real engine makes of it."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType]

from engine_models import load, make_folder, prompt, reference_logprobs
from sostenuto.errors import ConfigError
from sostenuto.runtime.engines.client import launch_embedded
from sostenuto.runtime.engines.embedded.settings import EmbeddedSettings
from sostenuto.runtime.engines.wire import CommitRequest, GenerateRequest
from sostenuto.runtime.weight_folder import publication_of
from sostenuto.types import EngineId, Version


async def test_an_engine_samples_with_the_weights_of_the_folder(tmp_path: Path):
    served, new = make_folder(tmp_path / "served"), make_folder(tmp_path / "new", seed=5)
    settings = EmbeddedSettings(model=served, socket=tmp_path / "e.sock", kv_tokens=1024, concurrency=2)
    async with launch_embedded(settings, engine_id=EngineId("e0")) as engine:
        manifest = publication_of(new, tmp_path / "place", Version(0, 1))
        await engine.prepare_update(manifest)
        await engine.commit_update(CommitRequest(version=manifest.version))
        reply = await engine.generate(
            GenerateRequest(request_id="a", program_id="a", token_ids=prompt(9), max_new_tokens=8)
        )
    expected = reference_logprobs(load(new).module, prompt(9) + reply.token_ids, 9)
    np.testing.assert_allclose(reply.logprobs, expected, rtol=2e-6, atol=1e-5)
    assert {span.version for span in reply.versions} == {"0.1"}


def header(file: Path, content: object, body: bytes = b"") -> None:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + body)


@pytest.mark.parametrize(
    ("content", "body"),
    [
        (b"{", b""),
        ([], b""),
        ({"a": 7}, b""),
        ({"a": {}}, b""),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}, b"12345678"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}, b"1234"),
        ({"a": {"dtype": "F32", "shape": "x", "data_offsets": [0, 4]}}, b"1234"),
        ({"a": {"dtype": "Q4", "shape": [4], "data_offsets": [0, 4]}}, b"1234"),
    ],
)
def test_a_broken_file_of_weights_is_named_and_leaves_nothing(tmp_path: Path, content: object, body: bytes):
    header(tmp_path / "model.safetensors", content, body)
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        publication_of(tmp_path, tmp_path / "place", Version(0, 1))
    assert list((tmp_path / "place").iterdir()) == []


@pytest.mark.parametrize("raw", [b"", b"1234", b"\xff" * 8, (2**40).to_bytes(8, "little") + b"{}"])
def test_a_file_that_is_cut_off_is_named(tmp_path: Path, raw: bytes):
    (tmp_path / "model.safetensors").write_bytes(raw)
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        publication_of(tmp_path, tmp_path / "place", Version(0, 1))


def test_a_tensor_in_two_files_is_refused(tmp_path: Path):
    for name in ("one", "two"):
        save_file({"a.weight": np.zeros(3)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ConfigError, match=r"a\.weight"):
        publication_of(tmp_path, tmp_path / "place", Version(0, 1))
