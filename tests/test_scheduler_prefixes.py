import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sostenuto.scheduler.kv import Footprint, KvLedger, Segment
from sostenuto.scheduler.prefixes import PrefixTrie, block_hashes
from sostenuto.types import ProgramId

BLOCK = 4
PROGRAMS = st.sampled_from([ProgramId(name) for name in "abcde"])
TOKENS = st.lists(st.integers(0, 1), max_size=6).map(lambda bits: [bit for bit in bits for _ in range(BLOCK)])
A, B, C = (ProgramId(name) for name in "abc")

Block = tuple[int, ...]


def blocks_of(token_ids: list[int]) -> set[Block]:
    """Every block as all that is in the context up to its end."""
    return {tuple(token_ids[:end]) for end in range(BLOCK, len(token_ids) + 1, BLOCK)}


class HoldersMachine(RuleBasedStateMachine):
    """A ledger whose holders report at any time, against a count of the blocks that they hold."""

    def __init__(self) -> None:
        super().__init__()
        self.trie = PrefixTrie(BLOCK)
        self.ledger = KvLedger(10_000, block_tokens=BLOCK)
        self.chains: dict[ProgramId, list[int]] = {}
        self.held: dict[ProgramId, list[int]] = {}

    @rule(program_id=PROGRAMS, token_ids=TOKENS)
    def add(self, program_id: ProgramId, token_ids: list[int]) -> None:
        self.trie.add(program_id, block_hashes(token_ids, BLOCK))
        self.chains[program_id] = token_ids

    @rule(program_id=PROGRAMS)
    def remove(self, program_id: ProgramId) -> None:
        self.trie.remove(program_id)
        self.chains.pop(program_id, None)
        assert self.trie.segments(program_id) == ()

    @rule(program_id=PROGRAMS, expects_more=st.booleans())
    def report(self, program_id: ProgramId, expects_more: bool) -> None:
        if program_id in self.chains:
            self.held[program_id] = token_ids = self.chains[program_id]
            shared = self.trie.segments(program_id, expects_more=expects_more)
            private = len(token_ids) - sum(segment.tokens for segment in shared)
            assert self.ledger.reserve(program_id, Footprint(private, shared))

    @rule(program_id=PROGRAMS)
    def release(self, program_id: ProgramId) -> None:
        self.ledger.release(program_id)
        self.held.pop(program_id, None)

    @rule()
    def everybody_reports_anew(self) -> None:
        for program_id in self.held.keys() - self.chains.keys():
            self.release(program_id)
        for program_id in self.held:
            self.report(program_id, expects_more=False)
        assert self.counted() == self.really_held()

    @invariant()
    def never_less_is_counted_than_is_held(self) -> None:
        assert self.counted() >= self.really_held()
        assert self.held or self.counted() == 0

    @invariant()
    def what_is_common_is_what_two_chains_begin_with(self) -> None:
        for program_id, token_ids in self.chains.items():
            others = (blocks_of(ids) for id_, ids in self.chains.items() if id_ != program_id)
            common = blocks_of(token_ids) & set[Block]().union(*others)
            found = sum(segment.tokens for segment in self.trie.segments(program_id))
            assert found == len(common) * BLOCK

    def counted(self) -> int:
        return self.ledger.statistics().reserved_tokens

    def really_held(self) -> int:
        return len(set[Block]().union(*map(blocks_of, self.held.values()))) * BLOCK


TestHolders = HoldersMachine.TestCase


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), max_size=40), st.integers(1, 5))
def test_equal_hashes_are_equal_prefixes(one: list[int], other: list[int], block: int):
    first, second = block_hashes(one, block), block_hashes(other, block)
    assert (len(first), len(second)) == (len(one) // block, len(other) // block)
    for n, (left, right) in enumerate(zip(first, second, strict=False), start=1):
        assert (left == right) == (one[: n * block] == other[: n * block])


def test_hashes_are_the_same_in_every_process():
    assert block_hashes([1, 2, 3, 4, 5], 2) == [0xE607E0446B1DE62B, 0x9DFEFA18F3387AC8]


def trie(**chains: str) -> PrefixTrie:
    """One token a block; a letter is a token."""
    made = PrefixTrie(1)
    for name, letters in chains.items():
        made.add(ProgramId(name), block_hashes([ord(letter) for letter in letters], 1))
    return made


def sizes(segments: tuple[Segment, ...]) -> list[int]:
    return [segment.tokens for segment in segments]


def test_a_prefix_that_nobody_shares_is_private():
    alone = trie(a="system", b="other")
    assert alone.segments(A) == alone.segments(B) == ()


def test_segments_come_outermost_first():
    found = trie(a="system task one", b="system task two", c="system other")
    assert sizes(found.segments(A)) == sizes(found.segments(B)) == [7, 5]
    assert found.segments(A) == found.segments(B)
    assert found.segments(C) == found.segments(A)[:1]


def test_one_chain_may_end_within_another():
    found = trie(a="system task", b="system")
    assert sizes(found.segments(A)) == sizes(found.segments(B)) == [6]


def test_a_node_that_is_split_gives_its_halves_names_of_their_own():
    found = trie(a="system task", b="system task")
    (whole,) = found.segments(A)
    found.add(C, block_hashes(list(b"system other"), 1))
    halves = found.segments(A)
    assert sizes(halves) == [7, 4]
    assert whole.key not in {segment.key for segment in halves}


def test_who_is_removed_leaves_the_names_of_the_others_as_they_are():
    found = trie(a="system task", b="system task", c="system other")
    before = found.segments(A)
    found.remove(C)
    found.remove(C)
    assert found.segments(A) == before
    found.remove(B)
    assert found.segments(A) == ()


def test_who_expects_more_of_its_kind_names_its_chain_as_they_will():
    found = trie(a="prompt")
    expected = found.segments(A, expects_more=True)
    found.add(B, block_hashes(list(b"prompt"), 1))
    assert expected == found.segments(B) == found.segments(A)


@pytest.mark.parametrize("chain", ["", "prompt"])
def test_a_trie_that_everybody_left_is_empty(chain: str):
    found = trie(a=chain, b="prompts")
    found.remove(A)
    found.remove(B)
    assert repr(found) == "<PrefixTrie 0 programs, 0 beginnings>"
