"""Backend `docker`: containers of a Docker or Podman daemon that listens on a Unix socket.

- Each has a user of its own without capabilities, who can write in /workspace and in a /tmp in memory and
  nowhere else; no network but the way to listed servers (`egress`); memory, processes and cores bounded by
  cgroups.
- A container ends and is removed when its owner's connection does.  What an owner left all the same, such
  as a paused one, is removed by the next process that uses the same root.
- Control goes through the `docker` SDK in threads, traffic through an attached stream.
"""

import secrets
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import anyio

from sostenuto.errors import SostenutoError, Unsupported
from sostenuto.sandbox.checks import check_blueprint
from sostenuto.sandbox.docker import gvisor, inside
from sostenuto.sandbox.docker.address import find_socket
from sostenuto.sandbox.docker.calls import Calls
from sostenuto.sandbox.docker.container import DockerSandbox, Ground, place_files, remove_of
from sostenuto.sandbox.docker.images import Images, Wanted
from sostenuto.sandbox.docker.inside import WORKSPACE
from sostenuto.sandbox.docker.labels import labels_of, reclaim_containers, remove_own_images
from sostenuto.sandbox.docker.typed import ContainerPlan, Daemon, Missing
from sostenuto.sandbox.egress.egress import Egress, with_proxy
from sostenuto.sandbox.protocol import Blueprint, Probe, SandboxLimits, Snapshot
from sostenuto.sandbox.trial import try_out

_START_S = 120.0
_CLEAN_S = 10.0
_PROBE_S = 20.0
_KEPT = "kept"
_OWN_PROCESSES = 8
"""Of a sandbox's own machinery, beside those that its limit allows."""


@dataclass(frozen=True, slots=True)
class DockerSettings:
    image: str = "python:3.12-slim"
    """For blueprints that name none.  Needs a POSIX `sh`."""
    socket: str | None = None
    """None: $DOCKER_HOST, or where Docker and Podman usually listen."""
    runtime: str | None = None
    """An OCI runtime that the daemon knows, such as `runsc`; None: its default."""
    checkpoints: bool = False
    """Move the memory of a sandbox to disk, once for each, where a probe has seen that this works.
    Containers then stay, ended, when their owner is killed, until the next one reclaims them."""
    disk_bytes: int | None = None
    """What one sandbox may write beside what it starts with; only some storage drivers can bound that."""
    uid: int = 61184
    """User and group inside.  0 for images whose programs write all over the file system."""
    starts: int = 8
    """How many containers may be starting at once; a daemon slows down under more."""
    threads: int = 16
    """Of calls to the daemon."""


