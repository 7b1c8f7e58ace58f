import fcntl
import mmap
import os
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from sostenuto.errors import TrainerError
from sostenuto.trainer.publication.files import remove_orphans
from sostenuto.trainer.publication.manifest import Manifest
from sostenuto.trainer.publication.shared_memory import SharedMemorySender
from sostenuto.trainer.publication.snapshot import unique_tensors
from sostenuto.types import Version

Tensors = list[tuple[str, torch.Tensor]]


def tensors(value: float = 1.0) -> Tensors:
    return [
        ("a", torch.full((3, 5), value)),
        ("b", torch.full((7,), value, dtype=torch.bfloat16)),
        ("scalar", torch.tensor(value)),
        ("empty", torch.zeros(0)),
    ]


def read(manifest: Manifest, source: bytes | mmap.mmap) -> dict[str, bytes]:
    return {entry.name: source[entry.offset : entry.offset + entry.nbytes] for entry in manifest.tensors}


def test_a_publication_holds_every_tensor_aligned_with_its_checksum(tmp_path: Path):
    sender = SharedMemorySender(tmp_path, shared_memory=tmp_path)
    manifest = sender.publish(Version(0, 1), tensors(2.5))
    content = Path(manifest.path).read_bytes()
    assert len(content) == manifest.nbytes
    assert [entry.dtype for entry in manifest.tensors] == ["float32", "bfloat16", "float32", "float32"]
    found = read(manifest, content)
    for entry, (_, tensor) in zip(manifest.tensors, tensors(2.5), strict=True):
        assert entry.offset % 64 == 0
        assert entry.shape == tuple(tensor.shape)
        assert zlib.crc32(found[entry.name]) == entry.checksum
    assert np.frombuffer(found["a"], dtype=np.float32).tolist() == [2.5] * 15
    sender.close()
    assert list(tmp_path.iterdir()) == []


def test_a_version_that_is_being_read_is_never_overwritten(tmp_path: Path):
    sender = SharedMemorySender(tmp_path, shared_memory=tmp_path)
    first = sender.publish(Version(0, 1), tensors(1.0))
    with Path(first.path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        before = read(first, mapped)
        second = sender.publish(Version(0, 2), tensors(2.0))
        assert Path(first.path).exists()
        third = sender.publish(Version(0, 3), tensors(3.0))
        assert not Path(first.path).exists()
        assert read(first, mapped) == before
    assert [Path(m.path).exists() for m in (second, third)] == [True, True]
    sender.close()


def test_a_tied_tensor_is_sent_once_under_its_first_name():
    shared = torch.zeros(4, 2)
    state = {"embed.weight": shared, "norm.weight": torch.zeros(2), "head.weight": shared, "view": shared[:2]}
    assert [name for name, _ in unique_tensors(state)] == ["embed.weight", "norm.weight", "view"]


def test_without_room_in_shared_memory_the_directory_is_used_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    directory = tmp_path / "disk"
    directory.mkdir()
    sender = SharedMemorySender(directory, shared_memory=tmp_path / "missing")
    manifest = sender.publish(Version(0, 1), tensors())
    assert Path(manifest.path).parent == directory
    assert f"using {directory}" in caplog.text
    sender.close()


def test_a_full_disk_is_named_with_the_bytes_needed(tmp_path: Path):
    sender = SharedMemorySender(tmp_path / "nowhere", shared_memory=tmp_path / "missing")
    with pytest.raises(TrainerError, match=r"\d+ bytes are needed; .*missing has 0 free, .*nowhere 0; free"):
        sender.publish(Version(0, 1), tensors())


def test_a_write_that_fails_is_named_and_leaves_nothing(tmp_path: Path):
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    sender = SharedMemorySender(blocked, shared_memory=blocked)
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    obstacle = blocked / f"sostenuto-weights-{os.getpid()}-{stat[19]}-0.1"
    obstacle.mkdir()
    with pytest.raises(TrainerError, match=r"publication: .*-0\.1, 192 bytes needed: Is a directory"):
        sender.publish(Version(0, 1), tensors())
    assert list(blocked.iterdir()) == [obstacle]


def test_files_of_a_killed_sender_are_removed_and_those_of_a_living_one_left(tmp_path: Path):
    living = SharedMemorySender(tmp_path, shared_memory=tmp_path)
    kept = living.publish(Version(0, 1), tensors())
    program = (
        "import os, signal, sys, torch; from pathlib import Path\n"
        "from sostenuto.trainer.publication.shared_memory import SharedMemorySender\n"
        "from sostenuto.types import Version\n"
        "place = Path(sys.argv[1]); s = SharedMemorySender(place, shared_memory=place)\n"
        "s.publish(Version(0, 7), [('a', torch.ones(9))]); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert done.returncode == -9
    (orphan,) = [path for path in tmp_path.iterdir() if path.name.endswith("-0.7")]
    assert orphan.name.startswith("sostenuto-weights-")
    starting = SharedMemorySender(tmp_path, shared_memory=tmp_path)
    assert starting.removed == [orphan]
    assert list(tmp_path.iterdir()) == [Path(kept.path)]
    living.close()


def test_what_another_holds_locked_is_not_an_orphan(tmp_path: Path):
    path = tmp_path / "sostenuto-weights-1-1-0.1"
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert remove_orphans(tmp_path) == []
    assert remove_orphans(tmp_path) == [path]
