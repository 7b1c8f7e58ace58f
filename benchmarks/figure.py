"""One measured number and what it should be.

A target is an operator and a number, such as `<= 1e-4`; None for a number that is told and not judged.
"""

import json
import operator
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    "==": operator.eq,
}
_DIGITS = 6


class Tell(Protocol):
    """Prints a figure and keeps it."""

    def __call__(self, name: str, value: float, unit: str, target: str | None = None) -> None: ...


@dataclass(frozen=True, slots=True)
class Figure:
    """`target` is checked when the figure is made: ValueError for one that cannot be read."""

    name: str
    value: float
    unit: str
    target: str | None = None

    def __post_init__(self) -> None:
        if self.target is not None:
            _read(self.target)

    @property
    def is_met(self) -> bool:
        """True without a target; never true for NaN."""
        if self.target is None:
            return True
        holds, bound = _read(self.target)
        return holds(self.value, bound)

    def line(self) -> str:
        """The figure as one JSON object, of six significant digits."""
        return json.dumps({**asdict(self), "value": float(f"{self.value:.{_DIGITS}g}")})

    @classmethod
    def parse(cls, line: str) -> "Figure":
        """What `line` wrote."""
        return cls(**json.loads(line))


def keep(figures: Iterable[Figure], path: Path) -> None:
    """Write the figures to `path`; those of other names that it holds already stay."""
    kept = {figure.name: figure for figure in map(Figure.parse, _lines(path))}
    kept.update({figure.name: figure for figure in figures})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(figure.line() + "\n" for figure in kept.values()))


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _read(target: str) -> tuple[Callable[[float, float], bool], float]:
    sign, _, number = target.partition(" ")
    if sign not in _OPERATORS:
        raise ValueError(f"target {target!r}: begin it with one of {', '.join(_OPERATORS)} and a space")
    return _OPERATORS[sign], float(number)