class DockerBackend:
    """See `sostenuto.sandbox.protocol.Backend`.  `root` only tells whose containers are whose."""

    def __init__(self, root: Path, settings: DockerSettings | None = None) -> None:
        self._root = root.absolute()
        self._settings = settings or DockerSettings()
        self._calls = Calls(self._settings.threads)
        self._starts = anyio.CapacityLimiter(self._settings.starts)
        self._opening = anyio.Lock()
        self._ground: Ground | None = None
        self._egress = Egress()
        self._checkpoints = False
        """Whether they were seen to work."""

    @property
    def name(self) -> str:
        return "docker"

    @property
    def isolation(self) -> str:
        user = "root without capabilities" if self._settings.uid == 0 else "a user of its own"
        runtime = f"runtime {self._settings.runtime}, " if self._settings.runtime else ""
        return f"{runtime}container: namespaces, seccomp, no capabilities, {user}, cgroup limits, no network"

    async def probe(self) -> Probe:
        try:
            with anyio.fail_after(_PROBE_S):
                ground = await self._open()
                await self._check_image(ground)
        except (SostenutoError, TimeoutError) as exc:
            said = str(exc) or f"no answer within {_PROBE_S:.0f} s"
            return Probe(self.name, False, self.isolation, _remedy(said), {"error": said})
        probe = await try_out(self, self.isolation, _remedy, DockerSandbox.describe_network)
        if not probe.works:
            return probe
        details = probe.details | {"limits": "memory, processes and cores, by the daemon's cgroups"}
        if self._settings.disk_bytes is not None:
            details["limits"] += "; what it writes, by the storage driver"
        if self._settings.checkpoints:
            details["memory"] = await self._try_checkpoints()
        return replace(probe, isolation=self.isolation, details=details)

    async def examine(self) -> Probe:
        """`probe`, and whether gVisor could be used here as well."""
        probe = await self.probe()
        if not probe.works or self._settings.runtime is not None:
            return probe
        return replace(probe, details={**probe.details, "gVisor": await self._try_gvisor()})

    async def _try_gvisor(self) -> str:
        ground = await self._open()
        known = await self._calls.run(ground.daemon.runtimes)
        runtime = next((name for name in known if "runsc" in name), None)
        if runtime is None:
            return gvisor.ABSENT
        other = DockerBackend(self._root, replace(self._settings, runtime=runtime, checkpoints=True))
        try:
            probe = await other.probe()
        finally:
            await other.close()
        if not probe.works:
            return f"runtime {runtime} does not work: {probe.details['error']}; {gvisor.ADVICE}"
        return f"works as runtime {runtime}; memory: {probe.details['memory']}"

    async def _try_checkpoints(self) -> str:
        said = f"no answer within {2 * _PROBE_S:.0f} s"
        self._checkpoints = True
        try:
            with anyio.fail_after(2 * _PROBE_S):
                said = await self._checkpointed()
        except (SostenutoError, TimeoutError) as error:
            said = str(error) or said
        self._checkpoints = said == _KEPT
        return (
            "moved to disk, once for each sandbox" if self._checkpoints else f"{said}; {gvisor.CHECKPOINTS}"
        )

    async def _checkpointed(self) -> str:
        """What a shell still knows after its memory was on disk."""
        sandbox = await self.start("probe", Blueprint())
        try:
            await sandbox.shell(f"kept={_KEPT}", timeout_s=_PROBE_S)
            await sandbox.reclaim()
            await sandbox.resume()
            return (await sandbox.shell('printf %s "$kept"', timeout_s=_PROBE_S)).output
        finally:
            await sandbox.stop()

    async def _check_image(self, ground: Ground) -> None:
        """A probe does not pull: that can take minutes, and is to be decided by whoever runs it."""
        image = self._settings.image
        if await self._calls.run(partial(ground.daemon.image, image)) is None:
            raise Unsupported(f"image {image} is not here; docker pull {image}")

    async def prepare(self, blueprint: Blueprint) -> None:
        """Have the image and the template's layer ready, so that a start finds them."""
        ground = await self._open()
        await ground.images.prepare(self._wanted(blueprint))

    async def start(
        self, name: str, blueprint: Blueprint, *, snapshot: Snapshot | None = None
    ) -> DockerSandbox:
        check_blueprint(name, replace(blueprint, image=None))
        blueprint = with_proxy(blueprint)
        ground = await self._open()
        async with self._starts:
            if snapshot is not None:
                ground.images.check(snapshot)
                plan = self._plan(name, blueprint, snapshot.reference)
                return await self._start(ground, name, plan, replace(blueprint, files={}))
            image = await ground.images.prepare(self._wanted(blueprint))
            try:
                return await self._start(ground, name, self._plan(name, blueprint, image), blueprint)
            except Missing:  # somebody has removed the image
                ground.images.doubt()
                image = await ground.images.prepare(self._wanted(blueprint))
                return await self._start(ground, name, self._plan(name, blueprint, image), blueprint)

    async def _start(
        self, ground: Ground, name: str, plan: ContainerPlan, blueprint: Blueprint
    ) -> DockerSandbox:
        launch = self._calls.begin(partial(_launch, ground, plan, blueprint.files))
        try:
            container = await self._calls.wait(launch, _START_S)
            sandbox = DockerSandbox(ground, name, container, plan)
            try:
                await sandbox.open()
                if blueprint.network:
                    await sandbox.open_network(self._egress, blueprint.network)
            except BaseException:
                sandbox.end_soon()
                raise
        except BaseException:
            clean = self._calls.begin(partial(_undo, ground, launch, plan.name))
            with anyio.move_on_after(_CLEAN_S, shield=True):
                await self._calls.wait(clean)
            raise
        return sandbox

    async def forget(self, snapshot: Snapshot) -> None:
        ground = await self._open()
        await self._calls.run(partial(ground.images.forget, snapshot.reference))

    async def reclaim(self) -> list[str]:
        """Remove what dead owners have left under this root; returns its names."""
        ground = await self._open()
        return await self._calls.run(partial(reclaim_containers, ground.daemon, self._root))

    async def close(self) -> None:
        """Remove the images that it has made of templates, and what was forgotten while it was in use."""
        if self._ground is not None:
            await self._calls.run(partial(remove_own_images, self._ground.daemon, self._root))

    async def _open(self) -> Ground:
        async with self._opening:
            if self._ground is None:
                socket = find_socket(self._settings.socket)
                daemon = Daemon(socket)
                await self._calls.run(daemon.version_path)  # the first that needs the SDK
                await self._calls.run(partial(reclaim_containers, daemon, self._root))
                uid = self._settings.uid
                images = Images(daemon, self._calls, self._plan("image", Blueprint(), ""), uid)
                self._ground = Ground(daemon, self._calls, images, uid)
            return self._ground

    def _wanted(self, blueprint: Blueprint) -> Wanted:
        return Wanted(blueprint.image or self._settings.image, blueprint.template)

    def _plan(self, name: str, blueprint: Blueprint, image: str) -> ContainerPlan:
        limits, uid = blueprint.limits, self._settings.uid
        return ContainerPlan(
            name=f"sostenuto-{secrets.token_hex(8)}",
            image=image,
            command=inside.main_command(blueprint.shell),
            environment=_environment(blueprint),
            labels=labels_of(self._root, name),
            user=f"{uid}:{uid}",
            folder=WORKSPACE,
            memory_bytes=limits.memory_bytes,
            processes=limits.processes + _OWN_PROCESSES,
            cpus=limits.cpus,
            rlimits=_rlimits(limits),
            tmp_bytes=limits.memory_bytes,
            runtime=self._settings.runtime,
            disk_bytes=self._settings.disk_bytes,
            checkpoints=self._checkpoints,
        )


