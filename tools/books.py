"""Where it is written what leaves the program table, what stays and what is counted."""

from dataclasses import dataclass

from sostenuto.tools.edge import Edge
from sostenuto.tools.journal import Journal
from sostenuto.tools.metrics import Metrics

COUNTERS = (
    "prepared",
    "prepare_failures",
    "resumed",
    "calls",
    "scores",
    "repeated_ids",
    "released",
    "expired_leases",
    "expired_programs",
    "outlived_programs",
    "fenced_programs",
    "unknown_outcomes",
)


@dataclass(frozen=True, slots=True)
class Books:
    edge: Edge
    journal: Journal
    metrics: Metrics
