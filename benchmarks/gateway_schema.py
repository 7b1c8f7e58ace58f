"""Requests that schemathesis makes out of the gateway's OpenAPI document, good ones and bad ones.

schemathesis lives in an environment of its own, which is built where it is missing.
"""

import json
import os
import subprocess
import sys
import tempfile
import venv
from collections import Counter
from pathlib import Path
from typing import Any, cast

import anyio
from anyio import to_thread

from benchmarks.figure import Tell
from benchmarks.gateway_stand import standing

_RELEASE = "schemathesis==4.32.5"
_FOLDER_VARIABLE = "SOSTENUTO_SCHEMATHESIS_ENV"
"""Names another folder than the default, or an environment that holds it already."""
_DEFAULT = Path(__file__).parent.parent / ".cache" / "schemathesis"
_EXAMPLES = 300
"""For each operation."""
_LONGEST_S = 900


def measure_schema(tell: Tell, *, quick: bool) -> None:
    anyio.run(_measure, tell, 20 if quick else _EXAMPLES)


async def _measure(tell: Tell, examples: int) -> None:
    command = await to_thread.run_sync(_command)
    async with standing() as stand:
        statuses = await to_thread.run_sync(_run, command, stand.url, examples)
    errors = sum(count for status, count in statuses.items() if status >= 500)
    tell("requests by schemathesis that were answered", sum(statuses.values()), "", ">= 1")
    tell("of them with a server error", errors, "", "<= 0")


def _command() -> Path:
    place = Path(os.environ.get(_FOLDER_VARIABLE, _DEFAULT))
    command = place / "bin" / "schemathesis"
    if not command.exists():
        venv.create(place, with_pip=True)
        pip = [str(place / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", _RELEASE], check=True, stdout=sys.stderr)
    return command


def _run(command: Path, url: str, examples: int) -> Counter[int]:
    """How many responses of each status there were."""
    with tempfile.TemporaryDirectory(prefix="sostenuto-schema-") as folder:
        report = Path(folder) / "events.ndjson"
        arguments = [
            "run", f"{url}/openapi.json", "--checks", "not_a_server_error", "--max-examples", str(examples),
            "--phases", "examples,coverage,fuzzing", "--continue-on-failure",
            "--suppress-health-check", "all", "--warnings", "off", "--seed", "1",
            "--report", "ndjson", "--report-ndjson-path", str(report),
        ]  # fmt: skip
        run = [str(command), *arguments]
        subprocess.run(run, stdout=sys.stderr, cwd=folder, timeout=_LONGEST_S, check=False)
        return _statuses(report)


def _statuses(report: Path) -> Counter[int]:
    found: Counter[int] = Counter()
    with report.open() as lines:
        for line in lines:
            _count(json.loads(line), found)
    return found


def _count(event: dict[str, Any], found: Counter[int]) -> None:
    """Every response anywhere in an event of the report."""
    pending: list[Any] = [event]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            fields = cast("dict[str, Any]", part)
            if isinstance(status := fields.get("status_code"), int):
                found[status] += 1
            pending += fields.values()
        elif isinstance(part, list):
            pending += cast("list[Any]", part)
