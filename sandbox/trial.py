"""Finds out what a backend can do by running it once."""

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import anyio

from sostenuto.errors import SostenutoError
from sostenuto.sandbox.cgroups import describe_limits, find_cgroups
from sostenuto.sandbox.protocol import Blueprint, Probe, Sandbox

TRIAL_S = 20.0
_PYTHON = "python3 -c 'import sys; print(sys.executable, sys.version.split()[0])'"

S = TypeVar("S", bound=Sandbox)
Started_co = TypeVar("Started_co", bound=Sandbox, covariant=True)


class Starts(Protocol[Started_co]):
    """What is used of a backend."""

    @property
    def name(self) -> str: ...

    async def start(self, name: str, blueprint: Blueprint) -> Started_co: ...


async def _see_nothing(sandbox: Sandbox) -> dict[str, str]:
    return {}


async def try_out(
    backend: Starts[S],
    isolation: str,
    remedy: Callable[[str], str],
    look: Callable[[S], Awaitable[dict[str, str]]] = _see_nothing,
) -> Probe:
    """Start a sandbox, write, run, stop; `remedy` turns what went wrong into what to do.

    `look` sees what else there is to be said of the sandbox that was started.
    """
    said = f"no answer within {TRIAL_S:.0f} s"
    with anyio.move_on_after(TRIAL_S):
        try:
            details = await _trial(backend, look)
        except SostenutoError as exc:
            said = str(exc)
        else:
            cgroups = find_cgroups()
            details["limits"] = describe_limits(cgroups)
            if cgroups is not None:
                isolation = f"{isolation}, {cgroups.describe()}"
            return Probe(backend.name, works=True, isolation=isolation, details=details)
    return Probe(backend.name, False, isolation, remedy(said), {"error": said})


async def _trial(backend: Starts[S], look: Callable[[S], Awaitable[dict[str, str]]]) -> dict[str, str]:
    sandbox = await backend.start("probe", Blueprint(files={"probe": b"42"}))
    try:
        seen = await sandbox.shell("cat probe && echo kept > answer", timeout_s=TRIAL_S)
        python = await sandbox.shell(_PYTHON, timeout_s=TRIAL_S)
        answer = await sandbox.read("answer")
        await sandbox.write("late", b"late")
        late = await sandbox.shell("cat late", timeout_s=TRIAL_S)
        details = await look(sandbox)
    finally:
        await sandbox.stop()
    if (seen.output, answer, late.output) != ("42", b"kept\n", "late"):
        raise SostenutoError(
            f"a trial sandbox did not keep its files: {seen.output!r}, {answer!r}, {late.output!r}"
        )
    return {"python3": python.output.strip() if python.exit_code == 0 else "not usable inside", **details}
