"""Folders shown under another owner, to the processes that are launched over them and to nobody else.

An overlay copies up only what its user may change, so a layer must seem to belong to the sandbox's own user.
Root can mount it so (Linux 5.19, where the file system can).  A few threads make the mounts, each in a mount
namespace of its own, and live as long as this process: the mounts end with it, however it ends, and
launchers, which are bound to die with the thread that started them, do not die earlier.

The one module that makes these system calls, for which there is no library.
"""

import ctypes
import os
import struct
import subprocess
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_AT_FDCWD, _AT_EMPTY_PATH = -100, 0x1000
_CLONED = 1 | os.O_CLOEXEC
_MOVE_MOUNT_F_EMPTY_PATH = 4
_MOUNT_ATTR_IDMAP, _MOUNT_ATTR_RDONLY = 0x00100000, 0x1
_CLONE_NEWNS = 0x00020000
_MS_PRIVATE_ALL = (1 << 18) | (1 << 14)
_MNT_DETACH = 2
_THREADS = 4
"""A launch takes some ten milliseconds of the kernel's time: one after the other, a hundred are late."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shown:
    """What is in `source`, of one user and one group, appears at `at` as that of user and group `uid`."""

    source: Path
    at: Path
    """An empty folder."""
    uid: int

    @property
    def owner(self) -> tuple[int, int]:
        facts = self.source.stat()
        return facts.st_uid, facts.st_gid


class _Thread:
    """Does work in a mount namespace of its own, one piece after the other."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._serve, name="mounts", daemon=True).start()
        self.do(_leave_the_others)

    def _serve(self) -> None:
        while True:
            self._work.get()()

    def do(self, work: Callable[[], T]) -> T:
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as exc:  # noqa: BLE001 - handed on to who waits
                done.set_exception(exc)

        self._work.put(run)
        return done.result()


_starting = threading.Lock()
_threads: dict[tuple[int, int], _Thread] = {}
"""Those of this process, and of processes that it was forked from: threads do not survive a fork."""


def _thread(shown: Sequence[Shown]) -> _Thread:
    """Always the same one for the same folders."""
    key = os.getpid(), hash(shown[0].at) % _THREADS if shown else 0
    with _starting:
        if key not in _threads:
            _threads[key] = _Thread()
        return _threads[key]


def launch_over(shown: Sequence[Shown], launch: Callable[[], T]) -> T:
    """Call `launch` where the folders are shown; raises OSError when this system cannot show them."""
    with ExitStack() as stack:
        owners = {(one.owner, one.uid) for one in shown}
        namespaces = {key: stack.enter_context(_mapped(*key)) for key in owners}
        ready = [(one, namespaces[one.owner, one.uid]) for one in shown]
        return _thread(shown).do(lambda: _launch_over(ready, launch))


def _launch_over(ready: list[tuple[Shown, int]], launch: Callable[[], T]) -> T:
    for one, namespace in ready:
        tree = _call("open_tree", _syscall(_OPEN_TREE, _AT_FDCWD, bytes(one.source), _CLONED))
        try:
            how = struct.pack("QQQQ", _MOUNT_ATTR_IDMAP | _MOUNT_ATTR_RDONLY, 0, 0, namespace)
            _call("mount_setattr", _syscall(_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, how, len(how)))
            target = bytes(one.at)
            _call("move_mount", _syscall(_MOVE_MOUNT, tree, b"", _AT_FDCWD, target, _MOVE_MOUNT_F_EMPTY_PATH))
        finally:
            os.close(tree)
    return launch()


def withdraw(shown: Sequence[Shown]) -> None:
    """Show the folders no longer to who is launched from now on; what runs over them keeps them."""
    if shown:
        _thread(shown).do(lambda: [_libc().umount2(bytes(one.at), _MNT_DETACH) for one in shown])


def _leave_the_others() -> None:
    _call("unshare", _libc().unshare(_CLONE_NEWNS))
    _call("mount", _libc().mount(None, b"/", None, _MS_PRIVATE_ALL, None))


@contextmanager
def _mapped(owner: tuple[int, int], uid: int) -> Generator[int]:
    """A descriptor of a user namespace in which user and group `owner` are `uid` outside."""
    with _unshared() as pid:
        for name, inside in zip(("uid_map", "gid_map"), owner, strict=True):
            Path(f"/proc/{pid}/{name}").write_text(f"{inside} {uid} 1\n")
        namespace = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield namespace
    finally:
        os.close(namespace)


@contextmanager
def _unshared() -> Generator[int]:
    """A process in a user namespace of its own, which has answered and so is there."""
    pipe = subprocess.PIPE
    with subprocess.Popen(["unshare", "--user", "cat"], stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.write(b".")
            process.stdin.flush()
        if process.stdout.read(1) != b".":
            raise OSError(f"unshare --user: {process.communicate()[1].decode(errors='replace').strip()}")
        yield process.pid


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _syscall(*arguments: int | bytes) -> int:
    return _libc().syscall(*(ctypes.c_long(word) if isinstance(word, int) else word for word in arguments))


def _call(name: str, result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result
