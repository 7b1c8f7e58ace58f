"""Which folders can lie below a workspace as layers of an overlay, instead of being copied into it.

- What is below is not changed; what the sandbox changes is copied up first.  The kernel does that only for
  owners that the sandbox knows, hence everything must have one owner, which is then taken for the sandbox's
  own; and in the sandbox everything is to be as if it had been copied.
- Whether kernel, file system and bwrap can do it is found out by doing it: the first start over a template
  that fails is begun again with a copy, and that is remembered.
"""

import os
import stat
from dataclasses import dataclass
from pathlib import Path

_MOST_ENTRIES = 200_000
"""Looked at once for each template; one with more is copied, which takes far longer still."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A folder as it was when it was looked at."""

    path: Path
    device: int
    inode: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> "Identity":
        facts = path.stat()
        return cls(path, facts.st_dev, facts.st_ino, facts.st_ctime_ns)


class Layers:
    """What is known of templates.  `refusal` may be called from any thread.

    `maps_owner`: whether a single owner of any name can be made the sandbox's own.
    """

    def __init__(self, *, maps_owner: bool) -> None:
        self._maps_owner = maps_owner
        self._known: dict[Identity, str] = {}

    def refusal(self, template: Path) -> str:
        """Why the template is to be copied; empty when it can be a layer, as far as is known."""
        try:
            identity = Identity.of(template)
            if identity not in self._known:
                self._known[identity] = self._look(template)
            return self._known[identity]
        except OSError as exc:
            return str(exc)

    def refuse(self, template: Path, reason: str) -> None:
        """A start over the template has failed."""
        self._known[Identity.of(template)] = reason

    def _look(self, template: Path) -> str:
        facts = template.stat()
        owner = (facts.st_uid, facts.st_gid) if self._maps_owner else (os.geteuid(), os.getegid())
        entries = 0
        for folder, folders, files in os.walk(template):
            entries += len(folders) + len(files)
            if entries > _MOST_ENTRIES:
                return f"more than {_MOST_ENTRIES} files"
            for path in (folder, *(f"{folder}/{name}" for name in files + folders)):
                reason = _refusal(path, owner)
                if reason:
                    return f"{path}: {reason}"
        return ""


def _refusal(path: str, owner: tuple[int, int]) -> str:
    facts = os.lstat(path)
    if (facts.st_uid, facts.st_gid) != owner:
        return f"owned by {facts.st_uid}:{facts.st_gid}, not by {owner[0]}:{owner[1]}"
    if stat.S_ISLNK(facts.st_mode):
        return ""
    if not (stat.S_ISDIR(facts.st_mode) or stat.S_ISREG(facts.st_mode)):
        return "only files, folders and links can be layers"
    needed = 0o700 if stat.S_ISDIR(facts.st_mode) else 0o600
    return "" if facts.st_mode & needed == needed else "its owner may not write it"
