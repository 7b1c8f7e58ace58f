"""How plots look, and how one becomes SVG for a page.  Matplotlib is loaded when the first is drawn."""

import io
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib import import_module
from typing import Any, ParamSpec

from sostenuto.errors import Unsupported

P = ParamSpec("P")

_STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["Helvetica", "Arial", "DejaVu Sans"],
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9aa3ad",
    "axes.labelcolor": "#3c4650",
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.titlecolor": "#1d2730",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e8ec",
    "grid.linewidth": 0.8,
    "xtick.color": "#5b6670",
    "ytick.color": "#5b6670",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "svg.fonttype": "none",
    "svg.hashsalt": "sostenuto",
}
_COLOURS = ("#0b5fa5", "#d1495b", "#edae49", "#2a9d6f", "#8f5aa8", "#e07a2f", "#56b4d3", "#7a6a4f", "#b5467e")
_NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))
"""The same figure gives the same text, and names no address."""
_REFERENCE_COLOURS = ("#4a4a4a", "#8a8f94", "#b3b8bd")

PHASES: Mapping[str, tuple[str, str]] = {
    "queued": ("queued", "#c9ced3"),
    "preparing": ("environment is made", "#b79f6b"),
    "waiting": ("waits, KV given up", "#d1495b"),
    "ready": ("waits, KV held", "#edae49"),
    "reasoning": ("on an engine", "#0b5fa5"),
    "acting": ("tool runs, KV held", "#7fc8a9"),
    "parked": ("tool runs, KV given up", "#b9d8cc"),
    "scoring": ("is scored", "#8f5aa8"),
}
"""Phases of a program: what a legend calls them, and their colour."""

REASONS: Mapping[str, tuple[str, str]] = {
    "kv": ("KV", "#0b5fa5"),
    "slots": ("decode slots", "#56b4d3"),
    "order": ("order", "#edae49"),
    "version": ("version", "#8f5aa8"),
    "sandbox": ("environment", "#b79f6b"),
}


def colours(labels: Sequence[str], references: Sequence[str] = ()) -> dict[str, str]:
    """The same colour for a label in every plot of a page; grey for references."""
    chosen = {label: _COLOURS[i % len(_COLOURS)] for i, label in enumerate(labels)}
    return chosen | {
        label: _REFERENCE_COLOURS[i % len(_REFERENCE_COLOURS)] for i, label in enumerate(references)
    }


def new_figure(width: float, height: float, **subplots: Any) -> tuple[Any, Any]:  # noqa: ANN401 - no types
    """A figure and its axes."""
    make, _ = _matplotlib()
    figure = make(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(**subplots)


def drawn(plot: Callable[P, Any]) -> Callable[P, str]:
    """A function that returns a figure becomes one that returns it in our style, as an `<svg>` element."""

    @wraps(plot)
    def draw(*args: P.args, **kwargs: P.kwargs) -> str:
        written = io.StringIO()
        _, in_style = _matplotlib()
        with in_style(_STYLE):
            plot(*args, **kwargs).savefig(written, format="svg", metadata=_NO_METADATA)
        text = written.getvalue()
        return text[text.index("<svg") :]

    return draw


def check_drawing() -> None:
    """Raise Unsupported where plots cannot be drawn."""
    _matplotlib()


def _matplotlib() -> tuple[Any, Any]:
    """What makes a figure, and what sets a style for a while."""
    try:
        figures, library = import_module("matplotlib.figure"), import_module("matplotlib")
    except ModuleNotFoundError as error:
        raise Unsupported("plots need matplotlib: pip install 'sostenuto[train]'") from error
    return figures.Figure, library.rc_context
