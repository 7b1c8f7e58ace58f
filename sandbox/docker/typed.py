"""The `docker` SDK behind types: every call to the daemon that is used here, and the errors it ends in.

All of it blocks and is called in the threads of `calls.Calls`.  A daemon that says nothing for SILENCE_S
is given up.  400 is `Refused`, 404 `Missing`, 409 `Conflict`, everything else that goes wrong a SandboxError.
"""

import base64
import json
import threading
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import IO, Any, cast

from sostenuto.errors import SandboxError, Unsupported

SILENCE_S = 60.0
_PULL_S = 1800.0
_CHUNK_BYTES = 1 << 16
_PODMAN_TASKS = 32768
"""Podman's own limit on processes; of all sandboxes, which have one user."""
_WORDS = 300
_STAT_HEADER = "X-Docker-Container-Path-Stat"


class Missing(SandboxError):  # noqa: N818 - reads as the fact it states
    """The daemon has no such thing, or no longer."""


class Conflict(SandboxError):  # noqa: N818 - reads as the fact it states
    """The daemon refuses for the state that the thing is in."""


class Refused(SandboxError):  # noqa: N818 - reads as the fact it states
    """The daemon cannot do this with what it was given."""


@dataclass(frozen=True, slots=True)
class ContainerPlan:
    """A container to be created.  It ends and is removed when its stdin is closed."""

    name: str
    image: str
    command: list[str]
    environment: dict[str, str]
    labels: dict[str, str]
    user: str
    folder: str
    memory_bytes: int
    processes: int
    cpus: float | None
    rlimits: dict[str, int]
    tmp_bytes: int
    runtime: str | None = None
    disk_bytes: int | None = None
    """What it may write beside its image; None: not bounded."""
    checkpoints: bool = False
    """It stays when it ends, to be started again from a checkpoint; else it is removed."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What stands at a path inside a container."""

    size_bytes: int
    mode: int
    """Of Go: the permissions, and high bits for the kind."""
    target: str
    """Where a link leads in the end."""

    @property
    def is_folder(self) -> bool:
        return bool(self.mode & 1 << 31)

    @property
    def is_link(self) -> bool:
        return bool(self.mode & 1 << 27)

    @property
    def is_file(self) -> bool:
        return not self.mode & (1 << 31 | 1 << 27 | 1 << 26 | 1 << 25 | 1 << 24 | 1 << 21 | 1 << 19)


@dataclass(frozen=True, slots=True)
class Found:
    """A container or an image, with its labels."""

    identity: str
    labels: dict[str, str] = field(default_factory=dict[str, str])
    written_bytes: int = 0
    """By a container, into its own layer."""


_FEW = 3


@dataclass(frozen=True, slots=True)
class Counters:
    """Of a container's processes, since its start where they add up."""

    memory_bytes: int
    peak_memory_bytes: int
    cpu_s: float
    processes: int
    most_processes: int
    """0: there is no limit, or it is not told."""

    @property
    def is_full(self) -> bool:
        """Whether no program with a few processes can be started."""
        return 0 < self.most_processes <= self.processes + _FEW


