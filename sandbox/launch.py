"""How the launcher of a sandbox is started."""

import signal
from dataclasses import dataclass, field

from sostenuto.sandbox.idmapped import Shown


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start the launcher of one sandbox."""

    argv: list[str]
    environment: dict[str, str]
    """All variables of the launcher; not on its command line, which others may read."""
    end_signal: signal.Signals
    """SIGKILL when the kernel then ends everything inside, SIGTERM when the launcher does."""
    pipes: str
    """Where the sandbox sees the pipes of `execution`."""
    workspace: str
    """Where it sees its workspace."""
    descriptors: tuple[int, ...] = field(default=())
    """Passed on to the launcher and closed here once it runs."""
    shown: tuple[Shown, ...] = field(default=())
    """What the launcher is to find at other places and under another owner."""
