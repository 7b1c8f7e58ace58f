"""Which backend this system can run, found out by running it.  Nothing falls back to no isolation."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from sostenuto.errors import ConfigError, Unsupported, nearest
from sostenuto.sandbox.docker.backend import DockerBackend, DockerSettings
from sostenuto.sandbox.folders import check_root
from sostenuto.sandbox.protocol import Backend, Probe


async def choose_backend(
    root: Path, *, preferred: str | None = None, unsafe: bool = False, docker: DockerSettings | None = None
) -> Backend:
    """The best backend that works here, or the preferred one; outside of Linux there is docker alone.

    `unsafe=True` selects `process`, which isolates nothing, and nothing else does.  Raises Unsupported,
    with what was tried and the remedies, when none works.
    """
    check_root(root)
    if unsafe:
        if preferred not in {None, "process"}:
            raise ConfigError(f"unsafe=True runs backend 'process'; it contradicts preferred={preferred!r}")
        from sostenuto.sandbox.plain import ProcessBackend

        return ProcessBackend(root, unsafe=True)
    failed: list[Probe] = []
    for backend in _candidates(root, preferred, docker):
        probe = await backend.probe()
        if probe.works:
            return backend
        failed.append(probe)
    raise Unsupported("no sandbox works on this system.\n" + "\n".join(map(_failure, failed)))


async def probe_backends(root: Path, *, docker: DockerSettings | None = None) -> list[Probe]:
    """What each backend that isolates can do here, the best first."""
    check_root(root)
    return [await _examine(backend) for backend in _candidates(root, None, docker)]


async def _examine(backend: Backend) -> Probe:
    return await (backend.examine() if isinstance(backend, DockerBackend) else backend.probe())


def _candidates(root: Path, preferred: str | None, docker: DockerSettings | None) -> list[Backend]:
    kinds = _kinds(docker)
    if preferred is None:
        return [kind(root) for kind in kinds.values()]
    if preferred == "process":
        raise ConfigError("backend 'process' isolates nothing; write unsafe=True to use it all the same")
    if preferred not in kinds:
        raise ConfigError(f"sandbox backend {preferred!r}: {nearest(preferred, list(kinds))}")
    return [kinds[preferred](root)]


def _kinds(docker: DockerSettings | None) -> dict[str, Callable[[Path], Backend]]:
    """The best first."""
    kinds: dict[str, Callable[[Path], Backend]] = {}
    if sys.platform == "linux":  # elsewhere not even what they import exists
        from sostenuto.sandbox.bubblewrap import BubblewrapBackend
        from sostenuto.sandbox.landlock import LandlockBackend

        kinds |= {"bubblewrap": BubblewrapBackend, "landlock": LandlockBackend}
    kinds["docker"] = partial(DockerBackend, settings=docker)
    return kinds


def _failure(probe: Probe) -> str:
    return f"- {probe.backend}: {probe.details.get('error', 'failed')}\n  remedy: {probe.remedy}"
