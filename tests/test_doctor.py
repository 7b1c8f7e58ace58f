"""What `sostenuto doctor` says of a system."""

from io import StringIO

from rich.console import Console

from sostenuto.runtime.doctor import Findings, examine, show_findings
from sostenuto.sandbox.protocol import Probe


def shown(findings: Findings) -> str:
    written = StringIO()
    show_findings(Console(file=written, width=200), findings)
    return written.getvalue()


async def test_every_backend_is_tried_and_either_works_or_comes_with_a_remedy():
    findings = await examine()
    assert [probe.backend for probe in findings.probes] == ["bubblewrap", "landlock", "docker"]
    for probe in findings.probes:
        assert probe.isolation if probe.works else probe.remedy
        assert f"{probe.backend}: {'works' if probe.works else 'does not work'}" in shown(findings)


def test_reason_and_remedy_are_told_and_a_repeated_one_once():
    lacks = Probe("one", False, "namespaces", "allow them", {"error": "they are refused"})
    same = Probe("two", False, "containers", "start the daemon", {"error": "start the daemon"})
    said = shown(Findings("Linux", (lacks, same), {}, 1 << 20))
    assert "error: they are refused\n  remedy: allow them" in said
    assert said.count("start the daemon") == 1
    assert "no sandbox works here" in said
