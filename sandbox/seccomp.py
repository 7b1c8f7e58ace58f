"""System-call filters, as classic BPF programs built once and handed to every sandbox.

`namespaced` is the second layer inside namespaces.  `bare` replaces them where there are none: no
sockets, no System V IPC.  `shared_user` adds what file permissions would stop if the sandbox had a
user of its own.  What is forbidden fails with an error; it does not kill the caller.

The one module that knows pyseccomp, which is untyped.
"""

import errno
import os
from functools import cache
from typing import Protocol, cast

from sostenuto.errors import Unsupported

_KERNEL = (
    "acct", "add_key", "adjtimex", "bpf", "clock_adjtime", "clock_settime", "delete_module", "finit_module",
    "init_module", "io_uring_enter", "io_uring_register", "io_uring_setup", "ioperm", "iopl", "kcmp",
    "kexec_file_load", "kexec_load", "keyctl", "lookup_dcookie", "name_to_handle_at", "open_by_handle_at",
    "perf_event_open", "quotactl", "reboot", "request_key", "settimeofday", "swapoff", "swapon", "syslog",
    "userfaultfd", "vhangup",
)  # fmt: skip
_OTHER_PROCESSES = ("pidfd_getfd", "process_vm_readv", "process_vm_writev", "ptrace")
_NAMESPACES = (
    "chroot", "fsconfig", "fsmount", "fsopen", "fspick", "mount", "mount_setattr", "move_mount",
    "open_tree", "pivot_root", "setns", "umount2", "unshare",
)  # fmt: skip
_NETWORK = ("accept", "accept4", "bind", "connect", "listen", "socket")
_SYSTEM_V = ("mq_open", "msgget", "semget", "shmat", "shmget")
# Landlock has no say over these, and a shared user may change files outside the workspace with them.
_FILE_MODES = (
    "chmod", "chown", "fchmodat", "fchown", "fchownat", "lchown", "lremovexattr", "lsetxattr",
    "removexattr", "setxattr",
)  # fmt: skip
_FCHMODAT2 = 452
_CLONE_NEW = 0x7E020080
"""Every CLONE_NEW* flag: time, mount, cgroup, uts, ipc, user, pid, net."""
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_AF_NETLINK = 16
"""The families above it (packet, alg, vsock, bluetooth, ...) only widen the kernel's surface."""


class _Filter(Protocol):
    def add_rule(self, action: int, syscall: int | str, /, *args: object) -> None: ...
    def export_bpf(self, file: object, /) -> None: ...


class _Library(Protocol):
    """What is used of pyseccomp."""

    ALLOW: int
    GT: int
    MASKED_EQ: int

    def ERRNO(self, code: int, /) -> int: ...  # noqa: N802
    def SyscallFilter(self, default: int, /) -> _Filter: ...  # noqa: N802
    def Arg(self, index: int, comparison: int, first: int, second: int = 0, /) -> object: ...  # noqa: N802


@cache
def program(*, bare: bool, shared_user: bool) -> bytes:
    """The filter as an array of struct sock_filter; raises Unsupported without libseccomp."""
    seccomp = _library()
    rules = seccomp.SyscallFilter(seccomp.ALLOW)
    refuse = seccomp.ERRNO(errno.EPERM)
    forbidden = _KERNEL + _OTHER_PROCESSES + _NAMESPACES
    if bare:
        forbidden += _NETWORK + _SYSTEM_V
    if shared_user:
        forbidden += _FILE_MODES
        rules.add_rule(refuse, _FCHMODAT2)
    for name in forbidden:
        _forbid(rules, refuse, name)
    # clone3 hides its flags in memory; a C library that gets ENOSYS falls back to clone.
    rules.add_rule(seccomp.ERRNO(errno.ENOSYS), "clone3")
    for bit in _bits(_CLONE_NEW):
        rules.add_rule(refuse, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, bit, bit))
    for request in (_TIOCSTI, _TIOCLINUX):
        rules.add_rule(refuse, "ioctl", seccomp.Arg(1, seccomp.MASKED_EQ, 0xFFFFFFFF, request))
    if not bare:
        rules.add_rule(refuse, "socket", seccomp.Arg(0, seccomp.GT, _AF_NETLINK))
    return _export(rules)


def _forbid(rules: _Filter, action: int, name: str) -> None:
    try:
        rules.add_rule(action, name)
    except (OSError, ValueError):
        # Calls of other architectures, and calls younger than the installed libseccomp.
        return


def _bits(mask: int) -> list[int]:
    return [1 << bit for bit in range(32) if mask >> bit & 1]


def _export(rules: _Filter) -> bytes:
    fd = os.memfd_create("seccomp", os.MFD_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()


def _library() -> _Library:
    try:
        import pyseccomp  # pyright: ignore[reportMissingTypeStubs]
    except (ImportError, OSError, RuntimeError) as exc:
        raise Unsupported(
            f"no seccomp filters: {exc}; install libseccomp (Debian and Ubuntu: apt install libseccomp2)"
        ) from exc
    return cast("_Library", pyseccomp)


def descriptor(content: bytes) -> int:
    """A descriptor from which a launched process reads `content`; the caller closes it."""
    fd = os.memfd_create("seccomp", os.MFD_CLOEXEC)
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
