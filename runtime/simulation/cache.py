"""The KV cache of a simulated engine: paged in blocks, shared by prefix, least recently used out first.

A context is a chain: shared segments, outermost first, then what is private to the program.  Every part
takes whole blocks.  What no request runs on stays until its room is needed and is trimmed from its end;
a part is never older than what hangs on it, so it outlives it.

Invariant: used plus free is the pool, and neither is ever negative.
"""

from collections import OrderedDict
from collections.abc import Sequence

from sostenuto.runtime.simulation.host_tier import CacheNode, HostTier
from sostenuto.scheduler.kv import Segment
from sostenuto.types import ProgramId

Chain = list[CacheNode]
"""Outermost first; the last is private."""


class KvCache:
    def __init__(self, pool_tokens: int, block_tokens: int, *, host_tokens: int = 0) -> None:
        self._block = block_tokens
        self.pool_tokens = pool_tokens // block_tokens * block_tokens
        self.used_tokens = 0
        """By requests that run and by what is cached."""
        self.idle_tokens = 0
        """Of those: cached, and nobody runs on them."""
        self.evicted_tokens = 0
        self.host = HostTier(host_tokens)
        self._shared: dict[str, CacheNode] = {}
        self._private: dict[str, CacheNode] = {}
        self._idle: OrderedDict[CacheNode, None] = OrderedDict()
        self._demoted: OrderedDict[CacheNode, None] = OrderedDict()
        """Idle as well, and trimmed before the others."""

    def __repr__(self) -> str:
        return f"<KvCache used={self.used_tokens} idle={self.idle_tokens} of {self.pool_tokens}>"

    @property
    def free_tokens(self) -> int:
        return self.pool_tokens - self.used_tokens

    @property
    def active_tokens(self) -> int:
        """Held by requests that run."""
        return self.used_tokens - self.idle_tokens

    def could_ever_hold(self, sizes: Sequence[int]) -> bool:
        """Whether the empty pool has room for a context of parts of these sizes."""
        tokens = sum(sizes)
        if tokens + len(sizes) * self._block <= self.pool_tokens:
            return True
        return sum(self._rounded(size) for size in sizes) <= self.pool_tokens

    def take(self, program_id: ProgramId, shared: Sequence[Segment], private_tokens: int) -> Chain | None:
        """Allocate a context with its output; None, and nothing changes, when it does not fit."""
        chain = [self._shared.get(s.key) or CacheNode(s.key, self._shared) for s in shared]
        chain.append(self._private.get(program_id) or CacheNode(program_id, self._private))
        block = self._block
        sizes = [-(-s.tokens // block) * block for s in shared]
        sizes.append(-(-private_tokens // block) * block)
        needed = own_idle = 0
        for node, size in zip(chain, sizes, strict=True):
            if size > node.allocated:
                needed += size - node.allocated
            if not node.users:
                own_idle += node.allocated
        free = self.pool_tokens - self.used_tokens
        if needed > free + self.idle_tokens - own_idle:
            return None
        self._use(chain)
        if needed > free:
            self._trim(needed - free)
        for node, size in zip(chain, sizes, strict=True):
            node.allocated = max(node.allocated, size)
        self.used_tokens += needed
        return chain

    def _use(self, chain: Chain) -> None:
        for node in chain:
            if not node.users:
                self._no_longer_idle(node)
                self.idle_tokens -= node.allocated
                node.home[node.key] = node
            node.users += 1

    def hit(self, chain: Chain, sizes: Sequence[int]) -> tuple[int, int]:
        """(tokens on the device, tokens in the lower tier) from the beginning of the context on, in blocks.

        One token at least is left to prefill.
        """
        device = host = 0
        for node, size in zip(chain, sizes, strict=True):
            if node.tokens >= size:
                device += size
                continue
            below = min(node.host, size - node.tokens)
            device += node.tokens
            host += below
            if node.tokens + below < size:
                break
        usable = min(device + host, sum(sizes) - 1) // self._block * self._block
        return (usable, 0) if device >= usable else (device, usable - device)

    def fill(self, chain: Chain, sizes: Sequence[int], computed: int) -> None:
        """The first `computed` tokens of the context are on the device now."""
        for node, size in zip(chain, sizes, strict=True):
            here = min(computed, size)
            if here > node.tokens:
                self.host.drop(node)
                node.tokens = here
            computed -= size
            if computed <= 0:
                return

    def give_back(self, chain: Chain, private_tokens: int) -> None:
        """A request is over: the first `private_tokens` stay cached, room for more output is freed."""
        own = chain[-1]
        if private_tokens > own.tokens:
            self.host.drop(own)
            own.tokens = private_tokens
        self._shrink(own)
        for node in reversed(chain):
            node.users -= 1
            if not node.users:
                self._idle[node] = None
                self.idle_tokens += node.allocated

    def _shrink(self, node: CacheNode) -> None:
        size = self._rounded(node.tokens)
        if node.users == 1 and size < node.allocated:
            self.used_tokens -= node.allocated - size
            node.allocated = size

    def demote(self, program_id: ProgramId) -> None:
        """What is private to the program is trimmed before what nobody has demoted, the oldest first."""
        node = self._private.get(program_id)
        if node is not None and node in self._idle:
            del self._idle[node]
            self._demoted[node] = None

    def free(self, program_id: ProgramId) -> None:
        """What is private to the program is dropped, unless it runs."""
        node = self._private.get(program_id)
        if node is not None and not node.users:
            self.host.drop(node)
            self._cut(node, node.allocated, keep=False)

    def offload(self, program_id: ProgramId) -> None:
        """What is private to the program goes to the lower tier, unless it runs."""
        node = self._private.get(program_id)
        if node is not None and (node in self._idle or node in self._demoted):
            self._cut(node, node.allocated, keep=True)

    def invalidate(self) -> None:
        """Nothing that was computed until now is worth anything; requests that run keep their room."""
        for node in [*self._shared.values(), *self._private.values()]:
            self.host.drop(node)
            if node.users:
                node.tokens = 0
            else:
                self._cut(node, node.allocated, keep=False)

    def _trim(self, short: int) -> None:
        """Free `short` tokens, from the ends of what was used least recently."""
        short = self._rounded(short)
        while short > 0:
            node = next(iter(self._demoted or self._idle))
            take = min(node.allocated, short)
            self._cut(node, take, keep=True)
            short -= take

    def _cut(self, node: CacheNode, take: int, *, keep: bool) -> None:
        """Free the last `take` tokens of an idle node; `keep`: the lower tier may have them."""
        node.allocated -= take
        self.used_tokens -= take
        self.idle_tokens -= take
        lost = max(0, node.tokens - node.allocated)
        node.tokens -= lost
        self.evicted_tokens += lost
        if not node.allocated:
            self._no_longer_idle(node)
        gone = self.host.put(node, lost) if keep else []
        for other in (*gone, node):
            self._forget(other)

    def _no_longer_idle(self, node: CacheNode) -> None:
        self._idle.pop(node, None)
        self._demoted.pop(node, None)

    def _forget(self, node: CacheNode) -> None:
        if not (node.allocated or node.host or node.users):
            node.home.pop(node.key, None)

    def _rounded(self, tokens: int) -> int:
        return -(-tokens // self._block) * self._block
