"""Facts about processes, read from /proc, and signals to whole trees.

- A tree is a process and all its descendants; who forks while it is walked is found by the next sweep.
- A process is named by (pid, start time): a pid alone may have been given out again.
- Only the lightest of the standard library is imported: each supervisor of a sandbox loads this file.
"""

import os
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_SWEEPS = 200
_DEATH_S = 5
"""Only a process that hangs in the kernel takes longer than milliseconds."""
_GONE = (FileNotFoundError, ProcessLookupError)


def boot_id() -> str:
    """Differs after every boot, so that a start time is not compared with another boot's."""
    with suppress(OSError):
        return _read("/proc/sys/kernel/random/boot_id").decode().strip()
    return "unknown"


def _read(path: str) -> bytes:
    with open(path, "rb") as file:  # noqa: PTH123 - pathlib alone would double the time of its import
        return file.read()


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty when the process is gone."""
    try:
        text = _read(f"/proc/{pid}/stat")
    except _GONE:
        return []
    return text[text.rindex(b")") + 2 :].decode().split()


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None when it is gone or a zombie."""
    fields = _stat(pid)
    return int(fields[19]) if fields and fields[0] not in {"Z", "X"} else None


def now_ticks() -> int:
    """The present on the clock of `start_ticks`."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS_PER_S)


def last_pid() -> int:
    """The pid that was given out last, as this process counts them."""
    return int(_read("/proc/loadavg").split()[-1])


def is_alive(pid: int, started_ticks: int) -> bool:
    return start_ticks(pid) == started_ticks


def tasks_of_user(uid: int) -> int:
    """Threads of all processes of a user, which is what RLIMIT_NPROC counts."""
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208 - names are all that is needed
        with suppress(*_GONE):
            if os.stat(f"/proc/{name}").st_uid == uid:  # noqa: PTH116 - see `_read`
                count += len(os.listdir(f"/proc/{name}/task"))  # noqa: PTH208
    return count


def cpu_ticks(pid: int) -> int:
    """CPU time of the process and of the children that it has waited for; 0 when it is gone."""
    fields = _stat(pid)
    return sum(map(int, fields[11:15])) if fields else 0


def session(pid: int) -> int:
    """0 when the process is gone."""
    fields = _stat(pid)
    return int(fields[3]) if fields else 0


def has_word(pid: int, *words: str) -> bool:
    """Whether one of `words` is an argument that the process was started with, or a variable (NAME=value)."""
    wanted = {word.encode() for word in words}
    for name in ("cmdline", "environ"):
        with suppress(OSError):
            if not wanted.isdisjoint(_read(f"/proc/{pid}/{name}").split(b"\0")):
                return True
    return False


def children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(*_GONE):
        for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - names are all that is needed
            with suppress(*_GONE):
                found += map(int, _read(f"/proc/{pid}/task/{task}/children").split())
    return found


def descendants(pid: int) -> list[int]:
    """Everything below `pid`, parents first."""
    found: list[int] = []
    front = children(pid)
    while front:
        found += front
        front = [grandchild for child in front for grandchild in children(child)]
    return found


def ancestors(pid: int, *, among: list[int]) -> list[int]:
    """The chain above `pid` as far as it stays within `among`, nearest first."""
    chain: list[int] = []
    while (fields := _stat(pid)) and (pid := int(fields[1])) in among:
        chain.append(pid)
    return chain


def namespaced_pid(pid: int) -> int | None:
    """The pid that the process has in its own pid namespace."""
    with suppress(*_GONE):
        for line in _read(f"/proc/{pid}/status").splitlines():
            if line.startswith(b"NSpid:"):
                return int(line.split()[-1])
    return None


def send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _running(pids: list[int], told: set[int]) -> list[int]:
    """Those that can still act: neither dead nor stopped, nor `told` to stop as soon as the kernel lets go.

    The parent of a child that was stopped between vfork and exec is held by the kernel until it goes on.
    """
    states = ((pid, _stat(pid)) for pid in pids)
    return [
        pid
        for pid, fields in states
        if fields and fields[0] not in "TtZX" and not (fields[0] == "D" and pid in told)
    ]


def freeze(pid: int, *, root_too: bool = False) -> list[int]:
    """Stop the tree below `pid`, sweeping until a sweep finds nothing running; returns its pids.

    Raises TimeoutError when processes keep appearing.
    """
    return freeze_found(lambda: [pid, *descendants(pid)] if root_too else descendants(pid))


def freeze_found(find: Callable[[], list[int]]) -> list[int]:
    """`freeze` for whatever `find` finds, which is asked again until none of it is running."""
    told: set[int] = set()
    for sweep in range(_SWEEPS):
        found = find()
        running = _running(found, told)
        if not running:
            return found
        send(running, signal.SIGSTOP)
        told.update(running)
        if sweep:
            time.sleep(0.0005)  # a stop takes effect when the process next leaves the kernel
    raise TimeoutError("processes that keep appearing could not be stopped")


def thaw(pid: int) -> None:
    """Let the tree below `pid` go on, children first."""
    send(descendants(pid)[::-1], signal.SIGCONT)


def end_below(pid: int) -> None:
    """Kill everything below `pid`, which must be able to reap it or be their namespace's end.

    Raises TimeoutError when something is left.
    """
    for sweep in range(_SWEEPS):
        alive = [child for child in descendants(pid) if start_ticks(child) is not None]
        if not alive:
            return
        send(alive, signal.SIGSTOP)
        send(alive, signal.SIGKILL)
        if sweep:
            time.sleep(0.0005)
    raise TimeoutError(f"processes below {pid} could not be ended")


def end_tree(pid: int) -> None:
    """Kill `pid` and everything below it, and wait for their death."""
    end_found(lambda: [pid, *descendants(pid)])


def end_found(find: Callable[[], list[int]]) -> None:
    """Kill whatever `find` finds, and wait for its death.

    It is stopped first, so that no orphan of it escapes.
    """
    try:
        found = freeze_found(find)
    except TimeoutError:
        found = find()
    handles = open_handles(found)
    send(found, signal.SIGKILL)
    await_death(handles)


def open_handles(pids: list[int]) -> list[int]:
    """pidfds of those that are there; readable once the process is dead."""
    handles: list[int] = []
    for pid in pids:
        with suppress(ProcessLookupError):
            handles.append(os.pidfd_open(pid))
    return handles


def await_death(handles: list[int]) -> None:
    """Block until the processes are dead, for a few seconds at the most, and close the handles."""
    for handle in handles:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.poll(_DEATH_S * 1000)
        os.close(handle)


def with_environment(marker: bytes) -> list[int]:
    """Processes that were started with `marker` (NAME=value) in their environment."""
    found: list[int] = []
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208
        with suppress(OSError):
            if marker in _read(f"/proc/{name}/environ").split(b"\0"):
                found.append(int(name))
    return found
