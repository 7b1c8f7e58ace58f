"""An environment of its own in which TRL trains; it wants more packages than ours does.

    python -m benchmarks.trl_environment [FOLDER]

Takes a few minutes, once; what is there already is used again.
"""

import os
import subprocess
import sys
import venv
from pathlib import Path

TORCH, RELEASE = "2.13.0", "1.16.0"
FOLDER_VARIABLE = "SOSTENUTO_TRL_ENV"
"""Names another folder than the default, or an environment that has TRL already."""
_DEFAULT = Path(__file__).parent.parent / ".cache" / "trainers" / f"trl-{RELEASE}"


def trl_python(folder: Path | None = None) -> Path:
    """The Python of the environment, which is built where it is missing.

    subprocess.CalledProcessError when an installation fails; calling again goes on from there.
    """
    place = folder or Path(os.environ.get(FOLDER_VARIABLE, _DEFAULT))
    python = place / "bin" / "python"
    if not python.exists() or (place / ".unfinished").exists():
        _build(place, python)
    return python


def _build(place: Path, python: Path) -> None:
    place.mkdir(parents=True, exist_ok=True)
    (place / ".unfinished").touch()
    venv.create(place, with_pip=True)
    constraint = place / "constraints.txt"
    constraint.write_text(f"torch=={TORCH}\n")
    command = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    for packages in ([f"torch=={TORCH}"], ["-c", str(constraint), f"trl=={RELEASE}"]):
        subprocess.run([*command, *packages], check=True, stdout=sys.stderr)
    (place / ".unfinished").unlink()


if __name__ == "__main__":
    print(trl_python(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
