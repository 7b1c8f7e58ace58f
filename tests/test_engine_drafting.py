"""From the settings of an engine to what guesses in it."""

import json
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from drafter_models import (
    engine_settings,
    make_like,
    make_mtp_folder,
    of_drafter,
)
from engine_models import (
    TOKENIZER_SIZE,
    Desk,
    load,
    make_core,
    make_folder,
    prompt,
    publish,
)
from sostenuto.errors import ConfigError, EngineError
from sostenuto.runtime.config import RuntimeConfig, parse
from sostenuto.runtime.engines.client import launch_embedded
from sostenuto.runtime.engines.embedded.core import Core
from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.runtime.engines.embedded.settings import EmbeddedSettings
from sostenuto.runtime.engines.embedded.speculation.build import check_speculation, drafting_for
from sostenuto.runtime.engines.wire import CommitRequest, GenerateRequest
from sostenuto.types import EngineId, Version


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("target"), "qwen3", seed=1)


@pytest.fixture(scope="module")
def module(folder: Path) -> PreTrainedModel:
    return load(folder).module


@pytest.fixture(scope="module")
def like(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_like(tmp_path_factory.mktemp("like"), folder)


@pytest.fixture(scope="module")
def mtp_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mtp_folder(tmp_path_factory.mktemp("mtp"), "glm4_moe")


def test_settings_that_do_not_go_together_are_refused_by_name(
    folder: Path, like: Path, mtp_folder: Path, tmp_path: Path
):
    with pytest.raises(Refusal, match="--speculation draft needs --draft-model"):
        check_speculation(engine_settings(folder, speculation="draft"))
    for source in (None, "prompt", "mtp"):
        with pytest.raises(Refusal, match="--draft-model is used by --speculation draft, not by"):
            check_speculation(engine_settings(folder, speculation=source, draft_model=like))
    with pytest.raises(Refusal, match="has no multi-token-prediction layer"):
        drafting_for(load(folder), engine_settings(folder, speculation="mtp"))
    other = make_folder(tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(Refusal, match="its tokenizer is not that of"):
        drafting_for(load(folder), engine_settings(folder, speculation="draft", draft_model=other))


@pytest.mark.parametrize("source", ["prompt", "draft", "mtp", None])
def test_each_source_is_built_from_the_settings(source: str | None, mtp_folder: Path, like: Path):
    drafter = like if source == "draft" else None
    asked = engine_settings(mtp_folder, speculation=source, draft_model=drafter, draft_tokens=3)
    check_speculation(asked)
    drafting = drafting_for(load(mtp_folder), asked)
    speculator = drafting.speculator()
    core = Core(
        drafting.model, version=Version(0, 0), kv_tokens=512, concurrency=4, threads=1, speculator=speculator
    )
    reply = Desk(core).turn("a", prompt(20), max_new_tokens=20)
    assert len(reply.token_ids) == 20
    assert max(reply.token_ids) < TOKENIZER_SIZE
    told = core.load().speculation
    assert (told.source if told else None) == source
    assert drafting.token_bytes == (load(like).shape.token_bytes if source == "draft" else 0)


async def test_an_engine_process_drafts_and_takes_the_draft_models_weights(
    folder: Path, like: Path, tmp_path: Path, module: PreTrainedModel
):
    asked = EmbeddedSettings(
        folder, tmp_path / "e.sock", kv_tokens=1024, concurrency=4, speculation="draft", draft_model=like,
        draft_tokens=3,
    )  # fmt: skip
    async with launch_embedded(asked, engine_id=EngineId("e")) as engine:
        fields = {"program_id": "a", "token_ids": prompt(20), "max_new_tokens": 30}
        reply = await engine.generate(GenerateRequest.model_validate({"request_id": "a", **fields}))
        plain = Desk(make_core(folder)).turn("a", prompt(20), max_new_tokens=30)
        assert reply.token_ids == plain.token_ids
        await engine.prepare_update(of_drafter(publish(tmp_path, module, "0.1"), "draft"))
        await engine.commit_update(CommitRequest(version="0.1"))
        told = (await engine.load()).speculation
    assert told is not None
    assert (told.source, told.version) == ("draft", "0.1")


async def test_an_engine_process_that_cannot_draft_says_so_at_start(folder: Path, tmp_path: Path):
    asked = EmbeddedSettings(folder, tmp_path / "e.sock", kv_tokens=512, concurrency=4, speculation="mtp")
    with pytest.raises(EngineError, match="has no multi-token-prediction layer"):
        async with launch_embedded(asked, engine_id=EngineId("e")):
            pass


def test_the_configuration_wants_a_draft_model_where_one_is_used(tmp_path: Path):
    for engine in ({"speculation": "draft"}, {"speculation": "mtp", "draft_model": "somewhere"}):
        with pytest.raises(ConfigError, match="belong together"):
            parse({"engine": engine}, RuntimeConfig, where="here")
    drafting = {"speculation": "draft", "draft_model": str(tmp_path)}
    assert parse({"engine": drafting}, RuntimeConfig, where="here").engine.draft_model == tmp_path
