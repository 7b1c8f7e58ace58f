"""The simulated KV cache: nothing is counted twice or lost, and what was used least recently goes first."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sostenuto.runtime.simulation.cache import Chain, KvCache
from sostenuto.scheduler.kv import Segment
from sostenuto.types import ProgramId

BLOCK = 10
SYSTEM = Segment("system", 35)
NAMES = st.sampled_from([ProgramId(f"p{n}") for n in range(4)])


def sizes_of(shared: tuple[Segment, ...], private: int) -> list[int]:
    return [*(segment.tokens for segment in shared), private]


class CacheMachine(RuleBasedStateMachine):
    """Requests of a few programs that come, compute and go, in a pool that is too small for all."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = KvCache(300, BLOCK, host_tokens=120)
        self.running: dict[ProgramId, tuple[Chain, list[int]]] = {}

    @rule(name=NAMES, private=st.integers(1, 150), output=st.integers(1, 50), group=st.integers(0, 2))
    def begin(self, name: ProgramId, private: int, output: int, group: int) -> None:
        if name in self.running:
            return
        shared = (SYSTEM, Segment(f"g{group}", 20 * group))[: 1 + bool(group)]
        before = (self.cache.used_tokens, self.cache.idle_tokens)
        chain = self.cache.take(name, shared, private + output)
        if chain is None:
            assert (self.cache.used_tokens, self.cache.idle_tokens) == before
            return
        sizes = sizes_of(shared, private)
        device, host = self.cache.hit(chain, sizes)
        assert 0 <= device + host < sum(sizes)
        self.cache.fill(chain, sizes, sum(sizes))
        assert self.cache.hit(chain, sizes) == ((sum(sizes) - 1) // BLOCK * BLOCK, 0)
        self.running[name] = (chain, sizes)

    @rule(name=NAMES, generated=st.integers(0, 50))
    def end(self, name: ProgramId, generated: int) -> None:
        if name in self.running:
            chain, sizes = self.running.pop(name)
            room = chain[-1].allocated - sizes[-1]
            self.cache.give_back(chain, sizes[-1] + min(generated, room))

    @rule(name=NAMES, how=st.sampled_from(["demote", "free", "offload"]))
    def between_turns(self, name: ProgramId, how: str) -> None:
        getattr(self.cache, how)(name)

    @precondition(lambda self: not self.running)
    @rule()
    def new_weights(self) -> None:
        self.cache.invalidate()
        assert self.cache.used_tokens == 0

    @invariant()
    def used_and_free_are_the_pool(self) -> None:
        cache = self.cache
        assert cache.used_tokens + cache.free_tokens == cache.pool_tokens
        assert 0 <= cache.idle_tokens <= cache.used_tokens <= cache.pool_tokens
        assert cache.used_tokens % BLOCK == 0

    @invariant()
    def what_runs_has_its_room(self) -> None:
        rooms = {id(node): node.allocated for chain, _ in self.running.values() for node in chain}
        assert self.cache.active_tokens == sum(rooms.values())

    @invariant()
    def the_lower_tier_is_never_over_full(self) -> None:
        assert 0 <= self.cache.host.used_tokens <= 120


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)


def served(cache: KvCache, name: str, private: int, shared: tuple[Segment, ...] = ()) -> int:
    """Serve one context and say how much of it was cached."""
    chain = cache.take(ProgramId(name), shared, private)
    assert chain is not None
    sizes = sizes_of(shared, private)
    hit, _ = cache.hit(chain, sizes)
    cache.fill(chain, sizes, sum(sizes))
    cache.give_back(chain, private)
    return hit


def test_a_context_is_found_again_in_whole_blocks_and_one_token_is_left():
    cache = KvCache(1_000, BLOCK)
    assert served(cache, "a", 100) == 0
    assert served(cache, "a", 100) == 90
    assert served(cache, "a", 145) == 100


def test_a_shared_prefix_takes_its_room_once():
    cache = KvCache(1_000, BLOCK)
    shared = (Segment("system", 200),)
    assert served(cache, "a", 50, shared) == 0
    assert served(cache, "b", 50, shared) == 200
    assert cache.used_tokens == 300


def test_what_was_used_least_recently_is_trimmed_from_its_end():
    cache = KvCache(300, BLOCK)
    served(cache, "old", 100)
    served(cache, "young", 100)
    served(cache, "new", 160)
    assert cache.evicted_tokens == 60
    assert served(cache, "young", 100) == 90
    assert served(cache, "old", 100) == 40


def test_a_trimmed_context_is_found_up_to_where_it_was_trimmed():
    cache = KvCache(300, BLOCK)
    served(cache, "a", 200)
    served(cache, "b", 150)
    assert served(cache, "a", 200) == 150


def test_a_prefix_outlives_what_hangs_on_it():
    cache = KvCache(300, BLOCK)
    shared = (Segment("system", 100),)
    served(cache, "a", 100, shared)
    served(cache, "b", 200)
    chain = cache.take(ProgramId("a"), shared, 100)
    assert chain is not None
    assert cache.hit(chain, [100, 100]) == (100, 0)


def test_what_a_request_runs_on_is_never_trimmed():
    cache = KvCache(300, BLOCK)
    assert cache.take(ProgramId("a"), (), 200) is not None
    assert cache.take(ProgramId("b"), (), 110) is None
    assert cache.take(ProgramId("b"), (), 100) is not None


def test_what_is_demoted_goes_before_what_is_older():
    cache = KvCache(300, BLOCK)
    served(cache, "old", 100)
    served(cache, "young", 100)
    cache.demote(ProgramId("young"))
    served(cache, "new", 200)
    assert served(cache, "old", 100) == 90


def test_what_is_freed_is_room_at_once():
    cache = KvCache(300, BLOCK)
    served(cache, "a", 100, (Segment("system", 50),))
    cache.free(ProgramId("a"))
    assert cache.used_tokens == 50


def test_the_lower_tier_gives_back_what_was_trimmed():
    cache = KvCache(300, BLOCK, host_tokens=100)
    served(cache, "a", 200)
    served(cache, "b", 150)
    chain = cache.take(ProgramId("a"), (), 200)
    assert chain is not None
    assert cache.hit(chain, [200]) == (150, 40)


def test_the_lower_tier_drops_what_came_first():
    cache = KvCache(300, BLOCK, host_tokens=100)
    for name in "ab":
        served(cache, name, 80)
        cache.offload(ProgramId(name))
    assert cache.used_tokens == 0
    assert cache.host.used_tokens == 100
    chain = cache.take(ProgramId("a"), (), 80)
    assert chain is not None
    assert cache.hit(chain, [80]) == (0, 20)
