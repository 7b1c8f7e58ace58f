"""Which backend this system can run, found out by running it.  Nothing falls back to no isolation."""

from pathlib import Path

from sostenuto.errors import ConfigError, Unsupported, nearest
from sostenuto.sandbox.bubblewrap import BubblewrapBackend
from sostenuto.sandbox.folders import check_root
from sostenuto.sandbox.landlock import LandlockBackend
from sostenuto.sandbox.plain import ProcessBackend
from sostenuto.sandbox.protocol import Backend, Probe

_BACKENDS = {"bubblewrap": BubblewrapBackend, "landlock": LandlockBackend}
"""The best first."""


async def choose_backend(root: Path, *, preferred: str | None = None, unsafe: bool = False) -> Backend:
    """The best backend that works here, or the preferred one.

    `unsafe=True` selects `process`, which isolates nothing, and nothing else does.  Raises Unsupported,
    with what was tried and the remedies, when none works.
    """
    check_root(root)
    if unsafe:
        if preferred not in {None, "process"}:
            raise ConfigError(f"unsafe=True runs backend 'process'; it contradicts preferred={preferred!r}")
        return ProcessBackend(root, unsafe=True)
    failed: list[Probe] = []
    for backend in _candidates(root, preferred):
        probe = await backend.probe()
        if probe.works:
            return backend
        failed.append(probe)
    raise Unsupported("no sandbox works on this system.\n" + "\n".join(map(_failure, failed)))


async def probe_backends(root: Path) -> list[Probe]:
    """What each backend that isolates can do here, the best first."""
    check_root(root)
    return [await backend.probe() for backend in _candidates(root, None)]


def _candidates(root: Path, preferred: str | None) -> list[Backend]:
    if preferred is None:
        return [kind(root) for kind in _BACKENDS.values()]
    if preferred == "process":
        raise ConfigError("backend 'process' isolates nothing; write unsafe=True to use it all the same")
    if preferred not in _BACKENDS:
        raise ConfigError(f"sandbox backend {preferred!r}: {nearest(preferred, list(_BACKENDS))}")
    return [_BACKENDS[preferred](root)]


def _failure(probe: Probe) -> str:
    return f"- {probe.backend}: {probe.details.get('error', 'failed')}\n  remedy: {probe.remedy}"
