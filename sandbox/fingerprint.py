"""Whether a folder is still what it was, told without reading its files."""

import hashlib
import os
from pathlib import Path


def fingerprint(folder: Path) -> str:
    """Changes with the names, modes, sizes and times of what is in it; OSError when it cannot be read.

    Among them is the time at which an inode was changed, which nobody can set: no change goes unseen.
    """
    digest = hashlib.sha256(f"{folder}\n".encode(errors="surrogateescape"))
    for inner, names, files in os.walk(folder, onerror=_raise):
        names.sort()
        for name in sorted((*files, *names)):
            path = f"{inner}/{name}"
            seen = os.lstat(path)
            line = f"{path}\0{seen.st_mode} {seen.st_size} {seen.st_mtime_ns} {seen.st_ctime_ns}\n"
            digest.update(line.encode(errors="surrogateescape"))
    return digest.hexdigest()


def _raise(error: OSError) -> None:
    raise error