def _launch(ground: Ground, plan: ContainerPlan, files: dict[str, bytes]) -> str:
    container = ground.daemon.create(plan)
    if files:
        place_files(ground, container, files, plan.rlimits["fsize"])
    ground.daemon.start(container)
    return container


def _undo(ground: Ground, launch: "Future[str]", name: str) -> None:
    """Remove what the launch has made, once it is over."""
    launch.exception()
    remove_of(ground, name)


def _environment(blueprint: Blueprint) -> dict[str, str]:
    """Beside what the image itself sets; the blueprint's win."""
    return {
        "HOME": WORKSPACE,
        "TMPDIR": "/tmp",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "USER": "sandbox",
        "PYTHONDONTWRITEBYTECODE": "1",
        **blueprint.environment,
    }


def _rlimits(limits: SandboxLimits) -> dict[str, int]:
    return {
        "core": 0,
        "cpu": limits.cpu_s,
        "fsize": limits.file_bytes,
        "nofile": limits.open_files,
    }


def _remedy(said: str) -> str:
    if "docker pull" in said or "DOCKER_HOST" in said or "daemon" in said or "pip install" in said:
        return said
    if "storage-opt" in said or "storage opt" in said:
        return "the daemon's storage on xfs that is mounted with pquota, or no disk_bytes"
    if "runtime" in said or "did not keep its files" in said:
        return f"a runtime that this daemon knows and that shares files; for gVisor, {gvisor.ADVICE}"
    if "executable file not found" in said:
        return "use an image that has a POSIX sh"
    if "no answer" in said:
        return "see whether 'docker run --rm IMAGE true' hangs too; with runtime runsc, use --platform=ptrace"
    return "see whether 'docker run --rm --network none IMAGE true' works"
