"""Arrays of long records as safetensors files beside the journal, one for each program.

Anything that reads the format can load them: `token_ids`, `logprobs` and `mask` of all spans of the program,
one after the other.  What they belong to is in the journal.  A file is under its name whole, or not at all.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import cast
from urllib.parse import quote

from sostenuto.errors import RecordError
from sostenuto.types import ProgramId

FOLDER = "records"
_WIDTHS = {"I32": 4, "F32": 4, "I16": 2, "BOOL": 1}
_LENGTH_BYTES = 8


def bulk_path(folder: Path, program_id: ProgramId) -> Path:
    # Ids of a gateway's programs may have slashes.
    return folder / f"{quote(program_id, safe='')}.safetensors"


def write_bulk(path: Path, arrays: Mapping[str, tuple[str, bytes]]) -> None:
    """Each array by name, with its type as the format calls it.  OSError on a full disk."""
    header, start = dict[str, object](), 0
    for name, (dtype, content) in arrays.items():
        end = start + len(content)
        header[name] = {
            "dtype": dtype,
            "shape": [len(content) // _WIDTHS[dtype]],
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    part = path.with_name(f".{path.name}.part")
    path.parent.mkdir(exist_ok=True)
    with part.open("wb") as file:
        file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        file.writelines(content for _, content in arrays.values())
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def read_bulk(path: Path) -> dict[str, bytes]:
    """RecordError, naming the file, when it is missing or cut off."""
    try:
        content = path.read_bytes()
        data = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
        header = cast("dict[str, dict[str, list[int]]]", json.loads(content[_LENGTH_BYTES:data]))
        places = {name: entry["data_offsets"] for name, entry in header.items()}
    except (OSError, ValueError, KeyError) as error:
        raise RecordError(f"{path}: {error}") from error
    if any(data + end > len(content) for _, end in places.values()):
        raise RecordError(f"{path}: is cut off at {len(content)} bytes")
    return {name: content[data + start : data + end] for name, (start, end) in places.items()}
