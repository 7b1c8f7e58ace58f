"""Files of a container's workspace, through the daemon, against what a hostile inside or archive holds."""

import bz2
import gzip
import io
import random
import tarfile
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio

from dockers import backend_at, containers, docker_root, needs_docker, running, said
from sostenuto.errors import PathError, SandboxError
from sostenuto.sandbox.docker.container import DockerSandbox
from sostenuto.sandbox.protocol import Blueprint, SandboxLimits

pytestmark = needs_docker


@pytest_asyncio.fixture
async def sandbox() -> AsyncGenerator[DockerSandbox]:
    async with running(Blueprint(limits=SandboxLimits(file_bytes=1 << 20))) as started:
        yield started


def tar_of(*members: tuple[str, bytes, bytes | str]) -> bytes:
    """Of (name, type, content or link target)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, kind, content in members:
            info = tarfile.TarInfo(name)
            info.type, info.mode = kind, 0o755
            if isinstance(content, str):
                info.linkname = content
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def names_in(archive: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return sorted(tar.getnames())


async def test_files_written_outside_are_the_sandbox_s_own_and_back(sandbox: DockerSandbox):
    await sandbox.write("a/b/data.bin", bytes(range(256)))
    seen = await said(sandbox, "cat a/b/data.bin > copy && echo more >> a/b/data.bin && touch a/new a/b/new")
    assert seen.exit_code == 0, seen.output
    assert await sandbox.read("copy") == bytes(range(256))
    assert await sandbox.read("/workspace/a/./b/../b/data.bin") == bytes(range(256)) + b"more\n"
    await said(sandbox, "printf '#!/bin/sh\\necho old\\n' > run; chmod 751 run")
    await sandbox.write("run", b"#!/bin/sh\necho new\n")
    assert (await said(sandbox, "./run; stat -c %a run")).output == "new\n751\n"


async def test_a_path_or_link_that_leaves_the_workspace_is_refused(sandbox: DockerSandbox):
    await said(
        sandbox,
        "mkdir a; ln -s .. up; ln -s /etc/passwd out; ln -s up/etc/passwd chain; ln -s ../.. a/back; "
        "ln -s loop loop; ln -s nowhere dangling; mkfifo pipe; echo 42 > file; "
        "ln -s /workspace/file absolute; ln -s a/../file inside",
    )
    outside = (
        "../etc/passwd", "/etc/passwd", "a/../../etc/passwd", "up/etc/passwd", "out", "chain", "loop", "up",
        "a/back/etc/passwd", "", ".", "a", "x\0y", "/workspacex", "dangling", "pipe", "file/x", "none",
    )  # fmt: skip
    for path in outside:
        with pytest.raises(PathError):
            await sandbox.read(path)
    assert [await sandbox.read(path) for path in ("absolute", "inside", "a/../file")] == [b"42\n"] * 3
    for path in ("../x", "/etc/x", "up/x", "a/back/x", "a", "", "file/x", "up", "out"):
        if path in {"up", "out"}:  # the link itself is replaced
            await sandbox.write(path, b"mine")
            continue
        with pytest.raises(PathError):
            await sandbox.write(path, b"")
    assert (
        await said(sandbox, "cat up out; ls /etc/x 2>/dev/null; grep -c root /etc/passwd")
    ).output == "minemine1\n"


async def test_a_file_that_is_too_large_is_refused(sandbox: DockerSandbox):
    await sandbox.write("big", b"x" * 1000)
    assert len(await sandbox.read("big", max_bytes=1000)) == 1000
    for use in (sandbox.read("big", max_bytes=999), sandbox.download("big", max_bytes=999)):
        with pytest.raises(PathError, match="larger than 999"):
            await use
    await said(sandbox, "head -c 1000000 /dev/zero > huge")
    with pytest.raises(PathError, match="larger"):
        await sandbox.download(max_bytes=100_000)


async def test_what_is_downloaded_can_be_uploaded_again(sandbox: DockerSandbox, tmp_path: Path):
    await said(sandbox, "mkdir -p d/e; echo 1 > d/f; chmod 700 d/f; ln -s f d/l; ln d/f d/hard; mkfifo d/p")
    with pytest.raises(PathError, match="no file"):
        await sandbox.upload(await sandbox.download("d"), "copy")
    await said(sandbox, "rm d/p")
    archive = await sandbox.download("d")
    assert set(names_in(archive)) - {"."} == {"e", "f", "hard", "l"}
    await sandbox.upload(archive, "copy/of/it")
    seen = await said(sandbox, "cd copy/of/it && cat l hard && stat -c %a f && touch e/x ../x ../../x")
    assert (seen.exit_code, seen.output) == (0, "1\n1\n700\n")
    assert names_in(await sandbox.download("d/f")) == ["f"]
    for number, packed in enumerate((gzip.compress(archive), bz2.compress(archive))):
        await sandbox.upload(packed, f"packed{number}")
        assert await sandbox.read(f"packed{number}/l") == b"1\n"
        with (tmp_path / "archive").open("w+b") as file:
            file.write(packed)
            await sandbox.upload(file, f"from file {number}")
        assert await sandbox.read(f"from file {number}/l") == b"1\n"
    with (tmp_path / "back").open("w+b") as file:
        await sandbox.download_to(file, "d", max_bytes=1 << 20)
        file.seek(0)
        assert set(names_in(file.read())) == set(names_in(archive))


async def test_a_hostile_archive_is_refused_and_nothing_is_written(sandbox: DockerSandbox):
    await said(sandbox, "ln -s /tmp linked; mkdir folder; echo kept > folder/f; echo kept > file")
    link, hard, device, folder = tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE
    hostile = {
        "outside": tar_of(("../x", tarfile.REGTYPE, b"")),
        "absolute": tar_of(("/tmp/x", tarfile.REGTYPE, b"")),
        "device": tar_of(("null", device, b"")),
        "through a link of its own": tar_of(("l", link, "/tmp"), ("l/x", tarfile.REGTYPE, b"")),
        "through a link of the workspace": tar_of(("linked/x", tarfile.REGTYPE, b"")),
        "a folder over a link": tar_of(("linked", folder, b"")),
        "a file over a folder": tar_of(("folder", tarfile.REGTYPE, b"")),
        "a folder over a file": tar_of(("file/x", tarfile.REGTYPE, b"")),
        "a hard link outside": tar_of(("h", hard, "/etc/passwd")),
        "too large": tar_of(("big", tarfile.REGTYPE, b"x" * (1 << 20) + b"x")),
        "too many": tar_of(*[(str(n), tarfile.REGTYPE, b"x" * (1 << 20)) for n in range(5)]),
        "a multiplied file": tar_of(
            ("f", tarfile.REGTYPE, b"x" * (1 << 20)), *[(f"h{n}", hard, "f") for n in range(5)]
        ),
        "a bomb": gzip.compress(bytes(5 << 20)),
        "damaged": gzip.compress(tar_of(("f", tarfile.REGTYPE, b"x")))[:40],
        "no archive": b"no archive at all",
        "cut short": tar_of(("f", tarfile.REGTYPE, b"x" * 9000))[:2000],
    }
    for what, archive in hostile.items():
        with pytest.raises(PathError):
            await sandbox.upload(archive)
        seen = await said(sandbox, "ls -A /tmp; ls; cat file folder/f")
        assert seen.output == "file\nfolder\nlinked\nkept\nkept\n", what
    with pytest.raises(PathError):
        await sandbox.upload(tar_of(("x", tarfile.REGTYPE, b"")), "linked")


async def test_no_path_reaches_what_is_outside(sandbox: DockerSandbox):
    await said(sandbox, "mkdir a; echo inside > b; ln -s a/../b link; ln -s ../.. a/up; ln -s /etc etc")
    parts = ("a", "b", "..", ".", "link", "up", "workspace", "etc", "passwd")
    draw = random.Random(7)
    for _ in range(150):
        path = "/".join(draw.choices(parts, k=draw.randint(1, 5)))
        with suppress(PathError):
            assert await sandbox.read(path) == b"inside\n", path


async def test_files_of_a_blueprint_that_lead_out_are_refused_and_nothing_is_left(tmp_path: Path):
    (tmp_path / "etc").symlink_to("/etc")
    with docker_root() as root:
        for name in ("../x", "etc/x"):
            with pytest.raises(SandboxError, match="a file that the workspace starts with"):
                await backend_at(root).start("x", Blueprint(str(tmp_path), {name: b""}))
        assert containers(root) == []