class Daemon:
    """The daemon that listens at `socket`.  Raises Unsupported without the SDK or a daemon."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._connecting = threading.Lock()
        self._connected: Any = None

    @property
    def socket(self) -> str:
        return self._socket

    @property
    def _client(self) -> Any:  # noqa: ANN401 - the SDK has no types
        with self._connecting:
            if self._connected is None:
                self._connected = _connect(self._socket)
            return self._connected

    def version_path(self) -> str:
        """What begins the path of every request, for those that are made without the SDK."""
        return f"/v{self._client.api_version}"

    def runtimes(self) -> list[str]:
        """Names of the OCI runtimes that it can start containers with."""
        with _errors("ask for runtimes"):
            return sorted(self._client.info().get("Runtimes") or {})

    def create(self, plan: ContainerPlan) -> str:
        """The identity of a new container."""
        client = self._client
        with _errors(f"create {plan.name}"):
            made = client.create_container(
                plan.image, plan.command, name=plan.name, hostname="sandbox", user=plan.user,
                environment=plan.environment, labels=plan.labels, working_dir=plan.folder,
                stdin_open=True, entrypoint=[], host_config=_host_config(client, plan, self._rlimits(plan)),
            )  # fmt: skip
        return cast("str", made["Id"])

    def _rlimits(self, plan: ContainerPlan) -> dict[str, int]:
        """Podman raises a limit on processes that it is not given, where only some kinds of root may."""
        if not self._is_podman:
            return plan.rlimits
        return {"nproc": _PODMAN_TASKS, **plan.rlimits}

    @cached_property
    def _is_podman(self) -> bool:
        with _errors("ask for the version"):
            said = cast("dict[str, list[dict[str, str]] | None]", self._client.version())
        parts = said.get("Components") or []
        return any("podman" in part.get("Name", "").lower() for part in parts)

    def start(self, container: str) -> None:
        with _errors(f"start {container}"):
            self._client.start(container)

    def checkpoint(self, container: str, name: str) -> None:
        """End it, and keep its processes with their memory on disk; for an experimental dockerd."""
        client = self._client
        with _errors(f"checkpoint {container}"):
            url = client._url("/containers/{0}/checkpoints", container)  # noqa: SLF001
            reply = client._post_json(url, {"CheckpointID": name, "Exit": True}, timeout=SILENCE_S)  # noqa: SLF001
            client._raise_for_status(reply)  # noqa: SLF001
            client.wait(container, timeout=SILENCE_S)

    def restore(self, container: str, name: str) -> None:
        """Start it from a checkpoint, which is used up."""
        client = self._client
        with _errors(f"start {container} from its checkpoint"):
            url = client._url("/containers/{0}/start", container)  # noqa: SLF001
            reply = client.post(url, params={"checkpoint": name}, timeout=SILENCE_S)
            client._raise_for_status(reply)  # noqa: SLF001
            url = client._url("/containers/{0}/checkpoints/{1}", container, name)  # noqa: SLF001
            client._raise_for_status(client.delete(url, timeout=SILENCE_S))  # noqa: SLF001

    def pause(self, container: str) -> None:
        with _errors(f"pause {container}"):
            self._client.pause(container)

    def unpause(self, container: str) -> None:
        with _errors(f"unpause {container}"):
            self._client.unpause(container)

    def remove(self, container: str) -> None:
        """End it, whatever it is doing, and remove it."""
        with _errors(f"remove {container}"):
            self._client.remove_container(container, force=True, v=True)

    def exists(self, container: str) -> bool:
        try:
            with _errors(f"inspect {container}"):
                self._client.inspect_container(container)
        except Missing:
            return False
        return True

    def main_pid(self, container: str) -> int:
        """Of its first process, as the daemon counts."""
        with _errors(f"inspect {container}"):
            return int(self._client.inspect_container(container)["State"]["Pid"])

    def containers(self, label: str) -> list[Found]:
        """Those that have the label (NAME or NAME=VALUE), in any state."""
        with _errors("list containers"):
            found = self._client.containers(all=True, filters={"label": label})
        return [Found(one["Id"], one.get("Labels") or {}) for one in found]

    def written_bytes(self, container: str) -> int:
        with _errors(f"measure {container}"):
            found = self._client.containers(all=True, size=True, filters={"id": container})
        if not found:
            raise Missing(f"no container {container}")
        return int(found[0].get("SizeRw") or 0)

    def counters(self, container: str) -> Counters:
        with _errors(f"count what {container} uses"):
            seen = self._client.stats(container, stream=False, one_shot=True)
        memory, cpu = seen.get("memory_stats", {}), seen.get("cpu_stats", {})
        processes = seen.get("pids_stats", {})
        now = int(memory.get("usage", 0))
        return Counters(
            now,
            int(memory.get("max_usage", now)),
            cpu.get("cpu_usage", {}).get("total_usage", 0) / 1e9,
            int(processes.get("current", 0)),
            int(processes.get("limit", 0)),
        )

    def prepare_exec(self, container: str, argv: list[str], environment: dict[str, str]) -> str:
        """The identity of a command that is started by whoever attaches to it."""
        with _errors(f"exec in {container}"):
            made = self._client.exec_create(container, argv, stdin=True, environment=environment)
        return cast("str", made["Id"])

    def exec_code(self, identity: str) -> int | None:
        """Exit code of a command that has ended."""
        with _errors(f"inspect exec {identity}"):
            return cast("int | None", self._client.exec_inspect(identity)["ExitCode"])

    def stat(self, container: str, path: str) -> Entry | None:
        """None when nothing is there, or the container is gone."""
        client = self._client
        url = client._url("/containers/{0}/archive", container)  # noqa: SLF001
        try:
            with _errors(f"look at {path}"):
                reply = client.head(url, params={"path": path}, timeout=SILENCE_S)
                client._raise_for_status(reply)  # noqa: SLF001
        except Missing:
            return None
        except SandboxError:
            with closing(self.fetch(container, path)) as pieces:
                next(pieces, b"")  # an answer to HEAD has no words; this one has
            raise
        seen = json.loads(base64.b64decode(reply.headers[_STAT_HEADER]))
        return Entry(int(seen["size"]), int(seen["mode"]), seen.get("linkTarget", ""))

    def fetch(self, container: str, path: str) -> Generator[bytes]:
        """A tar of a file or folder, in pieces.

        To be closed: a transfer that goes on keeps the daemon from removing the container.
        """
        client = self._client
        url = client._url("/containers/{0}/archive", container)  # noqa: SLF001
        with (
            _errors(f"read {path}"),
            client.get(url, params={"path": path}, stream=True, timeout=SILENCE_S) as reply,
        ):
            client._raise_for_status(reply)  # noqa: SLF001
            yield from reply.iter_content(_CHUNK_BYTES)

    def place(self, container: str, folder: str, archive: bytes | IO[bytes]) -> None:
        """Unpack a tar into a folder that exists; Refused where file and folder would replace each other."""
        client = self._client
        url = client._url("/containers/{0}/archive", container)  # noqa: SLF001
        with _errors(f"write into {folder}"):
            reply = client.put(
                url, params={"path": folder, "noOverwriteDirNonDir": "1"}, data=archive, timeout=SILENCE_S
            )
            client._raise_for_status(reply)  # noqa: SLF001

    def image(self, reference: str) -> str | None:
        """The identity of a local image."""
        try:
            with _errors(f"inspect image {reference}"):
                return cast("str", self._client.inspect_image(reference)["Id"])
        except Missing:
            return None

    def pull(self, reference: str) -> None:
        client = _connect(self._socket, silence_s=_PULL_S)
        try:
            with _errors(f"pull image {reference}"):
                name, _, tag = reference.rpartition(":") if _has_tag(reference) else (reference, "", "")
                client.pull(name or reference, tag=tag or None)
        finally:
            client.close()

    def commit(self, container: str, reference: str, labels: Mapping[str, str]) -> None:
        """Make an image of what the container has written; it stands still meanwhile."""
        name, tag = reference.split(":")
        changes = [f"LABEL {key}={json.dumps(value)}" for key, value in labels.items()]
        with _errors(f"commit {container}"):
            self._client.commit(container, repository=name, tag=tag, changes=changes)

    def layer_bytes(self, reference: str) -> int:
        """Of the last layer of an image."""
        with _errors(f"measure image {reference}"):
            return int(self._client.history(reference)[0]["Size"])

    def images(self, label: str) -> list[Found]:
        """The youngest first, so that none comes before what is built on it."""
        with _errors("list images"):
            found = self._client.images(filters={"label": label})
        return [Found(one["Id"], one.get("Labels") or {}) for one in found]

    def remove_image(self, reference: str) -> None:
        """Conflict while a container uses it."""
        with _errors(f"remove image {reference}"):
            self._client.remove_image(reference)


def _connect(socket: str, *, silence_s: float = SILENCE_S) -> Any:  # noqa: ANN401 - the SDK has no types
    try:
        import docker
    except ImportError as exc:
        raise Unsupported("the docker SDK is missing; pip install 'sostenuto[docker]'") from exc
    with _errors(f"connect to {socket}"):
        api: Any = docker
        return api.APIClient(base_url=f"unix://{socket}", version="auto", timeout=silence_s)


def _host_config(client: Any, plan: ContainerPlan, rlimits: dict[str, int]) -> Any:  # noqa: ANN401 - the SDK has no types
    return client.create_host_config(
        network_mode="none", init=True, auto_remove=not plan.checkpoints, runtime=plan.runtime,
        cap_drop=["ALL"], security_opt=["no-new-privileges"],
        mem_limit=plan.memory_bytes, memswap_limit=plan.memory_bytes, pids_limit=plan.processes,
        nano_cpus=None if plan.cpus is None else round(plan.cpus * 1e9),
        ulimits=[{"Name": name, "Soft": value, "Hard": value} for name, value in rlimits.items()],
        tmpfs={"/tmp": f"mode=1777,nosuid,nodev,exec,size={plan.tmp_bytes}"},
        storage_opt=None if plan.disk_bytes is None else {"size": str(plan.disk_bytes)},
        # The daemon would write everything that a shell says to a file of its own.
        log_config={"Type": "none"},
    )  # fmt: skip


def _has_tag(reference: str) -> bool:
    return ":" in reference.rpartition("/")[2] and "@" not in reference


_SAID: dict[type[SandboxError], tuple[str, ...]] = {
    # Podman says the latter two of a container that ends by itself at that moment.
    Conflict: ("not paused", "already paused", "container state improper", "as it could not be stopped"),
    Refused: ("cannot overwrite", "too many links", "too many levels of symbolic links", "file exists"),
}


@contextmanager
def _errors(doing: str) -> Generator[None]:
    """Turns what the SDK and its HTTP library raise into errors of ours."""
    import docker.errors
    import requests

    errors: Any = docker.errors
    try:
        yield
    except errors.APIError as exc:
        said = str(exc.explanation or exc)[:_WORDS].strip()
        for kind, words in _SAID.items():  # with 500
            if any(each in said for each in words):
                raise kind(f"{doing}: {said}") from exc
        kind = {400: Refused, 404: Missing, 409: Conflict}.get(exc.status_code or 0, SandboxError)
        raise kind(f"{doing}: {said}") from exc
    except (errors.DockerException, requests.RequestException, OSError, ValueError, KeyError) as exc:
        raise SandboxError(f"{doing}: {type(exc).__name__}: {str(exc)[:_WORDS]}") from exc
