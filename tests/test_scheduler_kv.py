from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sostenuto.scheduler.kv import Footprint, KvLedger, Segment
from sostenuto.types import ProgramId

CAPACITY = 200
PROGRAMS = st.sampled_from([ProgramId(name) for name in "abcd"])
SEGMENTS = st.lists(
    st.sampled_from([Segment("system", 30), Segment("group", 50), Segment("other", 20)]), unique=True
)
FOOTPRINTS = st.builds(Footprint, st.integers(0, 90), SEGMENTS.map(tuple))


class LedgerMachine(RuleBasedStateMachine):
    """The ledger against a model that adds everything up anew."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = KvLedger(CAPACITY)
        self.model: dict[ProgramId, Footprint] = {}

    def counted(self, model: dict[ProgramId, Footprint]) -> int:
        shared = {segment for footprint in model.values() for segment in footprint.shared}
        return sum(f.private_tokens for f in model.values()) + sum(s.tokens for s in shared)

    @rule(program_id=PROGRAMS, wanted=FOOTPRINTS)
    def reserve(self, program_id: ProgramId, wanted: Footprint) -> None:
        after = {**self.model, program_id: wanted}
        fits = self.counted(after) <= CAPACITY
        assert (self.ledger.missing_tokens(program_id, wanted) == 0) == fits
        assert self.ledger.reserve(program_id, wanted) == fits
        if fits:
            self.model = after

    @rule(program_id=PROGRAMS)
    def release(self, program_id: ProgramId) -> None:
        before = self.counted(self.model)
        self.model.pop(program_id, None)
        assert self.ledger.release(program_id) == before - self.counted(self.model)
        assert self.ledger.release(program_id) == 0

    @invariant()
    def reserved_plus_free_is_capacity_and_shared_prefixes_count_once(self) -> None:
        statistics = self.ledger.statistics()
        assert statistics.reserved_tokens == self.counted(self.model) <= CAPACITY
        assert statistics.reserved_tokens + self.ledger.free_tokens == CAPACITY
        assert statistics.holders == len(self.model)


TestLedger = LedgerMachine.TestCase


@given(st.integers(1, 64), st.integers(0, 500))
def test_kv_is_given_out_in_whole_blocks(block: int, tokens: int):
    ledger = KvLedger(10_000, block_tokens=block)
    assert ledger.reserve(ProgramId("a"), Footprint(tokens))
    reserved = ledger.statistics().reserved_tokens
    assert reserved % block == 0
    assert 0 <= reserved - tokens < block


def test_a_ledger_shows_itself():
    ledger = KvLedger(100)
    assert ledger.reserve(ProgramId("b"), Footprint(30))
    assert ledger.reserve(ProgramId("a"), Footprint(10, (Segment("s", 10),)))
    assert repr(ledger) == "<KvLedger free=50 a=20 b=30>"


def test_the_group_case_counts_a_shared_prompt_once():
    ledger = KvLedger(26_000)
    prefix = (Segment("prompt", 10_000),)
    assert all(ledger.reserve(ProgramId(f"p{n}"), Footprint(2_000, prefix)) for n in range(8))
    assert ledger.free_tokens == 0
