"""Trees copied as layers, laid over one another, and with holes."""

import errno
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandboxes import sandbox_root
from sostenuto.errors import SandboxError
from sostenuto.sandbox.copying import Copying, copy_tree

_KINDS = st.sampled_from(["file", "folder", "opaque", "whiteout", "link", "fifo"])
_TREE = st.dictionaries(st.sampled_from(["a", "b", "a/a", "a/b", "b/a", "a/a/a"]), _KINDS, max_size=6)


@settings(deadline=None, max_examples=60)
@given(_TREE, _TREE)
def test_a_layer_laid_over_another_is_as_both_mounted(lower: dict[str, str], upper: dict[str, str]):
    """Against a model of what an overlay shows."""
    with sandbox_root() as root:
        try:
            low, up = _grow(root / "low", lower, "low"), _grow(root / "up", upper, "up")
        except OSError as exc:
            if exc.errno in {errno.EPERM, errno.EOPNOTSUPP}:
                pytest.skip(f"no whiteouts or attributes on this file system: {exc}")
            raise
        target = root / "target"
        target.mkdir()
        copy_tree(root / "low", target, Copying(layer=True))
        copy_tree(root / "up", target, Copying(layer=True))
        merged = {path: kind for path, kind in low.items() if not _hidden(path, up)} | up
        assert _visible(_look(target)) == _visible(merged)


def _grow(root: Path, tree: dict[str, str], word: str) -> dict[str, str]:
    """What was made; what would lie below no folder is left out."""
    root.mkdir()
    made: dict[str, str] = {}
    for name, kind in sorted(tree.items()):
        path = root / name
        if not path.parent.is_dir() or path.parent.is_symlink():
            continue
        _make(path, kind, word)
        made[name] = f"{kind} {word}" if kind in {"file", "link"} else kind.replace("opaque", "folder")
        if kind == "opaque":
            made[f"{name}/*"] = "opaque"
    return made


def _make(path: Path, kind: str, word: str):
    match kind:
        case "file":
            path.write_text(word)
        case "link":
            path.symlink_to(word)
        case "fifo":
            os.mkfifo(path)
        case "whiteout":
            os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))
        case _:
            path.mkdir()
            if kind == "opaque":
                os.setxattr(path, "user.overlay.opaque", b"y")


def _hidden(path: str, up: dict[str, str]) -> bool:
    parents = [str(parent) for parent in Path(path).parents][:-1]
    return any(up.get(parent, "folder") != "folder" or f"{parent}/*" in up for parent in parents) or (
        up.get(path, "folder") != "folder"
    )


def _visible(tree: dict[str, str]) -> dict[str, str]:
    return {path: kind for path, kind in tree.items() if not path.endswith("*")}


def _look(root: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in root.rglob("*"):
        name, mode = str(path.relative_to(root)), path.lstat().st_mode
        if stat.S_ISDIR(mode):
            found[name] = "folder"
        elif stat.S_ISCHR(mode):
            found[name] = "whiteout"
        elif stat.S_ISLNK(mode):
            found[name] = f"link {path.readlink()}"
        else:
            found[name] = "fifo" if stat.S_ISFIFO(mode) else f"file {path.read_text()}"
    return found


def test_a_copy_keeps_holes_and_refuses_devices(tmp_path: Path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    with (source / "sparse").open("wb") as file:
        file.seek(1 << 30)
        file.write(b"end")
    (source / "empty").write_bytes(b"")
    (source / "whole").write_bytes(os.urandom(300_000))
    copy_tree(source, target, Copying())
    assert (target / "whole").read_bytes() == (source / "whole").read_bytes()
    facts = (target / "sparse").stat()
    assert facts.st_size == (1 << 30) + 3
    assert facts.st_blocks * 512 < 1 << 20
    if os.geteuid() == 0:
        os.mknod(source / "device", stat.S_IFCHR, os.makedev(1, 3))
        with pytest.raises(SandboxError, match="devices"):
            copy_tree(source, tmp_path / "target", Copying(layer=True))
