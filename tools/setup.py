"""What is done in a sandbox before programs come: set-up commands once, a health check in every one.

Commands run in the sandbox's shell, one after the other, so that directory and variables stay.  What they
leave in the workspace becomes a layer that sandboxes start over; processes and variables do not.
"""

from dataclasses import dataclass

import anyio

from sostenuto.errors import SandboxError
from sostenuto.sandbox.protocol import Sandbox, ShellResult

HEALTH_S = 10.0
_TAIL_LINES = 20
_TAIL_CHARS = 2000


class SetupFailed(SandboxError):  # noqa: N818 - reads as the fact it states
    """A set-up command failed.  In the same content it would fail again."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What an environment wants done in its sandboxes."""

    commands: tuple[str, ...] = ()
    timeout_s: float = 600.0
    """For all commands together."""
    health: str | None = None
    """A command that exits with 0, within `HEALTH_S`, in a sandbox that is fit for a program."""


async def run_setup(sandbox: Sandbox, setup: Setup) -> None:
    """Run the commands; SetupFailed names the one that failed and the end of what it wrote."""
    ends_s = anyio.current_time() + setup.timeout_s
    for command in setup.commands:
        left_s = max(0.001, ends_s - anyio.current_time())
        result = await sandbox.shell(command, timeout_s=left_s)
        if result.exit_code != 0:
            raise SetupFailed(f"set-up command {command!r} {_came_to(result, setup.timeout_s)}")


async def check_health(sandbox: Sandbox, setup: Setup) -> None:
    """Raise SandboxError unless the sandbox is fit for a program; its shell stays as it was."""
    if setup.health is None:
        return
    result = await sandbox.exec(["sh", "-c", setup.health], timeout_s=HEALTH_S)
    if result.exit_code != 0:
        raise SandboxError(f"health check {setup.health!r} {_came_to(result, HEALTH_S)}")


def _came_to(result: ShellResult, limit_s: float) -> str:
    code = result.exit_code
    how = f"exited with {code}" if code is not None else f"was ended at the limit of {limit_s:g} s"
    if result.out_of_memory:
        how += ", the sandbox's memory was used up"
    tail = "\n".join(result.output.splitlines()[-_TAIL_LINES:])[-_TAIL_CHARS:]
    return f"{how}; its output ends with:\n{tail}" if tail else f"{how} without output"
