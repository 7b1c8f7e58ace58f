"""Publication through a process group: exact for all, and nobody waits for long for who is gone or late."""

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from engine_models import Desk, load, make_core, make_folder, prompt
from publication_members import NOTHING
from sostenuto.errors import ConfigError, TrainerError
from sostenuto.runtime.config import parse
from sostenuto.runtime.engines.client import launch_embedded
from sostenuto.runtime.engines.embedded.receiving.broadcast import BroadcastReceiver
from sostenuto.runtime.engines.embedded.receiving.room import Room
from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.runtime.engines.embedded.settings import EmbeddedSettings
from sostenuto.runtime.engines.wire import CommitRequest, GenerateRequest
from sostenuto.trainer.client import TrainerClient
from sostenuto.trainer.publication.broadcast import BroadcastSender
from sostenuto.trainer.publication.listening import read_line, send_line
from sostenuto.trainer.publication.manifest import Manifest
from sostenuto.trainer.publication.snapshot import unique_tensors
from sostenuto.trainer.settings import LearnerSettings
from sostenuto.types import EngineId, Version

Named = list[tuple[str, torch.Tensor]]
Submit = Callable[[BroadcastReceiver, Manifest], "Future[dict[str, bytes]]"]
MEMBERS = Path(__file__).parent / "publication_members.py"


def named(seed: int, count: int = 12) -> Named:
    made = torch.Generator().manual_seed(seed)
    return [(f"t{i}", torch.randn(50 + i, 7, generator=made).to(torch.bfloat16)) for i in range(count)]


def as_sent(tensors: Named) -> dict[str, bytes]:
    return {name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in tensors}


@contextmanager
def sending(gather_s: float = 0.2, deadline_s: float = 20.0, expected: int = 1) -> Generator[BroadcastSender]:
    sender = BroadcastSender(
        "127.0.0.1", gather_s=gather_s, deadline_s=deadline_s, expected=expected, bucket_bytes=2000
    )
    try:
        yield sender
    finally:
        sender.close()


def received(receiver: BroadcastReceiver, manifest: Manifest) -> dict[str, bytes]:
    names = frozenset(entry.name for entry in manifest.tensors)
    return {entry.name: content.tobytes() for entry, content, _ in receiver.receive(manifest, names)}


@pytest.fixture
def submit() -> Generator[Submit]:
    with ThreadPoolExecutor(8) as pool:
        yield lambda receiver, manifest: pool.submit(received, receiver, manifest)


def seat_of(manifest: Manifest) -> socket.socket:
    """Call as a member that has no group."""
    source = manifest.source
    assert source is not None
    connection = socket.create_connection((source.host, source.port))
    member = {"member": "other", "generation": 0, "device": "cpu"}
    send_line(connection, {"key": source.key, "version": manifest.version, **member})
    return connection


def test_all_receive_together_version_after_version_in_one_group(submit: Submit):
    receivers = [BroadcastReceiver("cpu", Room(NOTHING)) for _ in range(3)]
    generations: list[int] = []
    with sending(gather_s=60.0, expected=3) as sender:
        for number in range(1, 5):
            manifest = sender.publish(Version(0, number), named(number))
            parts = [submit(receiver, manifest) for receiver in receivers]
            for part in parts:
                assert part.result() == as_sent(named(number))
            generations.append(sender.generation)
    assert generations == [1] * 4


def test_who_comes_late_gets_a_round_of_its_own(submit: Submit):
    first, late = BroadcastReceiver("cpu", Room(NOTHING)), BroadcastReceiver("cpu", Room(NOTHING))
    with sending() as sender:
        manifest = sender.publish(Version(0, 1), named(1))
        assert submit(first, manifest).result() == as_sent(named(1))
        assert submit(late, manifest).result() == as_sent(named(1))
        manifest = sender.publish(Version(0, 2), named(2))
        parts = [submit(receiver, manifest) for receiver in (first, late)]
        assert [part.result() for part in parts] == [as_sent(named(2))] * 2


def test_what_is_sent_does_not_change_with_the_trainers_tensors():
    with sending() as sender:
        tensors = named(1)
        manifest = sender.publish(Version(0, 1), tensors)
        for _, tensor in tensors:
            tensor.zero_()
        assert received(BroadcastReceiver("cpu", Room(NOTHING)), manifest) == as_sent(named(1))


def test_who_hangs_up_before_the_round_is_left_out(submit: Submit):
    with sending(gather_s=60.0) as sender:
        manifest = sender.publish(Version(0, 1), named(1))
        sender.expect(2)
        connection = seat_of(manifest)
        connection.close()
        assert submit(BroadcastReceiver("cpu", Room(NOTHING)), manifest).result() == as_sent(named(1))


def test_who_takes_a_seat_and_does_not_come_holds_the_others_up_until_the_deadline(submit: Submit):
    with sending(gather_s=5.0, deadline_s=1.0) as sender:
        before = sender.publish(Version(0, 1), named(1))
        two = [BroadcastReceiver("cpu", Room(NOTHING)) for _ in range(2)]
        for part in [submit(receiver, before) for receiver in two]:
            part.result()
        manifest = sender.publish(Version(0, 2), named(2))
        connection = seat_of(manifest)
        # The seat of the second is taken by one that never joins.
        part = submit(two[0], manifest)
        assert "generation" in read_line(connection)
        assert part.result() == as_sent(named(2))
        connection.close()
        manifest = sender.publish(Version(0, 3), named(3))
        for part in [submit(receiver, manifest) for receiver in two]:
            assert part.result() == as_sent(named(3))


