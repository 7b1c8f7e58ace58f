"""What the contexts of programs have in common, found from their tokens.

A context is a chain of blocks, each named by the hash of all tokens up to its end.  Chains that begin alike
lie on the same nodes of a radix tree, which counts how many run through each.

Invariants:
- A segment's key names exactly one stretch of blocks: where it begins, and the hash at its end, which
  stands for all before it.  No other stretch ever has that key.
- So a ledger whose holders reported at different times counts every block that one of them holds at least
  once.  A node that is split, or that gets company, makes it count a block twice, until those who reported
  before do so again; then it counts every block once.
- Nodes are never joined again, for the same reason: it would give new names to what has not changed.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from sostenuto.scheduler.kv import Segment
from sostenuto.types import ProgramId

_HASH_BYTES = 8


def block_hashes(token_ids: Sequence[int], block_tokens: int) -> list[int]:
    """A stable hash for every whole block, of all tokens up to its end; an incomplete last block has none."""
    packed = memoryview(struct.pack(f"<{len(token_ids)}i", *token_ids))
    size = block_tokens * 4
    so_far = hashlib.blake2b(digest_size=_HASH_BYTES)
    hashes: list[int] = []
    for end in range(size, len(packed) + 1, size):
        so_far.update(packed[end - size : end])
        hashes.append(int.from_bytes(so_far.digest(), "little"))
    return hashes


@dataclass(slots=True, eq=False)
class _Node:
    """A stretch of blocks through which the same chains run."""

    start: int
    """How many blocks come before it."""
    blocks: Sequence[int]
    parent: "_Node | None" = None
    children: "dict[int, _Node]" = field(default_factory=dict[int, "_Node"])
    """By their first block."""
    programs: int = 0
    """Whose chains run through it or end with it: never fewer than of any child."""

    def segment(self, block_tokens: int) -> Segment:
        return Segment(f"{self.start}:{self.blocks[-1]:x}", len(self.blocks) * block_tokens)


class PrefixTrie:
    """Chains of programs.  To add one costs its length at most; to ask or to remove, its nodes."""

    def __init__(self, block_tokens: int) -> None:
        self._block = block_tokens
        self._root = _Node(0, ())
        self._ends: dict[ProgramId, _Node] = {}

    def __repr__(self) -> str:
        return f"<PrefixTrie {len(self)} programs, {len(self._root.children)} beginnings>"

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def block_tokens(self) -> int:
        return self._block

    def add(self, program_id: ProgramId, blocks: Sequence[int]) -> None:
        """The program's context begins with these blocks; a chain that it had before is forgotten."""
        self.remove(program_id)
        node = self._root
        node.programs += 1
        at = 0
        while at < len(blocks):
            node = self._step(node, blocks, at)
            node.programs += 1
            at += len(node.blocks)
        self._ends[program_id] = node

    def segments(self, program_id: ProgramId, *, expects_more: bool = False) -> tuple[Segment, ...]:
        """The stretches that it has in common with others at this moment, outermost first.

        `expects_more`: others with the same chain are still to come, so that all of it counts as common.
        """
        common: list[Segment] = []
        node = self._ends.get(program_id)
        while node is not None and node.parent is not None:
            if expects_more or node.programs > 1:
                common.append(node.segment(self._block))
            node = node.parent
        return tuple(reversed(common))

    def remove(self, program_id: ProgramId) -> None:
        """Safe to call twice, and for a program that was never added."""
        node = self._ends.pop(program_id, None)
        while node is not None:
            node.programs -= 1
            if node.parent is not None and not node.programs:
                del node.parent.children[node.blocks[0]]
            node = node.parent

    def _step(self, node: _Node, blocks: Sequence[int], at: int) -> _Node:
        """The child that `blocks` go through from `at` on, all of it."""
        child = node.children.get(blocks[at])
        if child is None:
            return _hang(node, _Node(at, blocks[at:]))
        pairs = zip(child.blocks, blocks[at : at + len(child.blocks)], strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return child if common == len(child.blocks) else _split(node, child, common)


def _hang(parent: _Node, node: _Node) -> _Node:
    node.parent = parent
    parent.children[node.blocks[0]] = node
    return node


def _split(parent: _Node, node: _Node, common: int) -> _Node:
    """A new node for the first `common` blocks; `node` keeps the rest, and the programs that end with it."""
    upper = _hang(parent, _Node(node.start, node.blocks[:common], programs=node.programs))
    node.start, node.blocks = node.start + common, node.blocks[common:]
    _hang(upper, node)
    return upper
