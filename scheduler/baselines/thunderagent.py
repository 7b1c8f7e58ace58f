"""ThunderAgent by its code (repository at a7eef77, `--router tr`), faults included.

Every 5 s, for nodes of capacity C:

    remaining = C - (sum of tokens of active programs + 100 for each of them)
    decayed   = the same, a program whose tool has run for t seconds counted as tokens * 2^-t

    1 resume: over the nodes with more than 100 left (remaining, or decayed under
      `--use-acting-token-decay`), take paused programs (with a request and not new; new; acting; smallest
      first in each) while their tokens + 100 each fit the sum of what is left, skip those that do not;
      place them largest first on the node with the most left, without a look at whether they fit there
    2 pause: on each node whose remaining (never decayed) is below 0, pause acting programs, smallest
      first, until it is not; then mark decoding ones, smallest first.  Marking does not change remaining,
      so once it begins, all are marked

A new program starts at once, on the node with the fewest tokens that has its tokens + 100 left, if the
global queue is empty; any entry there makes it wait for a tick.  A request that has waited for 1,800 s
is sent to the program's last node, or the one with the fewest tokens, whatever is left there; until
then a program larger than every node waits.

The frame differs where a node is lost: the code goes on sending to it; here its programs are paused.
"""

import heapq

from sostenuto.scheduler.actions import Action
from sostenuto.scheduler.baselines.thunderagent_accounts import Account, Node, ThunderAgentFrame
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.types import ProgramId

BUFFER_TOKENS = 100
PATIENCE_S = 1800.0


def remaining_tokens(node: Node) -> int:
    """What the code believes to be left of the node's pool; below 0 when it is overcommitted."""
    return node.seat.kv.capacity_tokens - node.tokens - BUFFER_TOKENS * len(node.accounts)


class ThunderAgent(ThunderAgentFrame):
    """`decay`: with `--use-acting-token-decay`."""

    def __init__(self, settings: SchedulerSettings | None = None, *, decay: bool = False) -> None:
        super().__init__(settings)
        self._decay = decay
        self._patience: list[tuple[float, ProgramId]] = []
        """When a request has waited for too long.  An entry is stale once the program was resumed."""

    def _look_again_s(self) -> float | None:
        tick_s = super()._look_again_s()
        if tick_s is None or not self._patience:
            return tick_s
        return min(tick_s, self._patience[0][0])

    def _decide(self, now_s: float) -> list[Action]:
        self._force(now_s)
        return super()._decide(now_s)

    def _await(self, account: Account, now_s: float) -> None:
        super()._await(account, now_s)
        if account.node is None:
            heapq.heappush(self._patience, (now_s + PATIENCE_S, account.program.id))

    def _node_for_new(self, account: Account) -> Node | None:
        if self._paused:
            return None
        needed = account.tokens + BUFFER_TOKENS
        able = [node for node in self._open_nodes() if remaining_tokens(node) >= needed]
        return min(able, key=lambda node: node.tokens, default=None)

    # ---- the tick ----

    def _tick(self, now_s: float) -> list[Action]:
        self._resume_greedily(now_s)
        for node in self._nodes.values():
            self._pause_until_safe(node, now_s)
        return []

    def _resume_greedily(self, now_s: float) -> None:
        left = {node.seat.id: self._left(node, now_s) for node in self._open_nodes()}
        left = {id_: tokens for id_, tokens in left.items() if tokens > BUFFER_TOKENS}
        for account in sorted(self._picked(sum(left.values())), key=lambda a: -a.tokens):
            if not left:
                return
            roomiest = max(left, key=lambda id_: left[id_])
            self._resume(account, self._nodes[roomiest], now_s)
            left[roomiest] -= account.tokens + BUFFER_TOKENS
            if left[roomiest] <= BUFFER_TOKENS:
                del left[roomiest]

    def _left(self, node: Node, now_s: float) -> float:
        if not self._decay:
            return remaining_tokens(node)
        acting = node.acting()
        discount = sum(a.tokens * (1 - 2.0 ** (a.program.acting_since_s - now_s)) for a in acting)
        return remaining_tokens(node) + discount

    def _picked(self, left: float) -> list[Account]:
        picked: list[Account] = []
        for account in sorted(self._paused.values(), key=_resume_order):
            if account.tokens + BUFFER_TOKENS <= left:
                left -= account.tokens + BUFFER_TOKENS
                picked.append(account)
        return picked

    def _pause_until_safe(self, node: Node, now_s: float) -> None:
        for account in sorted(node.acting(), key=lambda a: a.tokens):
            if remaining_tokens(node) >= 0:
                return
            self._pause(account, now_s)
        if remaining_tokens(node) < 0:
            for account in node.decoding():
                account.marked = True

    # ---- patience ----

    def _force(self, now_s: float) -> None:
        while self._patience and self._patience[0][0] <= now_s and self._nodes:
            due_s, program_id = heapq.heappop(self._patience)
            account = self._paused.get(program_id)
            if account is not None and account.reasoning and account.asked_s + PATIENCE_S == due_s:
                self._resume(account, self._last_resort(account), now_s)

    def _last_resort(self, account: Account) -> Node:
        origin = self._nodes.get(account.origin) if account.origin else None
        return origin or min(self._nodes.values(), key=lambda node: node.tokens)


def _resume_order(account: Account) -> tuple[int, int]:
    if not account.reasoning:
        return 2, account.tokens
    return int(account.is_new), account.tokens
