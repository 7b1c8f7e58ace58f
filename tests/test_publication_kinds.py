"""Over every transport: drafters that travel along, and engines that keep few bits."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from engine_models import load, make_folder
from sostenuto.runtime.engines.embedded import model as embedded_model
from sostenuto.runtime.engines.embedded.publications import publications_of
from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.trainer.publication.broadcast import BroadcastSender
from sostenuto.trainer.publication.disk import DiskSender
from sostenuto.trainer.publication.disk_delta import DiskDeltaSender
from sostenuto.trainer.publication.manifest import DRAFT_PREFIX
from sostenuto.trainer.publication.point_to_point import PointToPointSender
from sostenuto.trainer.publication.sender import Sender
from sostenuto.trainer.publication.shared_memory import SharedMemorySender
from sostenuto.trainer.publication.snapshot import unique_tensors
from sostenuto.types import Version

V0 = Version(0, 0)
OPENED: dict[str, Callable[[Path], Sender]] = {
    "shared_memory": lambda place: SharedMemorySender(place, shared_memory=place),
    "disk": lambda place: DiskSender(place, keep=2),
    "disk_delta": lambda place: DiskDeltaSender(place, keep=2, deltas=8),
    "broadcast": lambda _: BroadcastSender("127.0.0.1", gather_s=0.0, deadline_s=30.0),
    "point_to_point": lambda _: PointToPointSender("127.0.0.1", deadline_s=30.0),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), seed=1)


def learnt(folder: Path, prefix: str) -> list[tuple[str, torch.Tensor]]:
    state = load(folder).module.state_dict()
    return [(prefix + name, tensor.clone()) for name, tensor in unique_tensors(state)]


def move(tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Learn: a few elements change."""
    for _, tensor in tensors:
        tensor.view(-1)[::7].add_(0.5)


@pytest.mark.parametrize("transport", OPENED)
def test_a_drafter_travels_with_the_policy(folder: Path, tmp_path: Path, transport: str):
    target, draft = learnt(folder, ""), learnt(folder, DRAFT_PREFIX)
    with_drafter = publications_of(load(folder), load(folder).module, V0)
    without = publications_of(load(folder), None, V0)
    with closing(OPENED[transport](tmp_path)) as sender:
        for number in (1, 2, 3):
            move(target)
            move(draft)
            manifest = sender.publish(Version(0, number), [*target, *draft], selector="all")
            for engine in (with_drafter, without):
                engine.stage(manifest)
                engine.commit(manifest.version)
            for name, tensor in [*target, *draft]:
                served = with_drafter.served(name)
                assert served is not None
                assert served.tobytes() == tensor.contiguous().view(torch.uint8).numpy().tobytes(), name
            assert without.served(target[0][0]) is not None
        # One of the drafter alone; an engine that has none cannot take it.
        move(draft)
        alone = sender.publish(Version(0, 4), draft, selector="draft")
        with_drafter.stage(alone)
        with_drafter.commit("0.4")
        with pytest.raises(Refusal, match="finds no drafter in this engine"):
            without.stage(alone)


@pytest.mark.parametrize("transport", OPENED)
def test_an_engine_of_few_bits_keeps_what_another_keeps(folder: Path, tmp_path: Path, transport: str):
    def opened() -> embedded_model.Model:
        return embedded_model.load(folder, dtype="float32", device="cpu", quantization="fp8")

    tensors = learnt(folder, "")
    models = [opened(), opened()]
    engines = [publications_of(model, None, V0) for model in models]
    memory = tmp_path / "memory"
    memory.mkdir()
    with (
        closing(OPENED[transport](tmp_path)) as sender,
        closing(SharedMemorySender(memory, shared_memory=memory)) as other,
    ):
        for number in (1, 2, 3):
            move(tensors)
            for engine, from_where in zip(engines, (sender, other), strict=True):
                engine.stage(from_where.publish(Version(0, number), tensors))
                engine.commit(f"0.{number}")
            one, two = (model.quantized for model in models)
            assert one.keys() == two.keys()
            assert one
            for name, kept in one.items():
                for mine, theirs in zip(kept.tensors, two[name].tensors, strict=True):
                    assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)), name
