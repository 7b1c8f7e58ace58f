"""The run as the operating system sees it: its processes, and what is left of them.

Nothing here asks a part of the runtime about itself, but for an engine's load, which only the engine knows.
"""

import ctypes
import http.client
import os
import socket
from contextlib import suppress
from pathlib import Path

import psutil

from sostenuto.runtime.engines.wire import Load
from sostenuto.sandbox.cgroup_tree import is_orphan

_PR_SET_CHILD_SUBREAPER = 36
ENGINE = "sostenuto.runtime.engines.embedded"
TOOL_SERVER = "sostenuto.runtime.tool_process"
WORKER = "sostenuto.envs.worker"
_LOAD_S = 10.0


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends.

    So a process that was left behind is found below this one.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans() -> None:
    """Take in the dead among the adopted; while no child of our own is dying."""
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess, ChildProcessError):
            if child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)


def living_descendants() -> list[psutil.Process]:
    """Every process below this one that still runs."""
    return [child for child in psutil.Process().children(recursive=True) if is_running(child)]


def running(module: str) -> list[psutil.Process]:
    """Living descendants that were started as `python -m MODULE`."""
    found: list[psutil.Process] = []
    for process in living_descendants():
        with suppress(psutil.NoSuchProcess):
            if module in process.cmdline():
                found.append(process)
    return found


def sandbox_folders(run: Path) -> int:
    """Sandboxes of the run that were not taken away."""
    root = run / "sandboxes"
    return sum(path.is_dir() for path in root.iterdir()) if root.is_dir() else 0


def engine_load() -> Load:
    """What the one running engine says it holds.

    Blocks: when a job is asked in the midst of its own event, it cannot go on and end the engine meanwhile.
    """
    (engine,) = running(ENGINE)
    command = engine.cmdline()
    path = command[command.index("--socket") + 1]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_LOAD_S)
        connection.connect(path)
        return Load.model_validate_json(_get(connection, "/load"))


def _get(connection: socket.socket, path: str) -> bytes:
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: engine\r\nConnection: close\r\n\r\n".encode())
    response = http.client.HTTPResponse(connection)
    response.begin()
    return response.read()


def orphan_groups(servers: set[str]) -> list[str]:
    """Groups that one of the servers has made and nobody has removed."""
    # Others make and remove groups meanwhile, which `rglob` does not bear.
    names = (name for _, names, _ in os.walk("/sys/fs/cgroup") for name in names)
    return [name for name in names if servers & set(name.split(".")) and is_orphan(name)]


def is_running(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        # A dead one may wait for an init that takes nobody in.
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def command_of(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return []
