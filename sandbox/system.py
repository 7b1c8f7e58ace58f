"""What of this machine a sandbox may see, and which user its processes are.

Read only: the system's programs and libraries, a few files of /etc, and the prefix of the running
interpreter, so that `python3` works inside.  Nothing of any home folder, no variables of this process.
"""

import os
import secrets
import sys
from functools import cache
from pathlib import Path

from sostenuto.sandbox.protocol import Blueprint

PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store")
SETTINGS = tuple(
    f"/etc/{name}"
    for name in (
        "alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "ld-musl-x86_64.path", "localtime",
        "mime.types", "python3", "python3.11", "python3.12", "python3.13", "python3.14", "ssl/certs",
        "ssl/openssl.cnf",
    )
)  # fmt: skip
"""What programs read to find libraries, times, certificates of authorities and their own settings.  No users,
no hosts, no keys."""
DEVICES = ("/dev/full", "/dev/null", "/dev/random", "/dev/urandom", "/dev/zero")
_FIRST_UID, _UIDS = 61184, 4336
"""The range that systemd, too, draws its transient users from."""


@cache
def interpreter_prefix() -> Path | None:
    """Of the running interpreter, unless it is in the system folders or holds more than an installation."""
    prefix = Path(sys.base_prefix).resolve()
    holds_home = Path.home().resolve().is_relative_to(prefix)
    if holds_home or any(prefix.is_relative_to(folder) for folder in PROGRAMS):
        return None
    return prefix


def sandbox_uid() -> int | None:
    """A user of its own for a sandbox's processes; None when this process may not change users.

    Limits on processes do not bind root, and root owns too much, even without capabilities.
    """
    if os.geteuid() != 0:
        return None
    uid = _FIRST_UID + secrets.randbelow(_UIDS)
    return uid if _is_mapped(uid) else None


def _is_mapped(uid: int) -> bool:
    """Whether the user exists in the present user namespace; one made with `unshare -r` has root alone."""
    lines = (line.split() for line in Path("/proc/self/uid_map").read_text().splitlines())
    return any(int(first) <= uid < int(first) + int(count) for first, _, count in lines)


def environment(blueprint: Blueprint, home: str, tmp: str) -> dict[str, str]:
    """All the variables that a shell starts with; the blueprint's win."""
    prefix = interpreter_prefix()
    path = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
    return {
        "PATH": f"{prefix}/bin:{path}" if prefix else path,
        "HOME": home,
        "TMPDIR": tmp,
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "USER": "sandbox",
        "PYTHONDONTWRITEBYTECODE": "1",
        **blueprint.environment,
    }
