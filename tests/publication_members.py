"""Receivers that are processes of their own, and what becomes of them in the middle of a transfer.

python publication_members.py MANIFEST whole|die|stop: prints "arriving", then what it has as JSON.
"""

import json
import os
import signal
import sys
import zlib
from pathlib import Path

from sostenuto.runtime.engines.embedded.receiving.broadcast import BroadcastReceiver
from sostenuto.runtime.engines.embedded.receiving.room import Room
from sostenuto.trainer.publication.manifest import Manifest
from sostenuto.types import Version


class Nothing:
    """What a receiver serves that is no engine."""

    version = Version(0, 0)
    digest = None

    def served(self, name: str) -> None:
        del name


NOTHING = Nothing()
SIGNALS = {"die": signal.SIGKILL, "stop": signal.SIGSTOP}


def main() -> None:
    manifest = Manifest.model_validate_json(Path(sys.argv[1]).read_bytes())
    found: dict[str, int] = {}
    names = {entry.name for entry in manifest.tensors}
    for entry, content, _ in BroadcastReceiver("cpu", Room(NOTHING)).receive(manifest, names):
        found[entry.name] = zlib.crc32(content.tobytes())
        if len(found) == 1:
            sys.stdout.write("arriving\n")
            sys.stdout.flush()
            if sys.argv[2] in SIGNALS:
                os.kill(os.getpid(), SIGNALS[sys.argv[2]])
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
