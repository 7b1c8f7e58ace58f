"""The figures of a change of version, one JSON object a line: name, value, unit, target.

python benchmarks/publication_gate.py [--only NAME ...] [--quick]
"""

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks import gate_engines
from benchmarks.figure import Tell
from benchmarks.gate_fleet import FAILS, SLOW, quantizing, slow_and_failing, watched
from benchmarks.gate_prefixes import played
from benchmarks.telling import Telling, end_in_order
from sostenuto.scheduler.update_terms import UpdateTerms

RESULTS = Path(__file__).parent / "results" / "publication-gate.jsonl"
TERMS = {
    "all, retract, recompute": UpdateTerms(),
    "quorum of 2 after 1 s, abort, keep": UpdateTerms(
        running="abort", acting="keep", quorum=2, deadline_s=1.0, max_kv_age=2
    ),
    "quorum of 1, continue, pin": UpdateTerms(running="continue", acting="pin", quorum=1),
    "all, finish, keep": UpdateTerms(running="finish", acting="keep", finish_within_s=1.0),
}


def measure_fleet(tell: Tell, *, quick: bool) -> None:
    """Three engines, one slow and one failing."""
    count = 20 if quick else 1000
    for name, terms in TERMS.items():
        seen, result = watched(terms, count, transfers=slow_and_failing())
        tell(f"{name}: publications", seen.opened, "versions", f">= {count * 0.99:g}")
        tell(
            f"{name}: of these failed on one engine (one x {SLOW:g} slow, {FAILS:g} fail)", seen.failures, ""
        )
        tell(f"{name}: requests", seen.requests, "requests")
        tell(f"{name}: requests on an engine that is not verified", seen.unverified, "requests", "== 0")
        tell(f"{name}: requests of a version that had not opened", seen.unopened, "requests", "== 0")
        tell(f"{name}: requests behind what is deployed", seen.behind, "requests", "== 0")
        tell(f"{name}: requests of pinned programs", seen.pinned, "requests")
        tell(f"{name}: turns interrupted and gone on with", seen.interrupted, "turns")
        tell(f"{name}: versions out of order", seen.went_back, "", "== 0")
        tell(f"{name}: spans stamped with a version their engine did not have", seen.misstamped, "", "== 0")
        tell(f"{name}: programs that failed", sum(bool(p.failed) for p in result.programs), "", "== 0")
    seen, _ = watched(UpdateTerms(), 20, transfers=slow_and_failing(), gated=False)
    tell(
        "control, a gate that is open: requests on an engine that is not verified", seen.unverified, "", "> 0"
    )
    tell("control, a gate that is open: requests of a version that had not opened", seen.unopened, "", "> 0")
    seen, _ = watched(UpdateTerms(), count // 2, transfers=quantizing())
    tell("two engines, one converts: requests before both were ready", seen.unopened, "requests", "== 0")


def measure_prefixes(tell: Tell, *, quick: bool) -> None:
    """The embedded engine's pool and trie, under a model that tells how old its KV is."""
    turns, versions = (500, 20) if quick else (10_000, 200)
    found = played(turns, versions)
    tell("stale prefixes: turns", found.turns, "turns", f">= {turns}")
    tell("stale prefixes: versions", found.updates, "versions", f">= {versions}")
    tell("stale prefixes: tokens", found.tokens, "tokens")
    tell(
        "stale prefixes: context tokens that were cached, each turn",
        found.cached_tokens / found.turns,
        "tokens",
    )
    tell("stale prefixes: oldest KV that was used", found.oldest, "versions")
    tell("stale prefixes: tokens from KV older than allowed", found.too_old, "tokens", "== 0")
    tell("stale prefixes: tokens that their context and stamp do not explain", found.wrong, "tokens", "== 0")
    control = played(500, 20, bounded=False)
    tell(
        "control, an engine that is told no age: tokens from KV older than allowed",
        control.too_old,
        "",
        "> 0",
    )


MEASURES = {
    "fleet": measure_fleet,
    "prefixes": measure_prefixes,
    "engines": gate_engines.measure_fleet,
    "pause": gate_engines.measure_pause,
}


def main() -> None:
    """Measure what was asked for; exit status 1 when a figure misses its target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(MEASURES), help="these alone")
    parser.add_argument("--quick", action="store_true", help="short, and nothing is written to results/")
    asked = parser.parse_args()
    end_in_order()
    tell = Telling(None if asked.quick else RESULTS)
    for name in asked.only or MEASURES:
        print(f"# {name}", file=sys.stderr, flush=True)
        MEASURES[name](tell, quick=asked.quick)
    tell.end()


if __name__ == "__main__":
    main()
