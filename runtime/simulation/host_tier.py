"""The lower tier of an engine's KV cache: what was trimmed from the device, least recently used last out."""

from collections import OrderedDict


class CacheNode:
    """The KV of one stretch of context: a shared segment, or all that is private to one program.

    The device holds its first `tokens`, the lower tier the `host` tokens after them.
    """

    __slots__ = ("allocated", "home", "host", "key", "tokens", "users")

    def __init__(self, key: str, home: "dict[str, CacheNode]") -> None:
        self.key = key
        self.home = home
        """Where it is found while there is anything of it."""
        self.tokens = 0
        self.allocated = 0
        """Of the pool: whole blocks, the output to come included."""
        self.users = 0
        """Requests that run on it."""
        self.host = 0


class HostTier:
    """Tokens in it never exceed its capacity; the end of a stretch goes before its beginning."""

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity = capacity_tokens
        self._order: OrderedDict[CacheNode, None] = OrderedDict()
        self.used_tokens = 0

    def put(self, node: CacheNode, tokens: int) -> list[CacheNode]:
        """Take in `tokens` that left the end of `node`'s device part; returns what was pushed out whole."""
        if not self._capacity or not tokens:
            return []
        node.host += tokens
        self.used_tokens += tokens
        self._order[node] = None
        self._order.move_to_end(node)
        return self._shrink()

    def drop(self, node: CacheNode) -> None:
        if node.host:
            self.used_tokens -= node.host
            node.host = 0
            del self._order[node]

    def _shrink(self) -> list[CacheNode]:
        gone: list[CacheNode] = []
        while (excess := self.used_tokens - self._capacity) > 0:
            oldest = next(iter(self._order))
            if oldest.host <= excess:
                self.drop(oldest)
                gone.append(oldest)
            else:
                oldest.host -= excess
                self.used_tokens -= excess
        return gone
