"""Where the daemon listens.  Whoever cannot reach it is told why, and what to do."""

import os
import socket
from pathlib import Path

from sostenuto.errors import Unsupported

_LONGEST_S = 5.0


def find_socket(named: str | None) -> str:
    """The socket that was named, $DOCKER_HOST's, or the first usual one that exists.

    Raises Unsupported when there is none, or when this user may not connect.
    """
    host = f"unix://{named}" if named else os.environ.get("DOCKER_HOST", "")
    if host and not host.startswith("unix://"):
        raise Unsupported(f"DOCKER_HOST is {host!r}; only unix:// sockets can be used")
    candidates = [host.removeprefix("unix://")] if host else _usual()
    found = next((path for path in candidates if os.path.exists(path)), None)  # noqa: PTH110
    if found is None:
        raise Unsupported(
            f"no Docker or Podman socket at {', '.join(candidates)}; start the daemon (dockerd, "
            "'podman system service', Docker Desktop, Colima) or name its socket in DOCKER_HOST"
        )
    _check_connection(found)
    return found


def _usual() -> list[str]:
    runtime = os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}")
    home = Path.home()
    return [
        "/var/run/docker.sock",
        f"{runtime}/docker.sock",
        f"{home}/.docker/run/docker.sock",
        f"{home}/.colima/default/docker.sock",
        f"{runtime}/podman/podman.sock",
        "/run/podman/podman.sock",
    ]


def _check_connection(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as attempt:
        attempt.settimeout(_LONGEST_S)
        try:
            attempt.connect(path)
        except PermissionError as exc:
            raise Unsupported(
                f"no permission to use {path}; sudo usermod -aG docker $USER and log in again, or use a "
                "rootless daemon"
            ) from exc
        except OSError as exc:
            raise Unsupported(f"nothing answers at {path} ({exc}); start the daemon") from exc
