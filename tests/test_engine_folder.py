"""A publication as a folder: what an engine loads is what was published, or there is no folder."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors import safe_open

from engine_models import load, make_folder, publish
from sostenuto.errors import EngineError
from sostenuto.runtime.engines.folder import WeightFolders
from sostenuto.trainer.publication.manifest import Manifest


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def manifest(model: Path, tmp_path: Path) -> Manifest:
    return publish(tmp_path, load(model).module, "0.1")


def tensors_in(place: Path) -> dict[str, torch.Tensor]:
    with cast("Any", safe_open)(place / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping


def test_a_folder_holds_the_published_tensors_and_the_models_other_files(
    model: Path, manifest: Manifest, tmp_path: Path
):
    place = WeightFolders(tmp_path / "out", model).write(manifest)
    tensors = tensors_in(place)
    state = load(model).module.state_dict()
    assert set(tensors) == {entry.name for entry in manifest.tensors}
    for name, tensor in tensors.items():
        assert torch.equal(tensor, state[name])
    assert (place / "config.json").read_bytes() == (model / "config.json").read_bytes()
    assert (place / "tokenizer.json").exists()


def test_tensors_of_every_type_keep_their_bytes(model: Path, tmp_path: Path):
    module = torch.nn.Module()
    values = torch.arange(12.0).reshape(3, 4)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8):
        module.register_buffer(f"in_{str(dtype).removeprefix('torch.')}", values.to(dtype))
    manifest = publish(tmp_path, module, "0.2")  # pyright: ignore[reportArgumentType] - any module has a state
    place = WeightFolders(tmp_path / "out", model).write(manifest)
    for name, tensor in tensors_in(place).items():
        assert torch.equal(tensor.float(), module.get_buffer(name).float())
        assert str(tensor.dtype) == f"torch.{name.removeprefix('in_')}"


def test_the_models_own_weights_are_a_version_without_a_copy(model: Path, tmp_path: Path):
    folders = WeightFolders(tmp_path / "out", model)
    place = folders.adopt("0.0")
    assert {file.name for file in place.iterdir()} == {file.name for file in model.iterdir()}
    assert (place / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    folders.keep("0.1")
    assert not place.exists()
    assert (model / "model.safetensors").exists()


def test_a_model_without_weights_is_no_version(tmp_path: Path):
    (tmp_path / "model").mkdir()
    with pytest.raises(EngineError, match=r"model: has no \*.safetensors; save the model's weights as such"):
        WeightFolders(tmp_path / "out", tmp_path / "model").adopt("0.0")


def test_a_byte_that_changed_on_the_way_leaves_no_folder(model: Path, manifest: Manifest, tmp_path: Path):
    content = bytearray(Path(manifest.path).read_bytes())
    content[-1] ^= 1
    Path(manifest.path).write_bytes(content)
    with pytest.raises(EngineError, match="its bytes are not those that were published; publish again"):
        WeightFolders(tmp_path / "out", model).write(manifest)
    assert not list((tmp_path / "out").iterdir())


def test_a_file_that_is_too_short_names_the_tensor(model: Path, manifest: Manifest, tmp_path: Path):
    path = Path(manifest.path)
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(EngineError, match=f"{manifest.tensors[-1].name}.*publish again"):
        WeightFolders(tmp_path / "out", model).write(manifest)


def test_a_directory_that_cannot_be_written_is_named(model: Path, manifest: Manifest, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match=r"file/weights-0.1.part.*name another directory"):
        WeightFolders(tmp_path / "file", model).write(manifest)


def test_a_type_without_a_name_in_the_format_is_refused(model: Path, manifest: Manifest, tmp_path: Path):
    entry = manifest.tensors[0].model_copy(update={"dtype": "complex64"})
    odd = manifest.model_copy(update={"tensors": (entry, *manifest.tensors[1:])})
    with pytest.raises(EngineError, match="complex64 has no name in safetensors"):
        WeightFolders(tmp_path / "out", model).write(odd)


def test_folders_that_nobody_serves_go(model: Path, manifest: Manifest, tmp_path: Path):
    folders = WeightFolders(tmp_path / "out", model)
    old = folders.write(manifest)
    new = folders.write(manifest.model_copy(update={"version": "0.2"}))
    folders.keep("0.2")
    assert new.exists()
    assert not old.exists()
