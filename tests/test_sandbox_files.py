"""Files of a workspace, from outside, against what a hostile inside puts there."""

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandboxes import ALL, entries, running, sandbox_root
from sostenuto.errors import ConfigError, PathError, SandboxError
from sostenuto.sandbox.bubblewrap import BubblewrapBackend
from sostenuto.sandbox.copying import Copying, copy_tree
from sostenuto.sandbox.protocol import Blueprint
from sostenuto.sandbox.removal import remove_tree
from sostenuto.sandbox.workspace import read_file, write_file

each_backend = pytest.mark.parametrize("kind", ALL)


@pytest.fixture
def workspace(tmp_path: Path):
    """A workspace with a secret beside it: its path and its descriptor."""
    (tmp_path / "secret").write_bytes(b"secret")
    folder = tmp_path / "workspace"
    folder.mkdir()
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    yield folder, fd
    os.close(fd)


@each_backend
async def test_files_written_outside_are_the_sandbox_s_own_and_back(kind: str):
    async with running(kind) as (sandbox, _):
        await sandbox.write("a/b/data.bin", bytes(range(256)))
        seen = await sandbox.shell("cat a/b/data.bin > copy && echo more >> a/b/data.bin", timeout_s=20)
        assert seen.exit_code == 0, seen.output
        assert await sandbox.read("copy") == bytes(range(256))
        assert await sandbox.read("/workspace/a/b/data.bin") == bytes(range(256)) + b"more\n"


@each_backend
async def test_a_workspace_starts_with_its_template_and_files(kind: str, tmp_path: Path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "run").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "bin" / "run").chmod(0o755)
    (tmp_path / "link").symlink_to("bin/run")
    (tmp_path / "kept").write_text("template")
    blueprint = Blueprint(str(tmp_path), {"kept": b"file", "deep/x": b""}, {"GREETING": "hello there"})
    async with running(kind, blueprint) as (sandbox, _):
        result = await sandbox.shell("./link; cat kept; test -e deep/x; echo $? $GREETING", timeout_s=20)
        assert result.output == "ran\nfile0 hello there\n"
    assert (tmp_path / "kept").read_text() == "template"


async def test_a_wrong_blueprint_is_refused_before_anything_starts(tmp_path: Path):
    backend = BubblewrapBackend(tmp_path)
    with pytest.raises(SandboxError, match="template '/no/such' is not a folder"):
        await backend.start("x", Blueprint("/no/such"))
    with pytest.raises(ConfigError, match="shell 'fish'; known: sh, bash"):
        await backend.start("x", Blueprint(shell="fish"))
    with pytest.raises(ConfigError, match="'A=B' cannot be an environment variable"):
        await backend.start("x", Blueprint(environment={"A=B": ""}))
    with pytest.raises(SandboxError, match="leaves the workspace"):
        await backend.start("x", Blueprint(files={"../x": b""}))
    with pytest.raises(SandboxError, match="holds the sandboxes themselves"):
        await backend.start("x", Blueprint(str(tmp_path)))
    template = tmp_path / "template"
    template.mkdir()
    os.mkfifo(template / "pipe")
    with pytest.raises(SandboxError, match="only files, folders and links"):
        await backend.start("x", Blueprint(str(template)))
    assert entries(tmp_path) == ["template"]


@pytest.mark.parametrize(
    "path",
    ["../secret", "/etc/hostname", "a/../../secret", "up/secret", "up", "out", "chain", "a/back/secret",
     "loop", "", ".", "a", "x\0y", "/workspacex", "~/x/../../.."],
)  # fmt: skip
def test_a_path_or_link_that_leaves_the_workspace_is_refused(path: str, workspace: tuple[Path, int]):
    folder, fd = workspace
    (folder / "a").mkdir()
    (folder / "up").symlink_to("..")
    (folder / "out").symlink_to(folder.parent / "secret")
    (folder / "chain").symlink_to("up/secret")
    (folder / "a" / "back").symlink_to("../..")
    (folder / "loop").symlink_to("loop")
    with pytest.raises(PathError):
        read_file(fd, path, 1000)


def test_links_inside_the_workspace_are_followed_by_reading(workspace: tuple[Path, int]):
    folder, fd = workspace
    write_file(fd, "runs/3/log", b"three")
    (folder / "latest").symlink_to("runs/3")
    (folder / "runs" / "absolute").symlink_to("/workspace/latest/log")
    (folder / "up").symlink_to("runs/../runs/3/../3/log")
    assert [read_file(fd, path, 99) for path in ("latest/log", "runs/absolute", "up")] == [b"three"] * 3


