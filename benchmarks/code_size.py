"""How much code there is, and how long its functions are, read from the syntax trees.

A function's length is that of its `def` to its last line, without its docstring and its decorators.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.bench import Bench

PACKAGES = ("scheduler", "sandbox", "tools", "envs", "trainer", "runtime")
VOCABULARY = "src/sostenuto"
"""Not a package of its own: types, records, errors and the public names."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def function_lengths(source: str) -> list[int]:
    """Lines of every function in the source, nested ones too, in the order of their beginnings."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, _Function)]
    return [_length(function) for function in sorted(functions, key=lambda node: node.lineno)]


def _length(function: _Function) -> int:
    end = function.end_lineno or function.lineno
    return end - function.lineno + 1 - _docstring_lines(function)


def _docstring_lines(function: _Function) -> int:
    if ast.get_docstring(function, clean=False) is None:
        return 0
    said = function.body[0]
    return (said.end_lineno or said.lineno) - said.lineno + 1


async def measure(bench: Bench) -> None:
    """Lines of each package, and the lengths of all functions together."""
    root = Path(__file__).parent.parent
    lengths: list[int] = []
    for package in (*PACKAGES, VOCABULARY):
        sources = [path.read_text() for path in _files(root / package)]
        lines = sum(len(source.splitlines()) for source in sources)
        bench.tell(f"lines_{Path(package).name}", lines, "lines")
        lengths += [length for source in sources for length in function_lengths(source)]
    bench.tell("functions", len(lengths), "functions")
    bench.tell("function_lines_mean", float(np.mean(lengths)), "lines", "<= 10")
    bench.tell("function_lines_p90", float(np.percentile(lengths, 90)), "lines", "<= 25")


def _files(folder: Path) -> Iterator[Path]:
    # The links under src/sostenuto lead to the packages, which are counted by themselves.
    below = folder.glob("*.py") if folder.name == "sostenuto" else folder.rglob("*.py")
    return iter(sorted(below))
