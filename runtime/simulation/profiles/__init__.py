"""What known engines are like, as data."""

import tomllib
from importlib.resources import files
from pathlib import Path

from pydantic import ValidationError

from sostenuto.errors import ConfigError, nearest
from sostenuto.runtime.simulation.profile import EngineProfile


def known_profiles() -> list[str]:
    names = (Path(entry.name) for entry in files(__name__).iterdir())
    return sorted(name.stem for name in names if name.suffix == ".toml")


def load_profile(name_or_path: str) -> EngineProfile:
    """The profile of that name, or the one in that TOML file."""
    text, where = _read(name_or_path)
    try:
        return EngineProfile.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(f"{where}: not TOML: {exc}; correct that line") from exc
    except ValidationError as exc:
        raise ConfigError(f"{where}: {_first_fault(exc)}; correct it in the file") from exc


def _read(name_or_path: str) -> tuple[str, str]:
    known = known_profiles()
    if name_or_path in known:
        return (files(__name__) / f"{name_or_path}.toml").read_text("utf-8"), f"profile {name_or_path}"
    path = Path(name_or_path)
    try:
        return path.read_text("utf-8"), str(path)
    except FileNotFoundError:
        remedy = f"{nearest(name_or_path, known)}, or give the path of a TOML file"
        raise ConfigError(
            f"engine profile {name_or_path!r}: there is no such profile or file; {remedy}"
        ) from None
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(
            f"engine profile {name_or_path!r}: cannot be read: {exc}; give a TOML file"
        ) from exc


def _first_fault(exc: ValidationError) -> str:
    fault = exc.errors()[0]
    field = ".".join(str(part) for part in fault["loc"])
    return f"{field}: {fault['msg']}" if field else fault["msg"]
