"""What the backends without namespaces share: a supervisor above the shell, and the host's own paths."""

import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import sostenuto
from sostenuto.sandbox import system
from sostenuto.sandbox.folders import MARKER, Folder
from sostenuto.sandbox.local import Launch
from sostenuto.sandbox.protocol import Blueprint
from sostenuto.sandbox.shell import guard_script
from sostenuto.sandbox.supervisor import Order

_PROGRAM = "import sys; sys.path.append({path!r}); from sostenuto.sandbox.supervisor import main; main()"


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
    variables = system.environment(blueprint, home=str(folder.workspace), tmp=str(folder.tmp))
    order: Order = {
        "parent": os.getpid(),
        "argv": ["/bin/sh", "-c", guard_script(blueprint, str(folder.workspace))],
        # Whatever the shell starts inherits it: so `reclaim` finds the orphans of a dead supervisor.
        "environment": variables | {MARKER: str(folder.path)},
        "uid": folder.uid,
        "landlock_fd": confinement.landlock_fd,
        "seccomp_fd": confinement.seccomp_fd,
    }
    package = str(Path(sostenuto.__file__).parent.parent)
    argv = [sys.executable, "-I", "-S", "-c", _PROGRAM.format(path=package), json.dumps(order)]
    return Launch(argv, signal.SIGTERM, confinement.descriptors)
