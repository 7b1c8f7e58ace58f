"""Whether the files of a checkpoint are as they were written.  No torch.

`checksums.json` names every file of the folder with its size and SHA-256.  A folder without it is not read.
"""

import hashlib
import json
from pathlib import Path
from typing import cast

SUMS = "checksums.json"


def seal(folder: Path) -> None:
    """Write down what is in the folder now."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SUMS)
    sums = {str(path.relative_to(folder)): [path.stat().st_size, _sum(path)] for path in files}
    (folder / SUMS).write_text(json.dumps(sums, indent=1))


def fault_of(folder: Path) -> str:
    """What is wrong with the folder, naming the file; empty when it is whole."""
    try:
        sums = _read(folder / SUMS)
        faults = (_fault(folder, name, size, digest) for name, (size, digest) in sums.items())
        return next((fault for fault in faults if fault), "")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"{SUMS} cannot be read: {error}"


def _read(path: Path) -> dict[str, tuple[int, str]]:
    given = cast("dict[str, tuple[int, str]]", json.loads(path.read_text()))
    return {name: (int(size), str(digest)) for name, (size, digest) in given.items()}


def _fault(folder: Path, name: str, size: int, digest: str) -> str:
    path = folder / name
    if not path.is_file():
        return f"{name} is missing"
    if path.stat().st_size != size:
        return f"{name} has {path.stat().st_size} bytes, it was written with {size}"
    return "" if _sum(path) == digest else f"{name} is not what was written: its checksum differs"


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
