"""Images: present before they are needed, and one more layer for the workspace of each template.

The layer holds /workspace with the template's content, and every sandbox of an environment starts from it.
It is made once for each (image, template as it is now), begun by whoever needs it first; the others wait.
Who gives up waiting ends only the wait.
"""

import hashlib
import os
import secrets
from collections import defaultdict
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import anyio

from sostenuto.errors import SandboxError
from sostenuto.sandbox.docker.calls import Calls
from sostenuto.sandbox.docker.inside import WORKSPACE
from sostenuto.sandbox.docker.removal import remove_container
from sostenuto.sandbox.docker.tars import Packer
from sostenuto.sandbox.docker.typed import Conflict, ContainerPlan, Daemon, Missing
from sostenuto.sandbox.protocol import Snapshot

_PULL_S = 1800.0
_BUILD_S = 600.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a workspace's image is made of."""

    image: str
    template: str | None


class Images:
    """Of one backend.  `plan` is what the containers for building are created with."""

    def __init__(self, daemon: Daemon, calls: Calls, plan: ContainerPlan, uid: int) -> None:
        self._daemon = daemon
        self._calls = calls
        self._plan = plan
        self._uid = uid
        self._repository = f"sostenuto-{secrets.token_hex(8)}"
        self._one_at_a_time: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)
        self._present: dict[str, str] = {}
        """Identities of the images that have been seen here."""
        self._builds: dict[str, Future[str]] = {}
        """References of workspace images, by what they are made of."""
        self._forgotten: set[str] = set()
        """Snapshots that nobody wants and that a container still uses."""

    async def prepare(self, wanted: Wanted) -> str:
        """The reference of the workspace's image; pulls and builds what is missing."""
        identity = await self._pulled(wanted.image)
        key = f"{identity} {await self.fingerprint(wanted.template)}"
        build = self._builds.get(key)
        if build is None or (build.done() and build.exception() is not None):
            build = self._builds[key] = self._calls.begin(partial(self._build, wanted, key))
        return await self._calls.wait(build, _BUILD_S)

    async def fingerprint(self, template: str | None) -> str:
        """Changes with the names, modes, sizes and times of the files in a template."""
        if template is None:
            return ""
        return await self._calls.run(partial(_fingerprint, Path(template)))

    def doubt(self) -> None:
        """Something that was present is not: ask the daemon again."""
        self._present.clear()
        self._builds.clear()

    async def _pulled(self, reference: str) -> str:
        async with self._one_at_a_time[reference]:
            if reference not in self._present:
                found = await self._calls.run(partial(self._daemon.image, reference))
                if found is None:
                    await self._calls.run(partial(self._daemon.pull, reference), _PULL_S)
                    found = await self._calls.run(partial(self._daemon.image, reference))
                if found is None:
                    raise SandboxError(f"image {reference} was pulled and is not there")
                self._present[reference] = found
            return self._present[reference]

    def _build(self, wanted: Wanted, key: str) -> str:
        reference = f"{self._repository}:{hashlib.sha256(key.encode()).hexdigest()[:32]}"
        plan = replace(self._plan, name=f"sostenuto-{secrets.token_hex(8)}", image=wanted.image)
        container = self._daemon.create(plan)
        try:
            with Packer(self._uid) as packer:
                packer.folder(WORKSPACE[1:])
                if wanted.template is not None:
                    packer.template(Path(wanted.template), f"{WORKSPACE[1:]}/")
                self._daemon.place(container, "/", packer.archive())
            self._daemon.commit(container, reference, plan.labels)
        finally:
            remove_container(self._daemon, container)
        return reference

    def new_reference(self) -> str:
        return f"{self._repository}:snapshot-{secrets.token_hex(8)}"

    def check(self, snapshot: Snapshot) -> None:
        """Raise SandboxError for a snapshot from which nothing may start any more."""
        if snapshot.reference in self._forgotten:
            raise SandboxError(f"snapshot {snapshot.reference} was forgotten")

    def forget(self, reference: str) -> None:
        """Remove an image now, or when the last container that uses it is gone.  Blocks."""
        self._forgotten.add(reference)
        self.sweep()

    def sweep(self) -> None:
        """Remove what was forgotten while it was in use.  Blocks."""
        for reference in list(self._forgotten):
            with suppress(Conflict):
                with suppress(Missing):
                    self._daemon.remove_image(reference)
                self._forgotten.discard(reference)


def _fingerprint(template: Path) -> str:
    digest = hashlib.sha256()
    for folder, names, files in os.walk(template):
        names.sort()
        for name in sorted((*files, *names)):
            path = os.path.join(folder, name)  # noqa: PTH118 - thousands of them
            seen = os.lstat(path)
            digest.update(f"{path}\0{seen.st_mode} {seen.st_size} {seen.st_mtime_ns}\n".encode())
    return digest.hexdigest()
