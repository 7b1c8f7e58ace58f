"""What can be said about the docker backend where there is no daemon, or a bad one."""

import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from math import inf
from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes_cgroups import FakeV2
from sandboxes import sandbox_root
from sostenuto.errors import SandboxError, Unsupported
from sostenuto.sandbox.docker import backend as backend_module
from sostenuto.sandbox.docker import labels
from sostenuto.sandbox.docker.address import find_socket
from sostenuto.sandbox.docker.backend import DockerBackend, DockerSettings
from sostenuto.sandbox.docker.calls import Calls
from sostenuto.sandbox.docker.execs import once_awake
from sostenuto.sandbox.docker.labels import NAMESPACE, OWNER, is_orphan, labels_of
from sostenuto.sandbox.docker.memory import find_memory
from sostenuto.sandbox.docker.stream import Marks
from sostenuto.sandbox.docker.typed import Conflict
from sostenuto.sandbox.docker.wire import STDERR, STDOUT, Frames
from sostenuto.sandbox.output import HeadTail
from sostenuto.sandbox.protocol import Blueprint


def cut(data: bytes, at: list[int]) -> list[bytes]:
    places = sorted({min(place, len(data)) for place in at})
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


_PIECES = st.lists(st.tuples(st.sampled_from([STDOUT, STDERR]), st.binary(max_size=30)), max_size=8)


@given(_PIECES, st.lists(st.integers(0, 300), max_size=10))
def test_frames_are_the_same_however_they_are_cut(pieces: list[tuple[int, bytes]], at: list[int]):
    data = b"".join(bytes([kind, 0, 0, 0]) + len(text).to_bytes(4, "big") + text for kind, text in pieces)
    frames = Frames()
    seen = {STDOUT: b"", STDERR: b""}
    for chunk in cut(data, at):
        for kind, piece in frames.feed(chunk):
            seen[kind] += piece
    for kind in (STDOUT, STDERR):
        assert seen[kind] == b"".join(text for of, text in pieces if of == kind)


@given(
    st.lists(st.sampled_from([b"ab", b"abab", b"aba", b"a", b"b", b"abac", b"x"])),
    st.lists(st.integers(0, 60)),
)
def test_marks_are_taken_out_however_they_are_cut(words: list[bytes], at: list[int]):
    mark, data = b"abac", b"".join(words)
    sink, marks = HeadTail(1 << 16), Marks(mark)
    for chunk in cut(data, at):
        marks.pass_on(chunk, sink)
    marks.pass_on(b"!", sink)  # what was held back cannot begin a mark any more
    assert sink.text()[0].encode() == data.replace(mark, b"") + b"!"
    assert marks.seen == data.count(mark)


def test_a_socket_that_cannot_be_used_comes_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    with pytest.raises(Unsupported, match="only unix:// sockets"):
        find_socket(None)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    with pytest.raises(Unsupported, match=r"no Docker or Podman socket at .*none; start the daemon"):
        find_socket(None)
    with socket.socket(socket.AF_UNIX) as closed:
        closed.bind(str(tmp_path / "closed"))
    with pytest.raises(Unsupported, match="nothing answers"):
        find_socket(str(tmp_path / "closed"))


async def test_without_a_daemon_a_probe_says_so_and_a_start_is_unsupported(tmp_path: Path):
    backend = DockerBackend(tmp_path, DockerSettings(socket=str(tmp_path / "none")))
    probe = await backend.probe()
    assert not probe.works
    assert "start the daemon" in probe.remedy
    with pytest.raises(Unsupported):
        await backend.start("x", Blueprint())


async def test_without_the_sdk_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "docker", None)
    with sandbox_root() as root, socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(root / "mute"))
        mute.listen()
        probe = await DockerBackend(root, DockerSettings(socket=str(root / "mute"))).probe()
    assert "pip install 'sostenuto[docker]'" in probe.remedy


async def test_a_daemon_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sostenuto.sandbox.docker.typed.SILENCE_S", 1.0)
    monkeypatch.setattr(backend_module, "_PROBE_S", 0.3)
    with sandbox_root() as root, socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(root / "mute"))
        mute.listen()
        probe = await DockerBackend(root, DockerSettings(socket=str(root / "mute"))).probe()
    assert not probe.works
    assert "no answer" in probe.details["error"]


