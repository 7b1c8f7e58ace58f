"""An environment of its own with the clients of others that drive a gateway, at fixed releases.

    python -m benchmarks.gateway_environment [FOLDER]

Takes a few minutes and 0.6 GB, once; what is there already is used again.
"""

import os
import subprocess
import sys
import venv
from pathlib import Path

CLIENTS = (
    "openai==3.57.0", "anthropic==2.14.0", "litellm==1.110.2", "mini-swe-agent==2.4.6", "canitoolcall==0.1.1",
)  # fmt: skip
ALONE = ("openenv==0.10.0",)
"""Without what they depend on: one module of them is used, and it needs nothing."""
FOLDER_VARIABLE = "SOSTENUTO_CLIENTS_ENV"
"""Names another folder than the default, or an environment that holds them already."""
_DEFAULT = Path(__file__).parent.parent / ".cache" / "clients"


def clients_folder(folder: Path | None = None) -> Path:
    """Where the commands of the environment are; it is built where it is missing.

    subprocess.CalledProcessError when an installation fails; calling again goes on from there.
    """
    place = folder or Path(os.environ.get(FOLDER_VARIABLE, _DEFAULT))
    if not (place / "bin" / "openenv").exists() or (place / ".unfinished").exists():
        _build(place)
    return place / "bin"


def _build(place: Path) -> None:
    place.mkdir(parents=True, exist_ok=True)
    (place / ".unfinished").touch()
    venv.create(place, with_pip=True)
    command = [str(place / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, "install", *CLIENTS], check=True, stdout=sys.stderr)
    subprocess.run([*command, "install", "--no-deps", *ALONE], check=True, stdout=sys.stderr)
    (place / ".unfinished").unlink()


if __name__ == "__main__":
    print(clients_folder(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
