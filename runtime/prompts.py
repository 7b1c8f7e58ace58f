"""What the prompts of a fleet's programs have in common, where its engines hold that once.

Only first prompts are compared: what a program adds to its own is its own.
"""

import math
from collections.abc import Sequence

from sostenuto.runtime.engines.wire import Capabilities
from sostenuto.scheduler.kv import Footprint
from sostenuto.scheduler.prefixes import PrefixTrie, block_hashes
from sostenuto.types import EngineId, ProgramId


class Prompts:
    """Owned by the dispatcher.  Nothing is in common while one engine of the fleet does not share.

    An engine that was lost counts as it was: it may be back.
    """

    def __init__(self) -> None:
        self._blocks: dict[EngineId, int | None] = {}
        """What each engine shares KV in; None: it shares none."""
        self._trie: PrefixTrie | None = None

    def __repr__(self) -> str:
        return f"<Prompts {self._trie or 'not shared'}>"

    def joined(self, engine_id: EngineId, facts: Capabilities) -> None:
        """Prompts that were added while the fleet shared in other blocks are private from now on."""
        self._blocks[engine_id] = facts.block_tokens if facts.shares_prefixes else None
        blocks = [block for block in self._blocks.values() if block is not None]
        if len(blocks) < len(self._blocks):
            self._trie = None
        elif self._trie is None or self._trie.block_tokens != math.lcm(*blocks):
            self._trie = PrefixTrie(math.lcm(*blocks))

    def add(self, program_id: ProgramId, token_ids: Sequence[int]) -> None:
        """The program's prompt, in place of one that it had before."""
        if self._trie is not None:
            # The last token is always computed anew, and its block is nobody else's.
            self._trie.add(program_id, block_hashes(token_ids[:-1], self._trie.block_tokens))

    def footprint(self, program_id: ProgramId, tokens: int, *, expects_more: bool = False) -> Footprint:
        """Of its context, which has `tokens` in all; `expects_more`: the same prompt will come again."""
        if self._trie is None:
            return Footprint(tokens)
        shared = self._trie.segments(program_id, expects_more=expects_more)
        return Footprint(tokens - sum(segment.tokens for segment in shared), shared)

    def remove(self, program_id: ProgramId) -> None:
        """Safe to call twice."""
        if self._trie is not None:
            self._trie.remove(program_id)