async def test_a_call_given_up_before_it_began_is_not_made_and_holds_no_slot():
    calls = Calls(1)
    go_on = threading.Event()
    made: list[int] = []
    hung = calls.begin(go_on.wait)
    with pytest.raises(SandboxError, match="no answer within"):
        await calls.run(lambda: made.append(1), within_s=0.05)
    with anyio.move_on_after(0.05):
        await calls.run(lambda: made.append(2))
    go_on.set()
    assert await calls.wait(hung)
    assert await calls.run(lambda: made.append(3)) is None
    assert made == [3]


def test_where_there_is_no_proc_owners_are_told_apart_by_their_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(labels, "_HAS_PROC", False)
    root = Path("/root-of-mine")
    mine = labels_of(root, "x")
    assert not is_orphan(mine, root)
    pid, started, boot = mine[OWNER].split(".")
    assert is_orphan(mine | {OWNER: f"{pid}.{int(started) - 1}.{boot}"}, root)
    assert is_orphan(mine | {OWNER: f"4194305.{started}.{boot}"}, root)


def test_an_owner_is_judged_only_where_its_pid_means_something():
    root = Path("/root-of-mine")
    mine = labels_of(root, "x")
    pid, started, boot = mine[OWNER].split(".")
    dead = mine | {OWNER: f"{pid}.{int(started) - 1}.{boot}"}
    rebooted = mine | {OWNER: f"{pid}.{started}.another"}
    assert is_orphan(dead, root)
    assert is_orphan(dead, Path("/another"))
    assert is_orphan(rebooted, root)
    assert is_orphan(dead | {NAMESPACE: "pid:[1]"}, root)
    assert not is_orphan(rebooted, Path("/another"))
    assert not is_orphan(dead | {NAMESPACE: "pid:[1]"}, Path("/another"))
    assert not is_orphan({}, root)
    assert not is_orphan({OWNER: "nonsense"}, root)


_ID = "4f" * 32


def test_on_cgroup_v2_swap_is_allowed_while_it_is_out_and_no_longer():
    tree = FakeV2(f"/system.slice/docker-{_ID}.scope")
    tree.hand_on("/", "memory")
    tree.hand_on("/system.slice", "memory")
    group = tree.path(tree.own)
    memory = find_memory(tree, _ID, 64 << 20)
    memory.move_out()
    assert tree.files[group]["memory.swap.max"] == str(64 << 20)
    assert tree.files[group]["memory.reclaim"] == "4096"
    memory.let_back()
    assert tree.files[group]["memory.swap.max"] == "0"


@pytest.mark.parametrize(
    ("own", "readonly", "why"),
    [
        ("/user.slice", (), "its cgroup is not seen from here"),
        (f"/docker/{_ID}", (f"/docker/{_ID}",), "run this as root"),
    ],
)
def test_a_group_that_is_not_the_container_s_or_not_ours_is_left_alone(
    own: str, readonly: tuple[str, ...], why: str
):
    tree = FakeV2(own, readonly=readonly, inside=False)
    tree.hand_on("/", "memory")
    if own.count("/") > 1:
        tree.hand_on("/docker", "memory")
    with pytest.raises(Unsupported, match=why):
        find_memory(tree, _ID, 1 << 20)


def test_without_a_memory_controller_that_is_said():
    with pytest.raises(Unsupported, match="no memory cgroup of container"):
        find_memory(FakeV2(f"/docker/{_ID}"), _ID, 1 << 20)


def paused(times: float) -> tuple[Callable[[], Awaitable[str]], list[int]]:
    """A daemon that says so many times that the container is paused; and how often it was asked."""
    asked: list[int] = []

    async def ask() -> str:
        asked.append(1)
        if len(asked) <= times:
            raise Conflict("exec in c: Container c is paused, unpause the container before exec")
        return "made"

    return ask, asked


@pytest.mark.looptime
async def test_a_daemon_that_hears_late_of_the_end_of_a_pause_is_asked_again():
    ask, asked = paused(5)
    assert await once_awake(ask) == "made"
    assert len(asked) == 6


@pytest.mark.looptime
async def test_a_container_that_stays_paused_is_told_after_a_while():
    ask, asked = paused(inf)
    with pytest.raises(Conflict, match="is paused"):
        await once_awake(ask)
    assert len(asked) > 10


@pytest.mark.looptime
async def test_another_refusal_of_the_daemon_is_told_at_once():
    asked: list[int] = []

    async def ask() -> str:
        asked.append(1)
        raise Conflict("exec in c: container c is not running")

    with pytest.raises(Conflict, match="not running"):
        await once_awake(ask)
    assert len(asked) == 1
