"""Publication of what changed: small, exact, and refused on any other base."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_models import Desk, load, make_core, make_folder, prompt
from sostenuto.errors import EngineError
from sostenuto.runtime.engines.embedded import model as embedded_model
from sostenuto.runtime.engines.embedded.core import Core
from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.runtime.engines.folder import write_safetensors
from sostenuto.runtime.engines.wire import CommitRequest
from sostenuto.trainer.publication.chain import contents
from sostenuto.trainer.publication.deltas import apply, encode
from sostenuto.trainer.publication.disk import DiskSender
from sostenuto.trainer.publication.disk_delta import DiskDeltaSender
from sostenuto.trainer.publication.manifest import Manifest
from sostenuto.trainer.publication.snapshot import unique_tensors
from sostenuto.trainer.tensors import as_tensor
from sostenuto.types import Version

Named = list[tuple[str, torch.Tensor]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), seed=1)


class Training:
    """Weights that move a little at each step."""

    def __init__(self, folder: Path) -> None:
        self.tensors: Named = [
            (name, tensor.clone()) for name, tensor in unique_tensors(load(folder).module.state_dict())
        ]
        self._random = np.random.default_rng(3)

    def step(self, share: float = 0.02) -> None:
        for _, tensor in self.tensors:
            moved = as_tensor(self._random.random(tensor.shape) < share)
            tensor.add_(moved, alpha=0.25)

    def published(
        self, sender: DiskDeltaSender, versions: Iterable[int], share: float = 0.02
    ) -> list[Manifest]:
        """A step before each of the versions."""
        manifests: list[Manifest] = []
        for number in versions:
            self.step(share)
            manifests.append(sender.publish(Version(0, number), self.tensors))
        return manifests


def serve(desk: Desk, manifest: Manifest) -> None:
    desk.core.weights.stage(manifest)
    desk.core.commit(CommitRequest(version=manifest.version))


def assert_serves(desk: Desk, tensors: Named) -> None:
    """Byte for byte."""
    for name, tensor in tensors:
        served = desk.core.weights.served(name)
        assert served is not None
        assert served.tobytes() == tensor.contiguous().view(torch.uint8).numpy().tobytes(), name


@given(
    count=st.integers(0, 700), seed=st.integers(0, 1000), share=st.sampled_from([0.0, 0.001, 0.1, 0.5, 1.0]),
    itemsize=st.sampled_from([1, 2, 4, 8]),
)  # fmt: skip
def test_what_changed_makes_the_new_bytes_of_the_old(count: int, seed: int, share: float, itemsize: int):
    random = np.random.default_rng(seed)
    old = random.integers(0, 256, count * itemsize, dtype=np.uint8)
    new = old.copy()
    moved = random.random(count) < share
    new.reshape(count, itemsize)[moved, 0] ^= 255
    encoded = encode(old, new, itemsize)
    assert encoded.changed == moved.sum()
    assert encoded.content.nbytes <= new.nbytes
    found = old.copy()
    apply(encoded, found, itemsize)
    assert found.tobytes() == new.tobytes()


def test_gaps_of_every_length_are_exact():
    old = np.zeros(3 << 21, dtype=np.uint8)
    new = old.copy()
    at = np.cumsum([0, 127, 128, 129, 16384, 16385, 1, 2097153, 2097152])
    new.view(np.uint16)[at % (len(new) // 2)] = 7
    encoded = encode(old, new, 2)
    assert encoded.form == "gaps"
    apply(encoded, old, 2)
    assert np.array_equal(old, new)


def test_a_changed_bf16_element_takes_few_bytes():
    random = np.random.default_rng(5)
    old = random.integers(0, 256, 2 << 20, dtype=np.uint8)
    for share in (1e-4, 1e-3, 1e-2, 0.1):
        new = old.copy()
        new.view(np.uint16)[random.random(1 << 20) < share] ^= 1
        encoded = encode(old, new, 2)
        assert encoded.content.nbytes <= 6 * encoded.changed


def test_an_engine_follows_deltas_and_full_versions_byte_for_byte(folder: Path, tmp_path: Path):
    desk, training = Desk(make_core(folder)), Training(folder)
    sender = DiskDeltaSender(tmp_path, keep=2, deltas=2)
    kinds: list[str] = []
    for number in range(1, 8):
        training.step()
        manifest = sender.publish(Version(0, number), training.tensors)
        serve(desk, manifest)
        kinds.append(manifest.transport)
        assert_serves(desk, training.tensors)
        desk.turn(f"r{number}", prompt(8))
    assert kinds == ["disk", "disk_delta", "disk_delta"] * 2 + ["disk"]
    sender.close()
    assert list(tmp_path.iterdir()) == []


def test_a_delta_is_read_alone_by_who_serves_its_base(folder: Path, tmp_path: Path):
    desk, training = Desk(make_core(folder)), Training(folder)
    sender = DiskDeltaSender(tmp_path, keep=2, deltas=8)
    first, second, third = training.published(sender, range(1, 4))
    for manifest in (first, second):
        serve(desk, manifest)
    Path(first.path).unlink()
    serve(desk, third)
    assert_serves(desk, training.tensors)


def test_an_engine_that_joins_catches_up_from_the_last_full_version(folder: Path, tmp_path: Path):
    training, sender = Training(folder), DiskDeltaSender(tmp_path, keep=2, deltas=8)
    desk = Desk(make_core(folder))
    serve(desk, training.published(sender, range(1, 5))[-1])
    assert_serves(desk, training.tensors)
    assert len(list(tmp_path.iterdir())) == 4
    # From here on it needs the newest delta alone, as everybody else.
    serve(desk, training.published(sender, [5])[-1])
    assert_serves(desk, training.tensors)


def test_an_engine_of_few_bits_takes_deltas_too(folder: Path, tmp_path: Path):
    training = Training(folder)
    deltas, disk = DiskDeltaSender(tmp_path / "a", keep=2, deltas=8), DiskSender(tmp_path / "b", keep=2)
    cores = [
        Core(
            embedded_model.load(folder, dtype="float32", device="cpu", quantization="int8"),
            version=Version(0, 0), kv_tokens=512, concurrency=2, threads=1,
        )
        for _ in range(2)
    ]  # fmt: skip
    for number in range(1, 4):
        training.step()
        for core, sender in zip(cores, (deltas, disk), strict=True):
            serve(Desk(core), sender.publish(Version(0, number), training.tensors))
    found = [Desk(core).turn("r", prompt(20)) for core in cores]
    assert found[0].logprobs == found[1].logprobs
    assert found[0].token_ids == found[1].token_ids


def test_a_delta_on_the_wrong_base_is_refused_and_harms_nothing(folder: Path, tmp_path: Path):
    training = Training(folder)
    sender, other = (DiskDeltaSender(tmp_path / name, keep=2, deltas=8) for name in "ab")
    first = sender.publish(Version(0, 1), training.tensors)
    training.step()
    delta = sender.publish(Version(0, 2), training.tensors)
    alone = delta.model_copy(update={"delta": cast("Any", delta.delta).model_copy(update={"full": "/none"})})
    # Another version is served, or one of the same name with other weights.
    behind = Desk(make_core(folder))
    training.step()
    elsewhere = Desk(make_core(folder))
    namesake = other.publish(Version(0, 1), training.tensors)
    serve(elsewhere, namesake)
    served = [(name, tensor.clone()) for name, tensor in unique_tensors(load(folder).module.state_dict())]
    for desk, version, held in ((behind, "0.0", served), (elsewhere, "0.1", training.tensors)):
        reason = rf"0\.2 is a delta on 0\.1 .*serves {version} .*/none: cannot be mapped"
        with pytest.raises(Refusal, match=f"{reason}.*publish a full version"):
            desk.core.weights.stage(alone)
        assert_serves(desk, held)
    # A chain of links that do not fit, such as the namesake's full version under this delta.
    told = cast("Any", delta.delta).model_copy(update={"full": namesake.path})
    with pytest.raises(Refusal, match=r"0\.2 is a delta on 0\.1 \(digest .*what is here is 0\.1 \("):
        elsewhere.core.weights.stage(delta.model_copy(update={"delta": told}))
    serve(behind, first)
    serve(behind, alone)
    serve(elsewhere, delta)


@pytest.mark.parametrize("at", ["header", "tensor", "end"])
def test_a_broken_delta_is_refused_and_harms_nothing(folder: Path, tmp_path: Path, at: str):
    desk, training = Desk(make_core(folder)), Training(folder)
    sender = DiskDeltaSender(tmp_path, keep=2, deltas=8)
    serve(desk, sender.publish(Version(0, 1), training.tensors))
    before = [(name, tensor.clone()) for name, tensor in training.tensors]
    training.step()
    manifest = sender.publish(Version(0, 2), training.tensors)
    whole = Path(manifest.path).read_bytes()
    content = bytearray(whole)
    if at == "end":
        del content[-1]
    else:
        content[40 if at == "header" else -1] ^= 1
    Path(manifest.path).write_bytes(content)
    with pytest.raises(Refusal, match=r"\.delta: .*publish a full version"):
        desk.core.weights.stage(manifest)
    assert_serves(desk, before)
    Path(manifest.path).write_bytes(whole)
    serve(desk, manifest)
    assert_serves(desk, training.tensors)


def test_a_version_that_changed_everywhere_is_written_in_full(folder: Path, tmp_path: Path):
    training, sender = Training(folder), DiskDeltaSender(tmp_path, keep=2, deltas=8)
    sender.publish(Version(0, 1), training.tensors)
    training.step(share=1.0)
    assert sender.publish(Version(0, 2), training.tensors).transport == "disk"
    renamed = [("other", tensor) for _, tensor in training.tensors[:1]]
    assert sender.publish(Version(0, 3), renamed).transport == "disk"


def test_an_engine_that_reads_files_gets_the_whole_of_a_delta(folder: Path, tmp_path: Path):
    training, sender = Training(folder), DiskDeltaSender(tmp_path / "d", keep=2, deltas=8)
    manifest = training.published(sender, range(1, 4))[-1]
    write_safetensors(manifest, tmp_path / "whole.safetensors")
    found = cast("Any", safetensors.torch).load_file(tmp_path / "whole.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in training.tensors)
    with pytest.raises(EngineError, match="travels by disk, which this engine cannot take; set learner"):
        list(contents(manifest.model_copy(update={"delta": None, "path": "", "transport": "disk"})))
