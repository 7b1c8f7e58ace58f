"""Finds out what a backend can do by running it once."""

from collections.abc import Callable

import anyio

from sostenuto.errors import SostenutoError
from sostenuto.sandbox.cgroups import describe_limits, find_cgroups
from sostenuto.sandbox.protocol import Backend, Blueprint, Probe

TRIAL_S = 20.0
_PYTHON = "python3 -c 'import sys; print(sys.executable, sys.version.split()[0])'"


async def try_out(backend: Backend, isolation: str, remedy: Callable[[str], str]) -> Probe:
    """Start a sandbox, write, run, stop; `remedy` turns what went wrong into what to do."""
    said = f"no answer within {TRIAL_S:.0f} s"
    with anyio.move_on_after(TRIAL_S):
        try:
            details = await _trial(backend)
        except SostenutoError as exc:
            said = str(exc)
        else:
            cgroups = find_cgroups()
            details["limits"] = describe_limits(cgroups)
            if cgroups is not None:
                isolation = f"{isolation}, {cgroups.describe()}"
            return Probe(backend.name, works=True, isolation=isolation, details=details)
    return Probe(backend.name, False, isolation, remedy(said), {"error": said})


async def _trial(backend: Backend) -> dict[str, str]:
    sandbox = await backend.start("probe", Blueprint(files={"probe": b"42"}))
    try:
        seen = await sandbox.shell("cat probe && echo kept > answer", timeout_s=TRIAL_S)
        python = await sandbox.shell(_PYTHON, timeout_s=TRIAL_S)
        answer = await sandbox.read("answer")
    finally:
        await sandbox.stop()
    if (seen.output, answer) != ("42", b"kept\n"):
        raise SostenutoError(f"a trial sandbox did not keep its files: {seen.output!r}, {answer!r}")
    return {"python3": python.output.strip() if python.exit_code == 0 else "not usable inside"}
