"""Mathematical answers, compared by what they mean.

The comparison parses what a policy has written, and an expression can be made to keep it busy for ever: it
runs in a process of its own, which is ended at the deadline.
"""

import sys
from importlib.util import find_spec
from subprocess import DEVNULL, PIPE

import anyio

from sostenuto.errors import Unsupported

_LONGEST = 10_000
_SAME = 0
_COMPARE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
from math_verify import parse, verify
def read(text):
    marked = any(mark in text for mark in ("$", "boxed", "\\\\(", "\\\\["))
    whole = [] if marked else parse("$" + text + "$", parsing_timeout=None)
    return whole or parse(text, parsing_timeout=None)
answer, _, expected = sys.stdin.read().partition("\\0")
known, given = read(expected), read(answer)
sys.exit(0 if known and given and verify(known, given, timeout_seconds=None) else 3)
"""


async def same_math(answer: str, expected: str, *, timeout_s: float = 10.0) -> bool:
    r"""Whether two LaTeX or plain expressions are equal: \frac{1}{2}, 0.5 and 1/2 are.

    Within a text the expression stands between $ signs or in \boxed{}.  Compared by the `math-verify`
    package; Unsupported without it.  False for what it cannot read, or not compare within `timeout_s`.
    """
    if find_spec("math_verify") is None:
        raise Unsupported("same_math: the package math-verify is missing; pip install 'sostenuto[math]'")
    texts = f"{answer[-_LONGEST:]}\0{expected[-_LONGEST:]}".replace("\r", "")
    command = [sys.executable, "-c", _COMPARE]
    code: int | None = None
    with anyio.move_on_after(timeout_s):
        run = await anyio.run_process(command, input=texts.encode(), check=False, stdout=PIPE, stderr=DEVNULL)
        code = run.returncode
    return code == _SAME
