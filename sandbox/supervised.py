"""What the backends without namespaces share: a supervisor above the shell, and the host's own paths."""

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from sostenuto.sandbox import processes, system
from sostenuto.sandbox.execution import spawner_script
from sostenuto.sandbox.folders import Folder
from sostenuto.sandbox.launch import Launch
from sostenuto.sandbox.protocol import Blueprint
from sostenuto.sandbox.shell import guard_script

_PROGRAM = (
    "import sys; sys.path.append({path!r}); from sostenuto.sandbox.supervisor import Order, supervise; "
    "supervise({parent}, Order({argv!r}, {uid}, {landlock_fd}, {seccomp_fd}))"
)
"""The order is written into the program: Python literals need no parser to be imported."""


SHARED_TASKS = 1024
"""What the user may start elsewhere before a sandbox under the same user feels its limit."""


@dataclass(frozen=True, slots=True)
class Confinement:
    """Descriptors that the supervisor applies to the shell before it starts; None: not applied."""

    landlock_fd: int | None = None
    seccomp_fd: int | None = None

    @property
    def descriptors(self) -> tuple[int, ...]:
        return tuple(fd for fd in (self.landlock_fd, self.seccomp_fd) if fd is not None)


def supervised_launch(blueprint: Blueprint, folder: Folder, confinement: Confinement) -> Launch:
    """The shell under a supervisor, in its own session, as the folder's user."""
    inside = str(folder.workspace)
    variables = system.environment(blueprint, home=inside, tmp=str(folder.tmp))
    spawner = spawner_script(str(folder.pipes), folder.token)
    program = _PROGRAM.format(
        path=str(Path(__file__).parents[2]),
        parent=os.getpid(),
        argv=["/bin/sh", "-c", guard_script(blueprint, inside, spawner, others=_others(folder))],
        uid=folder.uid,
        landlock_fd=confinement.landlock_fd,
        seccomp_fd=confinement.seccomp_fd,
    )
    argv = [sys.executable, "-I", "-S", "-c", program]
    pipes = str(folder.pipes)
    return Launch(argv, variables, signal.SIGTERM, pipes, inside, confinement.descriptors)


def _others(folder: Folder) -> int:
    """Tasks under the same limit on processes: without a namespace it is the user's, and counts them all."""
    if folder.uid is not None or os.geteuid() == 0:
        return 0
    return processes.tasks_of_user(os.geteuid()) + SHARED_TASKS
