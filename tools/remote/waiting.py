"""How long a service asks to be left alone."""

import math
from contextlib import suppress
from email.utils import parsedate_to_datetime
from time import time as wall_s  # noqa: TID251 - Retry-After may be a date


def retry_after_s(header: str | None) -> float | None:
    """Seconds from now, of either form of Retry-After; None for what is not there or cannot be read."""
    if header is None:
        return None
    with suppress(ValueError):
        seconds = float(header)
        return max(0.0, seconds) if math.isfinite(seconds) else None
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - wall_s())
    except ValueError:
        return None