def test_writing_replaces_a_link_and_never_what_it_points_to(workspace: tuple[Path, int]):
    folder, fd = workspace
    (folder / "out").symlink_to(folder.parent / "secret")
    os.link(folder.parent / "secret", folder / "hard")
    (folder / "up").symlink_to("..")
    for path in ("out", "hard"):
        write_file(fd, path, b"new")
    with pytest.raises(PathError, match="leaves the workspace"):
        write_file(fd, "up/secret", b"new")
    assert (folder.parent / "secret").read_bytes() == b"secret"
    assert (folder / "out").read_bytes() == b"new"
    assert sorted(path.name for path in folder.iterdir()) == ["hard", "out", "up"]


def test_a_replaced_program_stays_executable(workspace: tuple[Path, int]):
    folder, fd = workspace
    (folder / "run").write_bytes(b"old")
    (folder / "run").chmod(0o751)
    write_file(fd, "run", b"new")
    assert (folder / "run").stat().st_mode & 0o777 == 0o751


def test_what_is_no_file_or_too_large_is_refused_at_once(workspace: tuple[Path, int]):
    folder, fd = workspace
    os.mkfifo(folder / "pipe")
    write_file(fd, "big", b"x" * 100)
    assert len(read_file(fd, "big", 100)) == 100
    for path, reason in (("pipe", "not a regular"), ("big", "larger than 99"), ("none", "No such file")):
        with pytest.raises(PathError, match=reason):
            read_file(fd, path, 99)
    with pytest.raises(PathError, match="directory"):
        write_file(fd, "big/x", b"")


def test_a_link_swapped_in_during_the_walk_leads_nowhere(workspace: tuple[Path, int]):
    folder, fd = workspace
    (folder / "real").mkdir()
    (folder / "real" / "secret").write_bytes(b"mine")
    done = threading.Event()

    def swap():
        while not done.is_set():
            for target in ("real", ".."):
                (folder / "new").symlink_to(target)
                (folder / "new").rename(folder / "swapped")

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        seen = {_read_or_refused(fd) for _ in range(2000)}
    finally:
        done.set()
        thread.join()
    assert seen <= {b"mine", b"refused"}


def _read_or_refused(fd: int) -> bytes:
    try:
        return read_file(fd, "swapped/secret", 99)
    except PathError:
        return b"refused"


_SEGMENTS = st.lists(st.sampled_from(["a", "b", "..", ".", "", "link", "up", "workspace"]), max_size=6)


@settings(deadline=None, max_examples=200)
@given(_SEGMENTS)
def test_no_path_reaches_what_is_outside(segments: list[str]):
    with sandbox_root() as root:
        (root / "b").write_bytes(b"outside")
        (root / "workspace").mkdir()
        (root / "workspace" / "a").mkdir()
        (root / "workspace" / "b").write_bytes(b"inside")
        (root / "workspace" / "link").symlink_to("a/../b")
        (root / "workspace" / "a" / "up").symlink_to("../..")
        fd = os.open(root / "workspace", os.O_RDONLY)
        try:
            assert read_file(fd, "/".join(segments), 99) == b"inside"
        except PathError:
            pass
        finally:
            os.close(fd)


def test_copying_stops_when_it_is_asked_to(tmp_path: Path):
    source, target = tmp_path / "source", tmp_path / "target"
    for folder in (source, target):
        folder.mkdir()
    for number in range(10):
        (source / str(number)).write_text("x")
    answers = iter([False, False, True])
    copy_tree(source, target, Copying(stop=lambda: next(answers)))
    assert len(list(target.iterdir())) == 2


def test_a_tree_is_removed_whatever_its_modes_and_depth(tmp_path: Path):
    top = tmp_path / "top"
    top.mkdir()
    fd = os.open(top, os.O_RDONLY)
    name = "d" * 200
    for _ in range(40):  # twice as long as a path may be
        os.mkdir(name, dir_fd=fd)
        inner = os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(os.open("f", os.O_CREAT | os.O_WRONLY, 0, dir_fd=inner))
        os.close(fd)
        fd = inner
    os.close(fd)
    (tmp_path / "kept").write_text("kept")
    (top / "link").symlink_to(tmp_path)
    for folder in (top / name / name, top / name, top):
        folder.chmod(0)
    remove_tree(top)
    remove_tree(top)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@each_backend
async def test_a_workspace_full_of_traps_is_removed(kind: str):
    async with running(kind) as (sandbox, _):
        made = await sandbox.shell(
            "mkdir -p a/b/c && touch a/b/c/f && ln -s / root && mkfifo p && umask 777 && mkdir shut",
            timeout_s=20,
        )
        assert made.exit_code == 0, made.output
