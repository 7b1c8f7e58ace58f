"""An environment of its own in which SGLang's server and scheduler run on CPU, with stand-ins for kernels.

    python -m benchmarks.sglang_environment [FOLDER]

SGLang has no kernels for CPUs as a wheel.  What is tested here is the real server all the same: HTTP,
scheduler, radix cache, grammar, updates; only the mathematics runs in plain torch.
Takes about ten minutes and 2.5 GB, once; what is there already is used again.
"""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

TORCH, RELEASE = "2.13.0", "0.5.23"
FOLDER_VARIABLE = "SOSTENUTO_SGLANG_ENV"
"""Names another folder than the default."""
_DEFAULT = Path(__file__).parent.parent / ".cache" / "engines" / f"sglang-{RELEASE}"
_STAND_INS = ("sgl_kernel", "torchvision")
_IMPORTED = (
    "transformers==5.19.0", "numpy", "aiohttp", "orjson", "uvloop", "uvicorn", "fastapi", "pyzmq", "msgspec",
    "setproctitle", "prometheus-client", "pybase64", "python-multipart", "partial_json_parser",
    "interegular", "pillow", "IPython", "openai==2.8.0", "openai-harmony==0.0.4", "einops", "dill", "scipy",
    "xxhash", "zstandard", "watchfiles", "jsonschema", "soundfile==0.13.1", "loguru", "numba==0.65.1",
    "triton", "psutil", "pydantic", "requests", "tqdm", "gguf", "distro", "packaging", "regex",
    "sentencepiece==0.2.1", "tiktoken", "py-spy", "cloudpickle", "apache-tvm-ffi==0.1.11",
    "llguidance>=1.7.6,<2", "outlines_core",
)  # fmt: skip
"""What its imports need, out of what its wheel declares: the rest is for GPUs, or asks for another torch."""
_ALONE = (f"sglang=={RELEASE}", "compressed-tensors==0.18.0", "torchao==0.18.0", "xgrammar==0.2.7")
"""Packages whose own requirements name another torch."""


def sglang_python(folder: Path | None = None) -> Path:
    """The Python of the environment, which is built where it is missing.

    subprocess.CalledProcessError when an installation fails; calling again goes on from there.
    """
    place = folder or Path(os.environ.get(FOLDER_VARIABLE, _DEFAULT))
    python = place / "bin" / "python"
    if not python.exists() or (place / ".unfinished").exists():
        _build(place)
    return python


def _build(place: Path) -> None:
    place.mkdir(parents=True, exist_ok=True)
    (place / ".unfinished").touch()
    venv.create(place, with_pip=True)
    _pip(place, f"torch=={TORCH}", *_IMPORTED)
    _pip(place, "--no-deps", *_ALONE)
    (packages,) = (place / "lib").glob("python3*/site-packages")
    for name in _STAND_INS:
        (packages / name).mkdir(exist_ok=True)
        shutil.copyfile(Path(__file__).with_name("sglang_stand_in.py"), packages / name / "__init__.py")
    (place / ".unfinished").unlink()


def _pip(place: Path, *arguments: str) -> None:
    command = [str(place / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, "install", *arguments], check=True, stdout=sys.stderr)


if __name__ == "__main__":
    print(sglang_python(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
