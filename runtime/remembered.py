"""What a run was started as, in its directory: so that `sostenuto resume RUN` needs nothing else.

job.toml          the file that `sostenuto train` was given
quickstart.json   what `sostenuto quickstart` was told
"""

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from sostenuto.errors import ConfigError
from sostenuto.runtime.run_directory import hold

_FILE, _QUICKSTART = "job.toml", "quickstart.json"


class QuickstartAsked(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int = 1
    shuffle_rewards: bool = False
    unsafe: bool = False


def remember(run: Path, asked: Path | QuickstartAsked) -> None:
    """Write down what a run is started as, before anything of it starts.

    ConfigError on a full disk, or when a living runtime holds the directory.
    """
    with hold(run):
        _write(run, asked)


def _write(run: Path, asked: Path | QuickstartAsked) -> None:
    quickstart = isinstance(asked, QuickstartAsked)
    try:
        content = asked.model_dump_json().encode() if quickstart else asked.read_bytes()
        _replace(run / (_QUICKSTART if quickstart else _FILE), content)
        (run / (_FILE if quickstart else _QUICKSTART)).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"run directory {run}: {error.strerror}; choose another one") from error


def recall(run: Path) -> Path | QuickstartAsked:
    """The job's file, or what the quickstart was told; ConfigError where nothing can be taken up."""
    if (run / _FILE).is_file():
        return run / _FILE
    try:
        return QuickstartAsked.model_validate_json((run / _QUICKSTART).read_bytes())
    except FileNotFoundError:
        raise ConfigError(
            f"{run}: neither {_FILE} nor {_QUICKSTART} is there; give the directory of a run that "
            "`sostenuto train` or `quickstart` has begun, or use Runtime.resume in Python"
        ) from None
    except (OSError, ValidationError) as error:
        raise ConfigError(f"{run / _QUICKSTART}: {error}; restore the file") from error


def _replace(path: Path, content: bytes) -> None:
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
