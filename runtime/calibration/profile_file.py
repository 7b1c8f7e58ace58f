"""An engine profile as the TOML file that `load_profile` reads."""

import json

from sostenuto.runtime.simulation.profile import EngineProfile


def profile_text(profile: EngineProfile) -> str:
    """Every field, measured ones to four digits."""
    fields: dict[str, object] = json.loads(profile.model_dump_json(), parse_float=_four_digits)
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in fields.items())


def _four_digits(number: str) -> float:
    return float(f"{float(number):.4g}")
