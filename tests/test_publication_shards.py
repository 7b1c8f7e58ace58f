"""Publication from several ranks to several engine ranks: who sends what, and that it is exact."""

import itertools
import os
import signal
import socket
import threading
import zlib
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio.to_thread
import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine_models import Desk, load, make_core, make_folder
from publication_members import NOTHING
from sostenuto.errors import EngineError, TrainerError
from sostenuto.runtime.engines.embedded.receiving.near import Near
from sostenuto.runtime.engines.embedded.receiving.point_to_point import PointToPointReceiver, fetch
from sostenuto.runtime.engines.embedded.receiving.room import Room
from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.trainer.client import TrainerClient
from sostenuto.trainer.publication.checksums import combined, runs_of
from sostenuto.trainer.publication.listening import read_line, send_line
from sostenuto.trainer.publication.manifest import Manifest, Shard
from sostenuto.trainer.publication.plan import Box, Layout, plan, whole
from sostenuto.trainer.publication.point_to_point import Part, PointToPointSender
from sostenuto.trainer.settings import LearnerSettings
from sostenuto.types import Version
from trainer_world import V0, random_samples

Array = NDArray[np.uint16]
SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (37, 12), "up": (20, 13), "down": (12, 20), "norm": (12,), "experts": (3, 10, 6), "scale": (),
    "none": (0, 4),
}  # fmt: skip


