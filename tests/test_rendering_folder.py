"""A model folder that lacks something is refused with its file and a remedy."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import rendering_models as small
from sostenuto.errors import ConfigError
from sostenuto.runtime.rendering.choice import open_renderer
from sostenuto.runtime.rendering.folder import ModelFolder


def test_a_folder_says_what_rendering_needs(tmp_path: Path) -> None:
    small.write_folder(tmp_path, config={"vocab_size": 1000, "eos_token_id": 0})
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    folder = ModelFolder.open(tmp_path)
    assert folder.eos_token_ids == (2, 0)
    assert (folder.context_tokens, folder.vocabulary_size) == (2048, 1000)
    assert folder.tokenizer_size == 380
    assert folder.special_tokens["eos_token"] == "<|im_end|>"
    assert open_renderer(folder).stop_token_ids == (2, 0)


def test_an_id_of_a_padded_vocabulary_has_no_text(tmp_path: Path) -> None:
    folder = ModelFolder.open(small.write_folder(tmp_path, config={"vocab_size": 1000}))
    renderer = open_renderer(folder)
    assert renderer.parse([900, 999], finished=True).message.content == ""


def _shrink(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no tokenizer": (lambda p: (p / "tokenizer.json").unlink(), r"tokenizer\.json: missing; save one"),
    "no template": (lambda p: (p / "chat_template.jinja").unlink(), r"no chat template; put"),
    "no config": (lambda p: (p / "config.json").unlink(), r"config\.json: missing; save"),
    "broken JSON": (lambda p: (p / "config.json").write_text("{"), r"config\.json: broken JSON .*; save"),
    "not an object": (lambda p: (p / "config.json").write_text("[]"), r"config\.json: holds no JSON object"),
    "not a tokenizer": (lambda p: (p / "tokenizer.json").write_text("{}"), r"tokenizer\.json: .*; save"),
    "tokenizer too large": (_shrink, r"tokenizer\.json: .*vocab_size is 100; use"),
    "template broken": (
        lambda p: (p / "chat_template.jinja").write_text("{%"),
        r"chat template: .*; use",
    ),
    "no user": (lambda p: (p / "chat_template.jinja").write_text("x"), "does not render a user message; use"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_folder_is_refused_with_file_and_remedy(fault: str, tmp_path: Path) -> None:
    small.write_folder(tmp_path)
    break_it, message = FAULTS[fault]
    break_it(tmp_path)
    with pytest.raises(ConfigError, match=message):
        open_renderer(ModelFolder.open(tmp_path))


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such model folder"):
        ModelFolder.open(tmp_path / "nowhere")


def test_a_template_cannot_leave_its_sandbox(tmp_path: Path) -> None:
    escape = "{{ messages.__class__.__mro__ }}{{ messages[0].content }}"
    small.write_folder(tmp_path, escape)
    with pytest.raises(ConfigError, match="chat template"):
        open_renderer(ModelFolder.open(tmp_path))
