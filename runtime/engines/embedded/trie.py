"""KV of contexts that nobody computes at the moment, each common prefix of them once.

A radix trie for each salt: an edge is a run of tokens with its KV in tensors of exact size.  Running
requests copy what they match into a row of their own, for attention wants rows without gaps (`lanes`).

- A node is held while a program holds it or a node below it, leaving while a copy of it is on its way to
  the lower tier, and idle otherwise.  What is below an idle node is idle.
- Idle nodes go when room is needed: first what is also in the row of a request or in the lower tier, then
  what was used least recently; a node never before those below it.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

import torch

from sostenuto.runtime.engines.embedded.turn import Ids, common_prefix
from sostenuto.types import Version

Segment = tuple[torch.Tensor, torch.Tensor]
"""Keys and values (layers, K, tokens, D) of consecutive tokens."""


@dataclass(slots=True, eq=False)
class Node:
    """An edge, from where its parent ends.  `Trie` alone changes it."""

    salt: str
    tokens: Ids
    kv: Segment
    oldest: Version
    """The oldest version that computed KV of it or before it."""
    parent: "Node | None"
    children: "dict[int, Node]" = field(default_factory=dict[int, "Node"])
    """By their first token."""
    holders: int = 0
    copies: int = 0
    """On their way to the lower tier."""

    def path(self) -> "list[Node]":
        """From the root to here."""
        path: list[Node] = []
        node: Node | None = self
        while node is not None:
            path.append(node)
            node = node.parent
        return path[::-1]

    @property
    def oldest_before(self) -> Version:
        """The oldest version that computed KV from the root to its end."""
        return min(node.oldest for node in self.path())

    @property
    def depth(self) -> int:
        """Tokens from the root to its end."""
        return sum(len(node.tokens) for node in self.path())


@dataclass(frozen=True, slots=True)
class Prefix:
    """The longest known prefix of a context."""

    nodes: tuple[Node, ...] = ()
    tokens: int = 0

    @property
    def oldest(self) -> Version:
        return min(node.oldest for node in self.nodes)

    def segments(self) -> list[Segment]:
        """Views of its KV, in order."""
        left, segments = self.tokens, list[Segment]()
        for node in self.nodes:
            keys, values = node.kv
            segments.append((keys[:, :, :left], values[:, :, :left]))
            left -= segments[-1][0].shape[2]
        return segments


class Trie:
    """Counted in tokens: `held`, `leaving` and `idle` together are what lies here."""

    def __init__(self) -> None:
        self._roots: dict[str, dict[int, Node]] = {}
        self._idle: OrderedDict[Node, None] = OrderedDict()
        """What goes first is first; a node comes after those below it."""
        self.held_tokens = 0
        self.leaving_tokens = 0
        self.idle_tokens = 0

    def __repr__(self) -> str:
        return f"<Trie held={self.held_tokens} leaving={self.leaving_tokens} idle={self.idle_tokens}>"

    def match(self, salt: str, tokens: Ids) -> Prefix:
        """The longest prefix of `tokens` under `salt`."""
        nodes: list[Node] = []
        matched, below = 0, self._roots.get(salt, {})
        while matched < len(tokens) and (node := below.get(int(tokens[matched]))) is not None:
            count = common_prefix(node.tokens, tokens[matched:])
            nodes.append(node)
            matched += count
            if count < len(node.tokens):
                break
            below = node.children
        return Prefix(tuple(nodes), matched)

    def insert(self, salt: str, tokens: Ids, kv: Segment, oldest: Version, *, adopt: bool = False) -> Node:
        """The node that ends with `tokens`, idle if it is new.  What is not known yet is copied from `kv`.

        `adopt`: `kv` is of these tokens, and nobody else's.
        """
        known = self.match(salt, tokens)
        last = known.nodes[-1] if known.nodes else None
        if last is not None and known.tokens < last.depth:
            last = self._split(last, known.tokens - (last.depth - len(last.tokens)))
        if known.tokens < len(tokens):
            if not (adopt and known.tokens == 0):
                keys, values = (part[:, :, known.tokens : len(tokens)].clone() for part in kv)
                kv = (keys, values)
            last = Node(salt, tokens[known.tokens :].copy(), kv, oldest, last)
            self._siblings(last)[int(last.tokens[0])] = last
            self._count(last, 1)
        assert last is not None, "a context has tokens"
        self.use(last)
        return last

    def use(self, node: Node) -> None:
        """It was used just now, with what is before it."""
        for each in reversed(node.path()):
            if each in self._idle:
                self._idle.move_to_end(each)

    def hold(self, node: Node) -> None:
        """One more program holds the prefix that ends here."""
        for each in node.path():
            self._count(each, -1)
            each.holders += 1
            self._count(each, 1)

    def release(self, node: Node) -> None:
        """Undo one `hold`."""
        for each in reversed(node.path()):
            self._count(each, -1)
            each.holders -= 1
            self._count(each, 1)

    def begin_copy(self, node: Node) -> None:
        """The prefix that ends here stays until `end_copy`."""
        for each in node.path():
            self._count(each, -1)
            each.copies += 1
            self._count(each, 1)

    def end_copy(self, node: Node) -> None:
        """Undo one `begin_copy`."""
        for each in reversed(node.path()):
            self._count(each, -1)
            each.copies -= 1
            self._count(each, 1)

    def spare(self, node: Node) -> None:
        """Who used this prefix has it elsewhere: what is idle and nobody else's goes before all else."""
        alone: list[Node] = []
        for each in reversed(node.path()):
            if each not in self._idle or len(each.children) > len(alone[-1:]):
                break
            alone.append(each)
        for each in reversed(alone):
            self._idle.move_to_end(each, last=False)

    def free(self, tokens: int) -> None:
        """Give up idle KV of at least `tokens`, or all that there is."""
        wanted = self.idle_tokens - tokens
        while self._idle and self.idle_tokens > wanted:
            self._remove(next(iter(self._idle)))

    def forget_older(self, version: Version) -> None:
        """Give up what an older version has computed, and what is below it.  Nobody holds any of that."""
        for node in list(self._idle):
            if node.oldest_before < version:
                self._remove(node)

    def sole_tokens(self, node: Node) -> int:
        """What would not be held any more without one of the programs that hold this node."""
        return sum(len(each.tokens) for each in node.path() if each.holders == 1 and not each.copies)

    def _split(self, node: Node, at: int) -> Node:
        """Cut an edge after `at` tokens; `node` is its end from now on.  Returns the beginning."""
        keys, values = node.kv
        head = Node(
            node.salt, node.tokens[:at].copy(), (keys[:, :, :at].clone(), values[:, :, :at].clone()),
            node.oldest, node.parent, holders=node.holders, copies=node.copies,
        )  # fmt: skip
        self._count(node, -1)
        self._siblings(node)[int(head.tokens[0])] = head
        node.parent, node.tokens = head, node.tokens[at:].copy()
        node.kv = (keys[:, :, at:].clone(), values[:, :, at:].clone())
        head.children[int(node.tokens[0])] = node
        self._count(node, 1)
        self._count(head, 1)
        return head

    def _remove(self, node: Node) -> None:
        assert not node.children
        self._count(node, -1)
        siblings = self._siblings(node)
        del siblings[int(node.tokens[0])]
        if not siblings and node.parent is None:
            del self._roots[node.salt]

    def _siblings(self, node: Node) -> dict[int, Node]:
        return self._roots.setdefault(node.salt, {}) if node.parent is None else node.parent.children

    def _count(self, node: Node, sign: int) -> None:
        """Take a node into the account, or out of it before it changes."""
        tokens = sign * len(node.tokens)
        if node.holders:
            self.held_tokens += tokens
        elif node.copies:
            self.leaving_tokens += tokens
        else:
            self.idle_tokens += tokens
            if sign > 0:
                self._idle[node] = None
            else:
                del self._idle[node]