@pytest.mark.parametrize("fate", ["die", "stop"])
def test_a_process_that_ends_or_stands_still_in_the_middle_holds_nobody_up(
    tmp_path: Path, submit: Submit, fate: str
):
    with sending(gather_s=60.0, deadline_s=2.0) as sender:
        path = tmp_path / "manifest"
        manifest = sender.publish(Version(0, 1), named(1, count=100))
        path.write_text(manifest.model_dump_json())
        sender.expect(3)
        others = [BroadcastReceiver("cpu", Room(NOTHING)) for _ in range(2)]
        parts = [submit(other, manifest) for other in others]
        command = [sys.executable, str(MEMBERS), str(path), fate]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as member:
            assert member.stdout is not None
            try:
                assert member.stdout.readline() == "arriving\n"
                for part in parts:
                    assert part.result() == as_sent(named(1, count=100))
            finally:
                member.kill()
        manifest = sender.publish(Version(0, 2), named(2))
        for part in [submit(other, manifest) for other in others]:
            assert part.result() == as_sent(named(2))


def test_who_leaves_early_lets_the_others_finish(submit: Submit):
    with sending(gather_s=60.0) as sender:
        manifest = sender.publish(Version(0, 1), named(1))
        sender.expect(2)
        leaves, stays = BroadcastReceiver("cpu", Room(NOTHING)), BroadcastReceiver("cpu", Room(NOTHING))
        part = submit(stays, manifest)
        arriving = leaves.receive(manifest, {"t0", "t1"})
        next(arriving)
        arriving.close()
        assert part.result() == as_sent(named(1))
        generation = sender.generation
        manifest = sender.publish(Version(0, 2), named(2))
        for part in [submit(receiver, manifest) for receiver in (leaves, stays)]:
            assert part.result() == as_sent(named(2))
        assert sender.generation == generation


def test_only_the_newest_version_is_held_and_only_who_has_the_key_gets_it():
    with sending() as sender:
        first = sender.publish(Version(0, 1), named(1))
        second = sender.publish(Version(0, 2), named(2))
        with pytest.raises(Refusal, match=r"0\.1 is not held any more, 0\.2 is \(prepare the newest"):
            received(BroadcastReceiver("cpu", Room(NOTHING)), first)
        assert second.source is not None
        stranger = second.model_copy(update={"source": second.source.model_copy(update={"key": "0"})})
        with pytest.raises(Refusal, match="the key is not that of this sender's manifests"):
            received(BroadcastReceiver("cpu", Room(NOTHING)), stranger)
    with pytest.raises(Refusal, match=r"broadcast from 127\.0\.0\.1:\d+: .*publish the version again"):
        received(BroadcastReceiver("cpu", Room(NOTHING)), second)


def test_a_wrong_byte_is_refused_and_the_old_version_goes_on(tmp_path: Path):
    old = make_folder(tmp_path / "old", seed=1)
    module = load(make_folder(tmp_path / "new", seed=2)).module
    desk = Desk(make_core(old))
    with sending() as sender:
        manifest = sender.publish(Version(0, 1), unique_tensors(module.state_dict()))
        *others, last = manifest.tensors
        wrong = last.model_copy(update={"checksum": last.checksum ^ 1})
        broken = manifest.model_copy(update={"tensors": (*others, wrong)})
        before = {name: desk.core.weights.served(name) for name in ("model.norm.weight",)}
        with pytest.raises(Refusal, match=f"{last.name}.*do not have the checksum"):
            desk.core.weights.stage(broken)
        with pytest.raises(Refusal, match="not prepared"):
            desk.core.commit(CommitRequest(version="0.1"))
        assert str(desk.core.weights.version) == "0.0"
        assert before["model.norm.weight"] is not None
        desk.core.weights.stage(manifest)
        desk.core.commit(CommitRequest(version="0.1"))
        for name, tensor in unique_tensors(module.state_dict()):
            served = desk.core.weights.served(name)
            assert served is not None
            assert served.tobytes() == as_sent([(name, tensor.contiguous())])[name]
        desk.turn("r", prompt(8))


def test_an_address_that_is_not_ours_is_named():
    with pytest.raises(TrainerError, match=r"learner.publication.host: 192\.0\.2\.1: .*give an address of"):
        BroadcastSender("192.0.2.1", gather_s=1.0, deadline_s=1.0)
    with pytest.raises(ConfigError, match=r"publication.transport: Input should be 'shared_memory'"):
        parse({"publication": {"transport": "pigeon"}}, LearnerSettings, where="learner")


@pytest.mark.timeout(300)
async def test_a_trainer_process_broadcasts_to_engine_processes(tmp_path: Path):
    folder = make_folder(tmp_path / "model", seed=1)
    settings = LearnerSettings.model_validate({"publication": {"transport": "broadcast", "gather_s": 0.5}})
    embedded = EmbeddedSettings(model=folder, socket=tmp_path / "e.sock", kv_tokens=512, concurrency=2)
    async with (
        TrainerClient() as trainer,
        launch_embedded(embedded, engine_id=EngineId("e0")) as engine,
    ):
        await trainer.open(folder, settings, seed=1, version=Version(0, 0))
        manifest = await trainer.publish(Version(0, 1))
        await engine.prepare_update(manifest)
        reply = await engine.commit_update(CommitRequest(version="0.1"))
        assert reply.version == "0.1"
        asked = GenerateRequest(request_id="r", program_id="p", token_ids=prompt(8), max_new_tokens=3)
        assert [span.version for span in (await engine.generate(asked)).versions] == ["0.1"]
    assert threading.active_count() < 20
