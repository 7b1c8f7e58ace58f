"""Code that a policy has written, run against cases in the program's own sandbox."""

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from sostenuto.envs.workspace import Workspace
from sostenuto.errors import ConfigError

_OUTPUT_BYTES = 1 << 20
_SHOWN = 400


@dataclass(frozen=True, slots=True)
class Case:
    """What a program reads, and what it has to write."""

    stdin: str = ""
    stdout: str = ""
    """Compared line by line, blanks at the ends of lines and of the whole left out."""


@dataclass(frozen=True, slots=True)
class CodeVerdict:
    """How a program did."""

    passed: int
    cases: int
    first_failure: str
    """For people; empty when all passed."""

    @property
    def share(self) -> float:
        return self.passed / self.cases


async def check_code(
    sandbox: Workspace,
    code: str,
    cases: Sequence[Case],
    *,
    interpreter: Sequence[str] = ("python3",),
    timeout_s: float = 10.0,
    stop_at_failure: bool = False,
) -> CodeVerdict:
    """Run `code` once for each case, under the sandbox's limits.

    The file has a name that the policy cannot know, outside of what it can import by accident.
    ConfigError without cases; SandboxError, which is nobody's reward, when the sandbox is gone.
    """
    if not cases:
        raise ConfigError("check_code: there are no cases; give one or more")
    if not timeout_s > 0 or not math.isfinite(timeout_s):
        raise ConfigError(f"check_code: timeout_s is {timeout_s}; give seconds above 0")
    path = f".checked-{secrets.token_hex(8)}/program"
    await sandbox.write(path, code)
    passed, failure = 0, ""
    for number, case in enumerate(cases, start=1):
        why = await _failure(sandbox, [*interpreter, path], case, timeout_s)
        passed += not why
        if why and not failure:
            failure = f"case {number}: {why}"
        if why and stop_at_failure:
            break
    return CodeVerdict(passed, len(cases), failure)


async def _failure(sandbox: Workspace, argv: Sequence[str], case: Case, timeout_s: float) -> str:
    # stderr goes with stdout here, and a program may warn: only what it writes to stdout is compared.
    command = ["/bin/sh", "-c", 'exec "$@" 2>/dev/null', "sh", *argv]
    result = await sandbox.exec(command, stdin=case.stdin, timeout_s=timeout_s, output_bytes=_OUTPUT_BYTES)
    if result.timed_out:
        return f"still running after {timeout_s:g} s"
    if result.out_of_memory:
        return "out of memory"
    if result.exit_code != 0:
        return f"exit code {result.exit_code}"
    if _lines(result.output) != _lines(case.stdout):
        return f"wrote {result.output[:_SHOWN]!r}, not {case.stdout[:_SHOWN]!r}"
    return ""


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
