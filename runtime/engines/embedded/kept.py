"""KV between turns: what programs hold in the pool or have in the tier below it, and what is left over.

- A program's held KV is a path of the trie.  On its way down it stays in the pool until the copy is made;
  on its way up its room in the pool is taken from the beginning.
- What no program holds any more stays as long as nobody needs the room.
- A copy that ends when its program was released, or has newer KV, is thrown away.
"""

from collections.abc import Collection
from functools import partial

import numpy as np

from sostenuto.runtime.engines.embedded.copier import Copier
from sostenuto.runtime.engines.embedded.lanes import KvShape
from sostenuto.runtime.engines.embedded.lower import LowerTier, Parked
from sostenuto.runtime.engines.embedded.trie import Node, Prefix, Segment, Trie
from sostenuto.runtime.engines.embedded.turn import Ids, common_prefix
from sostenuto.types import Version


class Kept:
    """Counted in tokens.  The engine thread alone uses it."""

    def __init__(self, shape: KvShape, lower: LowerTier | None) -> None:
        self._shape = shape
        self.lower = lower
        self._copier = Copier(shape.device)
        self._trie = Trie()
        self._held: dict[str, Node] = {}
        """By program, least recently used first."""
        self._arriving_tokens = 0

    def __repr__(self) -> str:
        return f"<Kept programs={len(self._held)} {self._trie!r} {self.lower!r}>"

    @property
    def programs(self) -> Collection[str]:
        """Who holds KV in the pool, least recently used first."""
        return self._held.keys()

    @property
    def held_tokens(self) -> int:
        """Of the pool; with what is on its way between the tiers."""
        return self._trie.held_tokens + self._trie.leaving_tokens + self._arriving_tokens

    @property
    def leaving_tokens(self) -> int:
        """Of the pool; free as soon as the copies under way are made."""
        return self._trie.leaving_tokens

    @property
    def arriving_tokens(self) -> int:
        return self._arriving_tokens

    @property
    def idle_tokens(self) -> int:
        """Of the pool, held by nobody."""
        return self._trie.idle_tokens

    @property
    def is_copying(self) -> bool:
        return len(self._copier) > 0

    def settle(self, *, wait: bool = False) -> None:
        """Follow up on the copies that have ended; with `wait`, on one at least, if there is one."""
        self._copier.settle(wait=wait)

    # ---- what is there ----

    def match(self, salt: str, tokens: Ids) -> Prefix:
        """The longest prefix of `tokens` in the pool."""
        return self._trie.match(salt, tokens)

    def parked(self, program: str, salt: str, tokens: Ids) -> tuple[Parked | None, int]:
        """What the lower tier has of a program, and how many leading `tokens` that is."""
        entry = self.lower.entries.get(program) if self.lower else None
        if entry is None or entry.salt != salt:
            return None, 0
        return entry, common_prefix(entry.tokens, tokens)

    def sole_tokens(self, program: str) -> int:
        """What the pool would have free without this program."""
        node = self._held.get(program)
        return 0 if node is None else self._trie.sole_tokens(node)

    def shares(self, program: str, prefix: Prefix) -> bool:
        """Whether the program holds all of this prefix."""
        return bool(prefix.nodes) and prefix.nodes[-1] in self._held[program].path()

    # ---- what happens to it ----

    def insert(self, salt: str, tokens: Ids, kv: Segment, oldest: Version) -> Node:
        """Keep a copy of computed KV, as long as nobody needs the room."""
        return self._trie.insert(salt, tokens, kv, oldest)

    def hold(self, program: str, node: Node) -> None:
        """The program holds the path to `node`, in place of what it had."""
        self._trie.hold(node)
        self.release(program)
        self._held[program] = node

    def take(self, program: str, prefix: Prefix) -> None:
        """A request of the program runs, and has `prefix` in its row."""
        node = self._held.get(program)
        self.release(program)
        if prefix.nodes:
            self._trie.use(prefix.nodes[-1])
        if node is not None:
            self._trie.spare(node)

    def release(self, program: str) -> None:
        """The program holds nothing any more, in neither tier.  Idempotent."""
        node = self._held.pop(program, None)
        if node is not None:
            self._trie.release(node)
        if self.lower is not None:
            self.lower.drop(program)

    def free(self, tokens: int) -> None:
        """Give up what nobody holds, of at least so many tokens if there are."""
        self._trie.free(tokens)

    def clear(self) -> int:
        """Forget everything; returns how many programs held something."""
        count = len(self._held) + (self.lower.clear() if self.lower else 0)
        self._held.clear()
        # Copies that are under way end in the old one.
        self._trie = Trie()
        return count

    def forget_older(self, version: Version) -> list[str]:
        """Forget what an older version has computed, and what is built on it; programs that held some."""
        while self.is_copying:
            # What is under way would come back to a place that is gone.
            self.settle(wait=True)
        dropped = [name for name, node in self._held.items() if node.oldest_before < version]
        for name in dropped:
            self.release(name)
        if self.lower is not None:
            dropped += self.lower.forget_older(version)
        self._trie.forget_older(version)
        return dropped

    # ---- between the tiers ----

    def evict(self, program: str) -> None:
        """Let go of held KV: to the lower tier if that has room, and else until somebody needs the room."""
        if not self.offload(program):
            self.release(program)

    def offload(self, program: str) -> bool:
        """Begin to move held KV to the lower tier; False when there is none, or no room for it."""
        node = self._held.get(program)
        if node is None or self.lower is None:
            return False
        path = node.path()
        prefix = Prefix(tuple(path), node.depth)
        entry = self.lower.reserve(program, node.salt, _tokens(path), prefix.oldest)
        if entry is None:
            return False
        self._trie.begin_copy(node)
        self._trie.release(self._held.pop(program))
        write = partial(self.lower.write, entry, prefix.segments())
        self._copier.start(write, partial(self._left, self._trie, node, entry))
        return True

    def _left(self, trie: Trie, node: Node, entry: Parked) -> None:
        assert self.lower is not None
        trie.end_copy(node)
        if self.lower.landed(entry):
            trie.spare(node)

    def restore(self, entry: Parked) -> None:
        """Begin to bring KV back; the caller has seen to it that there is room."""
        assert self.lower is not None
        if entry.is_copying:
            return
        entry.is_copying = True
        kv = self._shape.empty(len(entry.tokens))
        self._arriving_tokens += len(entry.tokens)
        self._copier.start(partial(self.lower.read, entry, kv), partial(self._arrived, entry, kv))

    def _arrived(self, entry: Parked, kv: Segment) -> None:
        assert self.lower is not None
        self._arriving_tokens -= len(entry.tokens)
        if self.lower.landed(entry):
            node = self._trie.insert(entry.salt, entry.tokens, kv, entry.oldest, adopt=True)
            self.hold(entry.program, node)


def _tokens(path: list[Node]) -> Ids:
    return np.concatenate([node.tokens for node in path])
