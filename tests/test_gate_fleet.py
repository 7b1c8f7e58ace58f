"""A slow and a failing engine behind the real dispatcher, on virtual time, watched from inside."""

import pytest
from benchmarks.gate_fleet import Seen, quantizing, slow_and_failing, watched

from sostenuto.scheduler.update_terms import UpdateTerms


def assert_in_order(seen: Seen) -> None:
    assert (seen.unverified, seen.unopened, seen.behind) == (0, 0, 0)
    assert (seen.misstamped, seen.went_back) == (0, 0)


@pytest.mark.parametrize(
    "terms",
    [
        UpdateTerms(),
        UpdateTerms(running="finish", acting="keep", max_kv_age=1, finish_within_s=1.0),
        UpdateTerms(running="continue", acting="pin", quorum=1),
        UpdateTerms(running="abort", acting="keep", quorum=0.5, deadline_s=1.0),
        UpdateTerms(running="retract", acting="keep", quorum=2, late="quarantine"),
    ],
    ids=lambda terms: f"{terms.running}-{terms.acting}",
)
def test_no_request_starts_where_it_may_not_and_versions_keep_their_order(terms: UpdateTerms):
    seen, result = watched(terms, 15, transfers=slow_and_failing())
    assert_in_order(seen)
    assert seen.opened == 15
    assert seen.failures > 0
    assert seen.requests > 50
    assert all(not program.failed for program in result.programs)
    assert (seen.interrupted > 0) == (terms.running == "abort")
    assert (seen.pinned > 0) == (terms.acting == "pin")
    assert ("engine-1" in seen.late) == (terms.quorum is not None)


def test_engines_that_are_ready_at_different_times_serve_no_version_early():
    seen, _ = watched(UpdateTerms(), 15, transfers=quantizing())
    assert_in_order(seen)
    assert seen.opened == 15


def test_a_gate_that_is_open_is_found_out():
    seen, _ = watched(UpdateTerms(), 15, transfers=slow_and_failing(), gated=False)
    assert seen.unverified > 0
    assert seen.unopened > 0
