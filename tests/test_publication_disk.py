"""Publication through a shared folder, and what an engine serves of files."""

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import safetensors.torch
import torch
from transformers import PreTrainedModel

from engine_models import Desk, load, make_core, make_folder, prompt, reference_logprobs
from sostenuto.errors import ConfigError, TrainerError
from sostenuto.runtime.config import parse
from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.runtime.engines.wire import CommitRequest
from sostenuto.trainer.publication.disk import DiskSender
from sostenuto.trainer.publication.manifest import Manifest
from sostenuto.trainer.publication.sender import Sender, open_sender
from sostenuto.trainer.publication.shared_memory import SharedMemorySender
from sostenuto.trainer.publication.snapshot import unique_tensors
from sostenuto.trainer.settings import LearnerSettings, PublicationSettings
from sostenuto.types import Version


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("old"), seed=1)


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> list[PreTrainedModel]:
    """Three sets of weights."""
    return [load(make_folder(tmp_path_factory.mktemp("new"), seed=seed)).module for seed in (2, 3, 4)]


def published(sender: Sender, module: PreTrainedModel, number: int) -> Manifest:
    return sender.publish(Version(0, number), unique_tensors(module.state_dict()))


def serve(desk: Desk, manifest: Manifest) -> None:
    desk.core.weights.stage(manifest)
    desk.core.commit(CommitRequest(version=manifest.version))


def assert_serves(desk: Desk, name: str, module: PreTrainedModel) -> None:
    context = prompt(12, seed=5)
    turn = desk.turn(name, context)
    expected = reference_logprobs(module, context + turn.token_ids, len(context))
    np.testing.assert_allclose(turn.logprobs, expected, rtol=2e-6, atol=1e-5)


def senders(tmp_path: Path) -> list[Sender]:
    return [DiskSender(tmp_path / "disk", keep=2), SharedMemorySender(tmp_path, shared_memory=tmp_path)]


@pytest.mark.parametrize("which", [0, 1])
def test_an_engine_serves_one_version_after_the_other(
    old: Path, tmp_path: Path, modules: list[PreTrainedModel], which: int
):
    desk, sender = Desk(make_core(old)), senders(tmp_path)[which]
    for number, module in enumerate(modules, 1):
        serve(desk, published(sender, module, number))
        assert_serves(desk, f"r{number}", module)
    sender.close()
    # The files are gone; what is served stays.
    assert_serves(desk, "last", modules[-1])


def test_an_engine_may_change_between_memory_and_disk(
    old: Path, tmp_path: Path, modules: list[PreTrainedModel]
):
    desk = Desk(make_core(old))
    disk, memory = senders(tmp_path)
    first = published(memory, modules[0], 1)
    before = Path(first.path).read_bytes()
    for number, (sender, module) in enumerate(
        [(memory, modules[0]), (disk, modules[1]), (disk, modules[2]), (memory, modules[0])], 1
    ):
        serve(desk, first if number == 1 else published(sender, module, number))
        assert_serves(desk, f"r{number}", module)
    assert Path(first.path).read_bytes() == before, "an engine has written into a publication"
    memory.close()
    disk.close()


def test_a_version_on_disk_is_a_safetensors_file_that_says_what_it_is(
    tmp_path: Path, modules: list[PreTrainedModel]
):
    sender = DiskSender(tmp_path, keep=2)
    manifest = published(sender, modules[0], 7)
    found = cast("Any", safetensors.torch).load_file(manifest.path)
    expected = dict(unique_tensors(modules[0].state_dict()))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    with cast("Any", safetensors).safe_open(manifest.path, "pt") as file:
        about = file.metadata()
    assert about["version"] == "0.7"
    assert json.loads(about["crc32"]) == {entry.name: entry.checksum for entry in manifest.tensors}


def test_the_newest_versions_stay_on_disk(tmp_path: Path, modules: list[PreTrainedModel]):
    sender = DiskSender(tmp_path, keep=3)
    paths = [Path(published(sender, modules[0], number).path) for number in range(1, 6)]
    assert [path.exists() for path in paths] == [False, False, True, True, True]
    sender.close()
    assert list(tmp_path.iterdir()) == []


def test_one_wrong_byte_on_disk_is_refused_by_tensor_and_the_old_version_goes_on(
    old: Path, tmp_path: Path, modules: list[PreTrainedModel]
):
    desk, sender = Desk(make_core(old)), DiskSender(tmp_path, keep=2)
    manifest = published(sender, modules[0], 1)
    last = manifest.tensors[-1]
    content = bytearray(Path(manifest.path).read_bytes())
    content[last.offset] ^= 1
    broken = tmp_path / "broken"
    broken.write_bytes(content)
    with pytest.raises(Refusal, match=rf"'{last.name}': its bytes do not have the checksum.*publish"):
        desk.core.weights.stage(manifest.model_copy(update={"path": str(broken)}))
    assert_serves(desk, "old", load(old).module)
    serve(desk, manifest)
    assert_serves(desk, "new", modules[0])
    sender.close()


def test_an_engine_that_does_not_reach_the_folder_is_told_so(
    old: Path, tmp_path: Path, modules: list[PreTrainedModel]
):
    desk, sender = Desk(make_core(old)), DiskSender(tmp_path, keep=2)
    manifest = published(sender, modules[0], 1)
    sender.close()
    with pytest.raises(Refusal, match=r"No such file.*let the engine reach learner.publication.directory"):
        desk.core.weights.stage(manifest)


def test_a_place_that_cannot_be_used_is_named_with_the_remedy(tmp_path: Path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(TrainerError, match=r"learner.publication.directory: .*file: .*; name a folder"):
        open_sender(PublicationSettings(transport="disk", directory=str(file)))
    with pytest.raises(ConfigError, match="transport 'disk' needs directory; name a folder that trainer"):
        parse({"publication": {"transport": "disk"}}, LearnerSettings, where="learner")
