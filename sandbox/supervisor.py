"""Parent of a sandbox that has no pid namespace: it adopts every orphan and ends them all.

    python -I -S -c 'from sostenuto.sandbox.supervisor import supervise; supervise(...)'

Started by a backend with the shell's pipes as its own stdin, stdout and stderr.  It ends everything
below it, and then itself, on SIGTERM, when the process that started it dies, and when the shell ends.
It imports little (no json, typing, pathlib), since every start pays for it.
"""

import ctypes
import os
import signal
from contextlib import suppress

from sostenuto.sandbox import processes

_PR_SET_PDEATHSIG = 1
_PR_SET_SECCOMP = 22
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_LANDLOCK_RESTRICT_SELF = 446
_BYTES_PER_INSTRUCTION = 8


class Order:
    """What to start, and how to confine it first; None: not at all."""

    __slots__ = ("argv", "landlock_fd", "seccomp_fd", "uid")

    def __init__(
        self, argv: list[str], uid: int | None, landlock_fd: int | None, seccomp_fd: int | None
    ) -> None:
        self.argv = argv
        self.uid = uid
        self.landlock_fd = landlock_fd
        self.seccomp_fd = seccomp_fd


class _Program(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def supervise(parent: int, order: Order) -> None:
    """Run the shell of a child of `parent` to its end; the caller exits then."""
    libc = ctypes.CDLL(None, use_errno=True)
    awaited = {signal.SIGTERM, signal.SIGCHLD, signal.SIGINT, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    _prctl(libc, _PR_SET_CHILD_SUBREAPER, 1)
    _prctl(libc, _PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before we could ask to be told
        return
    shell = os.fork()
    if shell == 0:
        _become_shell(order, libc)
    _close_inherited(order)
    _wait(shell, awaited)
    processes.end_below(os.getpid())


def _wait(shell: int, awaited: set[signal.Signals]) -> None:
    """Reap until the shell is gone or a signal asks for the end."""
    while signal.sigwait(awaited) is signal.SIGCHLD:
        if shell in _reap():
            break
    # From here on the kernel reaps, so that `end_below` sees no zombies of ours.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def _reap() -> set[int]:
    reaped: set[int] = set()
    with suppress(ChildProcessError):
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            reaped.add(pid)
    return reaped


def _close_inherited(order: Order) -> None:
    """Keep only stderr, by whose end the other side sees that everything is over."""
    for fd in (0, 1, order.landlock_fd, order.seccomp_fd):
        if fd is not None:
            os.close(fd)


def _become_shell(order: Order, libc: ctypes.CDLL) -> None:
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        os.setsid()
        _be_expendable()
        _drop_user(order.uid)
        _prctl(libc, _PR_SET_PDEATHSIG, signal.SIGKILL)  # forgotten at a change of user, hence after it
        _prctl(libc, _PR_SET_NO_NEW_PRIVS, 1)
        _restrict(order.landlock_fd, libc)
        _filter(order.seccomp_fd, libc)
        # With our own variables, the sandbox's marker among them: so `reclaim` finds orphans.
        os.execv(order.argv[0], order.argv)
    except OSError as exc:
        os.write(2, f"cannot start the shell: {exc}\n".encode())
    os._exit(127)


def _be_expendable() -> None:
    """When memory runs out, what runs in the sandbox is ended before the supervisor."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123 - see processes
        file.write("500")


def _drop_user(uid: int | None) -> None:
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def _restrict(landlock_fd: int | None, libc: ctypes.CDLL) -> None:
    if landlock_fd is not None:
        _check(libc.syscall(_LANDLOCK_RESTRICT_SELF, landlock_fd, 0), "landlock_restrict_self")
        os.close(landlock_fd)


def _filter(seccomp_fd: int | None, libc: ctypes.CDLL) -> None:
    if seccomp_fd is None:
        return
    with os.fdopen(seccomp_fd, "rb") as file:
        code = file.read()
    program = _Program(len(code) // _BYTES_PER_INSTRUCTION, code)
    _check(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0), "seccomp")


def _prctl(libc: ctypes.CDLL, option: int, value: int) -> None:
    _check(libc.prctl(option, value, 0, 0, 0), f"prctl({option})")


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
