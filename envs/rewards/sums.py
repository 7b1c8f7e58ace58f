"""One reward from several."""

import math
from collections.abc import Mapping

from sostenuto.errors import ConfigError


def weighted(parts: Mapping[str, float], weights: Mapping[str, float]) -> dict[str, float]:
    """The weighted sum as "reward", and each part under its own name beside it.

        return weighted({"right": right, "brief": brief}, {"right": 1.0, "brief": 0.1})

    ConfigError when a part has no weight or a weight no part, or one is not finite.
    """
    if "reward" in parts:
        raise ConfigError("weighted: 'reward' is the name of the sum; call that part otherwise")
    if missing := sorted(set(parts) ^ set(weights)):
        raise ConfigError(f"weighted: give a part and a weight for each of {', '.join(missing)}")
    for name, number in (*parts.items(), *weights.items()):
        if not math.isfinite(number):
            raise ConfigError(f"weighted: {name!r} is {number}; give a finite number")
    return {"reward": math.fsum(weights[name] * parts[name] for name in parts), **parts}
