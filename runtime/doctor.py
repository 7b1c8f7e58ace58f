"""What this system can isolate and run, found out by trying."""

import importlib.util
import platform
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from sostenuto.sandbox.choose import probe_backends
from sostenuto.sandbox.protocol import Probe

_OPTIONAL = {
    "torch": "training and the embedded engine: pip install 'sostenuto[train]'",
    "pyarrow": "tasks from Parquet: pip install 'sostenuto[parquet]'",
    "docker": "sandboxes that are containers: pip install 'sostenuto[docker]'",
    "mcp": "tools of MCP servers: pip install 'sostenuto[mcp]'",
}
_SHM = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Findings:
    system: str
    probes: tuple[Probe, ...]
    packages: dict[str, bool]
    shm_bytes: int
    """Free in shared memory; weights are published there when they fit."""

    @property
    def can_isolate(self) -> bool:
        return any(probe.works for probe in self.probes)


async def examine() -> Findings:
    """Run every sandbox backend once and look at the rest."""
    with tempfile.TemporaryDirectory(prefix="sostenuto-doctor-") as root:
        # A run directory can be entered by the users that sandboxes run as; a temporary one cannot.
        Path(root).chmod(0o711)  # noqa: ASYNC240
        probes = await probe_backends(Path(root))
    return Findings(
        system=f"{platform.system()} {platform.release()}, Python {sys.version.split()[0]}",
        probes=tuple(probes),
        packages={name: importlib.util.find_spec(name) is not None for name in _OPTIONAL},
        shm_bytes=shutil.disk_usage(_SHM).free if _SHM.is_dir() else 0,  # noqa: ASYNC240
    )


def show_findings(console: Console, findings: Findings) -> None:
    console.print(findings.system)
    for probe in findings.probes:
        console.print(_about(probe))
    if not findings.can_isolate:
        console.print("[bold red]no sandbox works here; tools run only with unsafe=True[/]")
    console.print(f"shared memory: {findings.shm_bytes >> 20} MiB free in {_SHM}")
    for name, there in findings.packages.items():
        console.print(f"{name}: {'installed' if there else f'not installed ({_OPTIONAL[name]})'}")


def _about(probe: Probe) -> Text:
    """What a backend can do here, or what is in its way."""
    works = "works" if probe.works else "does not work"
    about = Text(f"{probe.backend}: {works}\n", style="green" if probe.works else "yellow")
    facts = {"isolation": probe.isolation} if probe.works else {}
    facts |= probe.details
    if probe.remedy and probe.remedy != probe.details.get("error"):
        facts["remedy"] = probe.remedy
    for name, fact in facts.items():
        about.append(f"  {name}: {fact}\n", style="default")
    about.rstrip()
    return about
