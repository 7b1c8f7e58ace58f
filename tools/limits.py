"""The limits that a tool declares, checked."""

import re
from collections.abc import Mapping

from pydantic import ValidationError

from sostenuto.errors import ConfigError, nearest
from sostenuto.tools.wire import ToolLimits

_OTHERS = ("timeout_s", "output_bytes", "serial", "idempotent", "name")
_QUEUE = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")


def read_limits(given: Mapping[str, object], where: str) -> ToolLimits:
    """The limits, or the ConfigError of the first that is wrong; `where` begins its message."""
    try:
        limits = ToolLimits.model_validate(given, strict=True)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        name = str(wrong["loc"][0])
        if wrong["type"] == "extra_forbidden":
            raise ConfigError(
                f"{where}: there is no option {name!r}; {nearest(name, [*ToolLimits.model_fields, *_OTHERS])}"
            ) from None
        raise ConfigError(f"{where}: {name} is {wrong['input']!r}: {wrong['msg']}") from None
    if limits.queue is not None and not _QUEUE.fullmatch(limits.queue):
        raise ConfigError(
            f"{where}: queue {limits.queue!r} is not made of letters, digits, _ and - (64 at most)"
        )
    if limits.burst > 1 and limits.rate_per_s is None:
        raise ConfigError(f"{where}: burst is {limits.burst} without a rate; give rate_per_s, too")
    return limits