def cut(axis: int, *shares: int) -> list[Layout]:
    """A layout for each share: every tensor is cut along `axis`, or its last one, in that proportion."""
    ranks: list[dict[str, Box]] = [{} for _ in shares]
    for name, shape in SHAPES.items():
        along = min(axis, len(shape) - 1)
        ends = (
            [0, *(shape[along] * total // sum(shares) for total in itertools.accumulate(shares))]
            if shape
            else []
        )
        for number, rank in enumerate(ranks):
            box = list(whole(shape))
            if shape:
                box[along] = (ends[number], ends[number + 1])
            rank[name] = tuple(box)
    return [*ranks]


LAYOUTS: dict[str, list[Layout]] = {
    "whole": cut(0, 1),
    "two by rows": cut(0, 1, 1),
    "three by rows, uneven": cut(0, 5, 1, 2),
    "two by columns": cut(1, 1, 1),
    "three by columns, uneven": cut(1, 1, 4, 2),
    "one with nothing": cut(0, 1, 0, 1),
    "two that are alike": cut(0, 1) * 2,
}


def made(seed: int) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    return {name: random.integers(0, 1 << 16, shape, dtype=np.uint16) for name, shape in SHAPES.items()}


def inner(array: Array, box: Box) -> Array:
    return array[(*(slice(start, end) for start, end in box), ...)]


def as_bytes(array: Array) -> NDArray[np.uint8]:
    return np.frombuffer(array.tobytes(), dtype=np.uint8)


class Trainer:
    """Ranks that publish together, in threads of this process."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self._layouts = layouts
        self._pool = ThreadPoolExecutor(len(layouts))
        self._meeting = threading.Barrier(len(layouts))
        self._said: dict[int, Any] = {}
        self.senders = [self._sender(rank) for rank in range(len(layouts))]

    def publish(self, number: int, tensors: dict[str, Array]) -> Manifest:
        def publish(rank: int) -> Manifest:
            parts = [
                Part(name, "bfloat16", SHAPES[name], box, as_bytes(inner(tensors[name], box)))
                for name, box in self._layouts[rank].items()
            ]
            return self.senders[rank].publish_parts(Version(0, number), parts)

        first, *others = self._pool.map(publish, range(len(self._layouts)))
        assert all(other == first for other in others)
        return first

    def close(self) -> None:
        for sender in self.senders:
            sender.close()
        self._pool.shutdown()

    def _sender(self, rank: int) -> PointToPointSender:
        def gather(own: object) -> list[Any]:
            self._said[rank] = own
            self._meeting.wait()
            said = [self._said[other] for other in range(len(self._layouts))]
            self._meeting.wait()
            return said

        return PointToPointSender("127.0.0.1", deadline_s=5.0, gather=gather)


@contextmanager
def training(layout: str) -> Generator[Trainer]:
    trainer = Trainer(LAYOUTS[layout])
    try:
        yield trainer
    finally:
        trainer.close()


def assert_exact(
    manifest: Manifest, layout: Layout, tensors: dict[str, Array], *, near: Near | None = None
) -> None:
    found = fetch(manifest, layout, near=near)
    assert found.keys() == layout.keys()
    for name, box in layout.items():
        assert found[name].tobytes() == inner(tensors[name], box).tobytes(), name


shares = st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any)


@given(st.integers(0, 2), shares, st.integers(0, 2), shares)
def test_a_plan_brings_every_wanted_element_once_from_who_has_it(
    axis: int, there: list[int], other: int, here: list[int]
):
    sources = cut(axis, *there)
    for wanted in cut(other, *here):
        arrived = {name: np.zeros(shape, dtype=np.uint16) for name, shape in SHAPES.items()}
        for move in plan(sources, wanted):
            inner(arrived[move.name], move.box)[...] += 1
            has = np.zeros(SHAPES[move.name], dtype=bool)
            has[tuple(slice(start, end) for start, end in sources[move.source][move.name])] = True
            assert has[tuple(slice(start, end) for start, end in move.box)].all()
        for name, box in wanted.items():
            assert (inner(arrived[name], box) == 1).all()
            assert arrived[name].sum() == inner(arrived[name], box).size


def test_ranks_that_have_the_same_share_the_work():
    moves = plan(LAYOUTS["two that are alike"], LAYOUTS["whole"][0])
    assert {move.source for move in moves} == {0, 1}


def test_what_no_rank_has_is_named():
    first, _ = cut(0, 1, 1)
    with pytest.raises(EngineError, match=r"'embed': no rank has \[18:37, 0:12\] of it; publish with all"):
        plan([first], LAYOUTS["whole"][0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_checksum_of_a_whole_follows_from_those_of_its_parts(layout: str):
    tensors = made(3)
    for name, shape in SHAPES.items():
        runs = {
            run
            for rank in LAYOUTS[layout]
            for run in runs_of(rank[name], shape, as_bytes(inner(tensors[name], rank[name])))
        }
        assert combined(runs) == zlib.crc32(tensors[name].tobytes())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_brought_into_every_other(layout: str):
    with training(layout) as trainer:
        for number in (1, 2):
            tensors = made(number)
            manifest = trainer.publish(number, tensors)
            assert [entry.checksum for entry in manifest.tensors] == [
                zlib.crc32(tensors[entry.name].tobytes()) for entry in manifest.tensors
            ]
            with ThreadPoolExecutor(8) as pool:
                parts = [
                    pool.submit(assert_exact, manifest, rank, tensors, near=near)
                    for engine in LAYOUTS.values()
                    for rank in engine
                    for near in (Near(), None)
                ]
                for part in parts:
                    part.result()


def test_ranks_that_overlap_or_lack_something_are_told_so():
    rows = {name: whole(shape) for name, shape in SHAPES.items()}
    less: Layout = {**rows, "embed": ((0, 20), (0, 12))}
    more: Layout = {**rows, "embed": ((10, 37), (0, 12))}
    trainer = Trainer([less, more])
    with pytest.raises(TrainerError, match=r"'embed': ranks have byte .* twice or not at all; give parts"):
        trainer.publish(1, made(1))
    trainer.close()


def test_memory_is_not_used_again_while_it_is_read():
    with training("whole") as trainer:
        tensors = made(1)
        manifest = trainer.publish(1, tensors)
        source = manifest.shards[0].source
        with socket.create_connection((source.host, source.port)) as slow:
            pieces = [("embed", whole(SHAPES["embed"]))]
            send_line(slow, {"key": source.key, "version": "0.1", "pieces": pieces, "checked": False})
            said = read_line(slow)
            for number in (2, 3, 4):
                trainer.publish(number, made(number))
            path = Path(f"/proc/{said['pid']}/fd/{said['descriptor']}")
            begin = said["begins"]["embed"]
            held = path.read_bytes()[begin : begin + tensors["embed"].nbytes]
            assert held == tensors["embed"].tobytes()


def test_one_that_takes_nothing_holds_up_nobody():
    with training("two by rows") as trainer:
        tensors = made(1)
        manifest = trainer.publish(1, tensors)
        with socket.create_connection((manifest.shards[0].source.host, manifest.shards[0].source.port)):
            assert_exact(manifest, LAYOUTS["whole"][0], tensors)


def test_a_rank_that_is_gone_is_named_and_so_is_a_version():
    with training("two by rows") as trainer:
        old = trainer.publish(1, made(1))
        new = trainer.publish(2, made(2))
        with pytest.raises(Refusal, match=r"0\.1 is not held any more, 0\.2 is \(prepare the newest"):
            fetch(old, LAYOUTS["whole"][0])
        trainer.senders[1].close()
        gone = f"127.0.0.1:{new.shards[1].source.port}"
        with pytest.raises(Refusal, match=rf"rank at {gone}: .*publish the version again"):
            fetch(new, LAYOUTS["whole"][0])


@contextmanager
def altering(shard: Shard) -> Generator[Shard]:
    """A rank whose bytes do not arrive as they were sent."""

    def carry() -> None:
        connection, _ = listener.accept()
        with connection, socket.create_connection((shard.source.host, shard.source.port)) as onward:
            onward.sendall(connection.recv(1 << 20))
            connection.sendall(onward.recv(1 << 20))
            onward.sendall(connection.recv(1 << 20))
            content = bytearray()
            while received := onward.recv(1 << 16):
                content += received
            content[100] ^= 1
            connection.sendall(content)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        carrier = threading.Thread(target=carry)
        carrier.start()
        port = listener.getsockname()[1]
        yield shard.model_copy(update={"source": shard.source.model_copy(update={"port": port})})
        carrier.join()


def test_a_byte_that_changes_on_the_way_is_found():
    with training("two by columns") as trainer:
        manifest = trainer.publish(1, made(1))
        first, second = manifest.shards
        with altering(second) as altered:
            broken = manifest.model_copy(update={"shards": (first, altered)})
            with pytest.raises(Refusal, match=r"'embed': what arrived from .* does not have its"):
                fetch(broken, cut(1, 1, 1)[1])


@pytest.mark.timeout(300)
async def test_two_ranks_send_to_two_engines_what_they_have_learnt(tmp_path: Path):
    folder = make_folder(tmp_path / "model", seed=1)
    settings = LearnerSettings.model_validate({"publication": {"transport": "point_to_point"}})
    desks = [Desk(make_core(folder)) for _ in range(2)]
    async with TrainerClient(processes=2) as trainer:
        await trainer.open(folder, settings, seed=0, version=V0)
        await trainer.fit(random_samples(4))
        manifest = await trainer.publish(Version(0, 1))
        assert len(manifest.shards) == 2
        async with anyio.create_task_group() as group:
            for desk in desks:
                group.start_soon(anyio.to_thread.run_sync, desk.core.weights.stage, manifest)
        saved = load(await trainer.save(tmp_path / "saved", Version(0, 1))).module.state_dict()
        for rank in psutil.Process(trainer.pid).children():
            os.kill(rank.pid, signal.SIGSTOP)
        other = Desk(make_core(folder))
        late = [
            shard.model_copy(update={"source": shard.source.model_copy(update={"deadline_s": 0.5})})
            for shard in manifest.shards
        ]
        with pytest.raises(Refusal, match=r"rank at .*timed out"):
            await anyio.to_thread.run_sync(
                other.core.weights.stage, manifest.model_copy(update={"shards": tuple(late)})
            )
        for rank in psutil.Process(trainer.pid).children():
            os.kill(rank.pid, signal.SIGCONT)
    for desk in desks:
        desk.core.weights.commit("0.1")
        for entry in manifest.tensors:
            served = desk.core.weights.served(entry.name)
            assert served is not None
            assert served.tobytes() == saved[entry.name].numpy().tobytes()


def test_an_engine_gets_all_of_the_weights_from_any_layout():
    tensors = made(1)
    with training("three by columns, uneven") as trainer:
        manifest = trainer.publish(1, tensors)
        found = {
            entry.name: content.tobytes()
            for entry, content, _ in PointToPointReceiver(Room(NOTHING)).receive(manifest, {"up", "experts"})
        }
    assert found == {name: tensors[name].tobytes() for name in ("up", "experts")}
