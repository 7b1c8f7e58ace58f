"""Cgroup file systems in memory, with the rules of the kernel that matter to who makes groups."""

import errno
import os
from pathlib import Path

from sostenuto.sandbox.cgroup_tree import Tree

TOP = Path("/sys/fs/cgroup")
_V2_FILES = {
    "cpu": {"cpu.max": "max 100000"},
    "memory": {
        "memory.max": "max",
        "memory.high": "max",
        "memory.swap.max": "max",
        "memory.current": "4096",
        "memory.peak": "8192",
        "memory.events": "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\n",
        "memory.reclaim": "",
    },
    "pids": {"pids.max": "max", "pids.current": "0"},
}


class FakeV2(Tree):
    """One v2 hierarchy; `own` is the group of this process, and `readonly` those that refuse everything."""

    def __init__(
        self,
        own: str,
        *,
        inside: bool = True,
        readonly: tuple[str, ...] = (),
        controllers: str = "cpu memory pids",
    ) -> None:
        self.own = own
        self.files: dict[Path, dict[str, str]] = {}
        self.members: dict[Path, list[int]] = {}
        self._readonly = {self.path(group) for group in readonly}
        self.files[TOP] = {"cgroup.controllers": controllers, "cgroup.subtree_control": ""}
        self.members[TOP] = []
        for group in [*self.path(own).parents][::-1]:
            if group != TOP and group.is_relative_to(TOP):
                self._fill(group)
        if own != "/":
            self._fill(self.path(own))
        if inside:
            self.members[self.path(own)].append(os.getpid())

    def path(self, group: str) -> Path:
        return TOP / group.strip("/")

    def _fill(self, path: Path) -> None:
        handed = self.files[path.parent]["cgroup.subtree_control"]
        self.files[path] = {
            "cgroup.controllers": handed,
            "cgroup.subtree_control": "",
            "cgroup.freeze": "0",
            "cgroup.events": "populated 0\nfrozen 0\n",
            "cgroup.kill": "",
            "cpu.stat": "usage_usec 1500000\nuser_usec 1000000\n",
        }
        self.members[path] = []
        for controller in handed.split():
            self.files[path] |= _V2_FILES[controller]

    def hand_on(self, group: str, controllers: str) -> None:
        """As whoever set the system up did: groups below get these controllers' files."""
        path = self.path(group)
        self.files[path]["cgroup.subtree_control"] = controllers
        for below in sorted(self.files):
            if below.parent == path:
                kept = self.members[below]
                self._fill(below)
                self.members[below] = kept

    def mounts(self) -> str:
        return (
            "22 1 8:1 / / rw,relatime - ext4 /dev/root rw\n"
            f"30 22 0:26 / {TOP} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
        )

    def memberships(self) -> str:
        return f"0::{self.own}\n"

    def make(self, path: Path) -> None:
        self._check(path.parent)
        self._fill(path)

    def remove(self, path: Path) -> None:
        if path not in self.files:
            raise FileNotFoundError(path)
        self._check(path.parent)
        if self.members[path] or self.groups(path):
            raise OSError(errno.EBUSY, "busy")
        del self.files[path], self.members[path]

    def _check(self, path: Path) -> None:
        if path in self._readonly:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    def read(self, path: Path) -> str:
        if path.name == "cgroup.procs" and path.parent in self.members:
            return "".join(f"{pid}\n" for pid in self.members[path.parent])
        self._known(path)
        return self.files[path.parent][path.name]

    def has(self, path: Path) -> bool:
        return path.name in self.files.get(path.parent, {})

    def can_write(self, path: Path) -> bool:
        return path.parent not in self._readonly

    def _known(self, path: Path) -> None:
        if path.name not in self.files.get(path.parent, {}):
            raise FileNotFoundError(errno.ENOENT, "No such file", str(path))

    def write(self, path: Path, text: str) -> None:
        if path.name == "cgroup.procs" and path.parent in self.members:
            self._enter(path.parent, int(text))
            return
        self._known(path)
        self._check(path.parent)
        group, name = path.parent, path.name
        if name == "cgroup.subtree_control":
            self._switch(group, text)
            return
        if name == "cgroup.kill":
            for inside in filter(lambda each: each.is_relative_to(group), self.members):
                self.members[inside] = []
        if name == "cgroup.freeze":
            self.files[group]["cgroup.events"] = f"populated 0\nfrozen {text}\n"
        self.files[group][name] = text

    def _enter(self, group: Path, pid: int) -> None:
        if self.files[group]["cgroup.subtree_control"]:
            raise OSError(errno.EBUSY, "no internal processes")
        for members in self.members.values():
            if pid in members:
                members.remove(pid)
        self.members[group].append(pid)

    def _switch(self, group: Path, text: str) -> None:
        handed = set(self.files[group]["cgroup.subtree_control"].split())
        if text[0] == "+":
            if self.members[group] and group != TOP:
                raise OSError(errno.EBUSY, "no internal processes")
            handed.add(text[1:])
        else:
            handed.discard(text[1:])
        self.files[group]["cgroup.subtree_control"] = " ".join(sorted(handed))
        for below in self.groups(group):
            for controller in handed:
                self.files[below] = _V2_FILES[controller] | self.files[below]

    def groups(self, path: Path) -> list[Path]:
        return sorted(group for group in self.files if group.parent == path and group != path)

    def can_enter(self, path: Path) -> bool:
        return not self.files[path]["cgroup.subtree_control"]
