"""Archives into a workspace and out of it, and what hostile ones and a hostile inside try."""

import bz2
import gzip
import io
import lzma
import os
import tarfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandboxes import ALL, output_of, running, sandbox_root
from sostenuto.errors import PathError
from sostenuto.sandbox import archives
from sostenuto.sandbox.archives import Bound, pack, unpack
from sostenuto.sandbox.protocol import Blueprint, SandboxLimits
from sostenuto.sandbox.walk import Walk
from sostenuto.sandbox.workspace import write_file

each_backend = pytest.mark.parametrize("kind", ALL)
BOUND = Bound(1 << 20, 1 << 22)


@pytest.fixture
def workspace(tmp_path: Path):
    (tmp_path / "secret").write_bytes(b"secret")
    folder = tmp_path / "workspace"
    folder.mkdir()
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    yield folder, fd
    os.close(fd)


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.mode = kind, link, mode
    return made


def tar_of(*members: tuple[tarfile.TarInfo, bytes] | tarfile.TarInfo) -> bytes:
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w") as tar:
        for one in members:
            info, content = one if isinstance(one, tuple) else (one, b"")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return memory.getvalue()


def found(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@each_backend
async def test_a_folder_comes_back_as_it_was_sent(kind: str):
    sent = tar_of(
        member("bin", tarfile.DIRTYPE, mode=0o555),
        (member("bin/run", mode=0o4755), b"#!/bin/sh\necho ran\n"),
        (member("data"), bytes(range(256))),
        member("link", tarfile.SYMTYPE, "bin/run"),
        member("out", tarfile.SYMTYPE, "/etc"),
        member("hard", tarfile.LNKTYPE, "data"),
    )
    async with running(kind, Blueprint(files={"deep/kept": b"kept"})) as (sandbox, _):
        await sandbox.upload(sent, "deep/er")
        look = "./link; stat -c '%a %h' bin bin/run data; cmp data hard; cat ../kept"
        seen = await output_of(sandbox, f"cd deep/er; {look}; cd ../..")
        assert seen == "ran\n555 2\n755 1\n644 2\nkept"
        back = await sandbox.download("deep/er")
        with tarfile.open(fileobj=io.BytesIO(back)) as tar:
            assert sorted(tar.getnames()) == ["bin", "bin/run", "data", "hard", "link", "out"]
        await sandbox.upload(gzip.compress(back), "again")
        await sandbox.upload(bz2.compress(await sandbox.download("deep/kept")), "/workspace")
        assert await sandbox.read("kept") == b"kept"
        same = "rm again/out deep/er/out; again/link; diff -r again deep/er"
        assert await output_of(sandbox, same) == "ran"


@pytest.mark.parametrize(
    "hostile",
    [
        member("../secret"), member("a/../../secret"), member("/etc/x"), member("dev", tarfile.CHRTYPE),
        member("dev", tarfile.BLKTYPE), member("pipe", tarfile.FIFOTYPE),
        member("h", tarfile.LNKTYPE, "../secret"), member("h", tarfile.LNKTYPE, "/etc/passwd"),
        member("h", tarfile.LNKTYPE, "none"),
        member("h", tarfile.LNKTYPE, "up/secret"), member("up/new"), member("out/new"), member("in/new"),
        member("sparse", tarfile.GNUTYPE_SPARSE),
    ],
    ids=lambda one: f"{one.name}-{one.type.decode()}-{one.linkname}",
)  # fmt: skip
def test_what_leads_out_or_through_a_link_is_refused(hostile: tarfile.TarInfo, workspace: tuple[Path, int]):
    folder, fd = workspace
    (folder / "up").symlink_to("..")
    (folder / "out").symlink_to("/tmp")
    (folder / "real").mkdir()
    (folder / "in").symlink_to("real")
    before = found(folder.parent)
    with pytest.raises(PathError):
        unpack(fd, tar_of(hostile), ".", BOUND)
    assert found(folder.parent) == before
    for path in ("..", "up", "/etc", "out/x", "in", "../workspace"):
        with pytest.raises(PathError):
            unpack(fd, tar_of(member("x")), path, BOUND)
    assert found(folder.parent) == before
    assert (folder.parent / "secret").read_bytes() == b"secret"


def test_a_link_of_the_archive_itself_is_not_written_through(workspace: tuple[Path, int]):
    folder, fd = workspace
    hostile = tar_of(member("a", tarfile.SYMTYPE, ".."), (member("a/secret"), b"new"))
    with pytest.raises(PathError, match="link"):
        unpack(fd, hostile, ".", BOUND)
    replaced = tar_of(member("a", tarfile.SYMTYPE, "../secret"), (member("a"), b"new"))
    unpack(fd, replaced, ".", BOUND)
    assert (folder / "a").read_bytes() == b"new"
    assert (folder.parent / "secret").read_bytes() == b"secret"


def _pax_bomb() -> bytes:
    info = member("x")
    info.pax_headers = {"comment": "c" * (2 << 20)}
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(info)
    return memory.getvalue()


def _claims(size: int) -> bytes:
    info = member("x")
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize(
    "make",
    [
        lambda: tar_of((member("x"), bytes((1 << 20) + 1))),
        lambda: tar_of(*((member(str(n)), bytes(1 << 20)) for n in range(5))),
        lambda: gzip.compress(tar_of(*((member(str(n)), bytes(1 << 20)) for n in range(5)))),
        lambda: gzip.compress(tar_of((member("x"), bytes(64 << 20)))),
        lambda: bz2.compress(tar_of((member("x"), bytes(64 << 20)))),
        lambda: gzip.compress(gzip.compress(bytes(1 << 20))),
        _pax_bomb,
        lambda: _claims(1 << 40),
        lambda: _claims(1 << 19),
        lambda: lzma.compress(tar_of(member("x"))),
        lambda: gzip.compress(tar_of(member("x")))[:-20],
        lambda: b"\x1f\x8b" + bytes(100),
        lambda: b"no archive at all",
        lambda: tar_of((member("x"), b"y" * 5000))[:3000],
    ],
)
def test_what_is_too_large_or_damaged_is_refused_before_anything_is_written(
    make: Callable[[], bytes], workspace: tuple[Path, int]
):
    folder, fd = workspace
    with pytest.raises(PathError, match="archive"):
        unpack(fd, make(), "into", BOUND)
    assert found(folder) == set()


def test_the_number_of_members_is_bounded(workspace: tuple[Path, int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(archives, "MOST_MEMBERS", 10)
    unpack(workspace[1], tar_of(*(member(str(n)) for n in range(10))), ".", BOUND)
    with pytest.raises(PathError, match="more than 10 members"):
        unpack(workspace[1], tar_of(*(member(str(n)) for n in range(11))), ".", BOUND)


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=2000), st.integers(0, 1200), st.binary(min_size=1, max_size=20))
def test_no_bytes_do_more_than_be_refused(noise: bytes, at: int, patch: bytes):
    sound = tar_of((member("a/b"), b"content"), member("c", tarfile.SYMTYPE, "a"))
    with sandbox_root() as root:
        (root / "workspace").mkdir()
        fd = os.open(root / "workspace", os.O_RDONLY)
        try:
            for archive in (noise, sound[:at] + patch + sound[at + len(patch) :]):
                with suppress(PathError):
                    unpack(fd, archive, ".", BOUND)
            assert [path.name for path in root.iterdir()] == ["workspace"]
        finally:
            os.close(fd)


async def test_the_limits_of_a_sandbox_bound_what_is_sent_to_it():
    async with running("bubblewrap", Blueprint(limits=SandboxLimits(file_bytes=1 << 20))) as (sandbox, _):
        with pytest.raises(PathError, match="allowed"):
            await sandbox.upload(gzip.compress(tar_of((member("x"), bytes(2 << 20)))))
        with pytest.raises(PathError, match="larger than allowed"):
            await sandbox.upload(tar_of(*((member(str(n)), bytes(1 << 20)) for n in range(5))))
        assert await output_of(sandbox, "ls") == ""


def test_packing_follows_no_link_and_leaves_out_what_is_no_file(workspace: tuple[Path, int]):
    folder, fd = workspace
    (folder / "d").mkdir()
    (folder / "d" / "out").symlink_to("../../secret")
    os.mkfifo(folder / "d" / "pipe")
    with tarfile.open(fileobj=io.BytesIO(pack(fd, "d", 1 << 20))) as tar:
        assert [(one.name, one.type) for one in tar] == [("out", tarfile.SYMTYPE)]
    for path in ("d/out", "d/pipe", "none", "../secret", "/etc/passwd", ".."):
        with pytest.raises(PathError):
            pack(fd, path, 1 << 20)


def test_what_would_be_too_large_is_not_packed(workspace: tuple[Path, int]):
    folder, fd = workspace
    with (folder / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    (folder / "d").mkdir()
    for number in range(100):
        (folder / "d" / str(number)).write_bytes(b"")
    for path in ("sparse", "d", "."):
        with pytest.raises(PathError, match="more than 20000 bytes"):
            pack(fd, path, 20_000)
    assert len(pack(fd, "d/1", 20_000)) <= 20_480


def test_folders_and_links_swapped_in_a_loop_lead_nowhere(workspace: tuple[Path, int]):
    folder, fd = workspace
    (folder / "swapped").mkdir()
    (folder / "swapped" / "secret").write_bytes(b"mine")
    beside = {path.name for path in folder.parent.iterdir()}
    done = threading.Event()
    thread = threading.Thread(target=_swap, args=(folder, done))
    thread.start()
    attempts: list[Callable[[], object]] = [
        lambda: unpack(fd, tar_of((member("swapped/secret"), b"mine")), ".", BOUND),
        lambda: unpack(fd, tar_of((member("secret"), b"mine")), "swapped", BOUND),
        lambda: write_file(fd, "swapped/secret", b"mine"),
        lambda: _only_own(pack(fd, "swapped/secret", 1 << 20)),
        lambda: _only_own(pack(fd, "swapped", 1 << 20)),
    ]
    try:
        for attempt in attempts * 300:
            with suppress(PathError):
                attempt()
    finally:
        done.set()
        thread.join()
    assert (folder.parent / "secret").read_bytes() == b"secret"
    assert {path.name for path in folder.parent.iterdir()} == beside


def _swap(folder: Path, done: threading.Event):
    """Put a link upwards in the place of a folder, and the folder back, as fast as can be."""
    while not done.is_set():
        (folder / "new").symlink_to("..")
        with suppress(OSError):
            (folder / "swapped").rename(folder / "kept")
            (folder / "new").rename(folder / "swapped")
            (folder / "swapped").unlink()
            (folder / "kept").rename(folder / "swapped")
        (folder / "new").unlink(missing_ok=True)


def _only_own(archive: bytes):
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for one in tar:
            content = tar.extractfile(one)
            assert content is None or content.read() == b"mine"


def test_a_link_that_became_a_folder_meanwhile_is_refused(
    workspace: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
):
    folder, fd = workspace
    (folder / "swapped").mkdir()

    def was_a_link(_walk: object, part: str) -> bool:
        return part == "swapped"

    monkeypatch.setattr(Walk, "_is_link", was_a_link)
    with pytest.raises(PathError, match="changed while it was opened"):
        write_file(fd, "swapped/own", b"mine")
