"""Stale prefixes show in the next token: the engine's own pool and trie under a model that tells them."""

from benchmarks.gate_prefixes import played


def test_no_token_comes_from_kv_that_is_older_than_the_policy_allows():
    found = played(300, 20)
    assert (found.too_old, found.wrong) == (0, 0)
    assert found.updates == 20
    assert found.oldest >= 1, "KV of an earlier version was never used, so nothing was put to the test"
    assert found.cached_tokens > 10 * found.turns


def test_an_engine_that_is_told_no_age_is_found_out():
    found = played(300, 20, bounded=False)
    assert found.too_old > 0
    assert found.wrong == 0
