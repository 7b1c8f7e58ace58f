"""Answers that are checked without running anything."""

import re
from decimal import Decimal, InvalidOperation

_EXPONENT = r"(?:[eE][-+]?\d{1,4})?"
_NUMBER = re.compile(rf"[-+]?(?:(?:\d{{1,3}}(?:,\d{{3}})+|\d+)(?:\.\d+)?|\.\d+){_EXPONENT}")
_LONGEST = 10_000
"""Characters of an answer that are looked at, its end; what a policy writes has no bound."""


def boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{...} of a text, braces within it included; None without one."""
    tail = text[-_LONGEST:]
    start = tail.rfind("\\boxed{")
    if start < 0:
        return None
    begin = start + len("\\boxed{")
    depth = 1
    for index in range(begin, len(tail)):
        depth += {"{": 1, "}": -1}.get(tail[index], 0)
        if not depth:
            return tail[begin:index].strip()
    return None


def last_number(text: str) -> str | None:
    """The last number of a text as it is written there; None without one."""
    found = _NUMBER.findall(text[-_LONGEST:])
    return found[-1] if found else None


def same_number(answer: str, expected: str, *, tolerance: float = 0.0) -> bool:
    """Whether the last number of `answer` is that of `expected`, within `tolerance` of it relatively.

    Numbers are compared as decimals, so 0.10 is 0.1 and no rounding is believed.
    """
    one, other = _decimal(answer), _decimal(expected)
    if one is None or other is None:
        return False
    return abs(one - other) <= Decimal(repr(tolerance)) * abs(other)


def _decimal(text: str) -> Decimal | None:
    found = last_number(text)
    try:
        return None if found is None else Decimal(found.replace(",", ""))
    except InvalidOperation:
        return None
