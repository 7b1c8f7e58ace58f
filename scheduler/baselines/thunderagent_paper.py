"""ThunderAgent by its paper (2602.13692, section 4, equations 6 to 11).

Every 5 s, with c the tokens of a program, t how many ticks its tool has run, f(t) = 2^-t:

    used(node) = sum of c over decoding + sum of c * f(t) over acting programs        (7)
    pause      while C < used: the program with the highest 1/c + [acting]            (6, 11)
    restore    the paused program with the highest 1/c + [has a request] while the fleet has room for it,
               largest first onto the node with the most room                        (10)

Both watermarks are 1, as in the paper's runs: C is the whole pool and a restored program has to fit.
The smallest goes first in both directions: the paper's claim that this costs least is wrong (a pause
frees {9,000, 10,000} where {10,000} would do), and is kept.

Where the paper is silent, what favours it is taken: a new program starts at once when nobody is paused
and a node has room; a marked program counts as paused, so no more are marked than needed; what no node
can ever hold is refused.
"""

from sostenuto.scheduler.actions import Action
from sostenuto.scheduler.baselines.thunderagent_accounts import TICK_S, Account, Node, ThunderAgentFrame
from sostenuto.scheduler.fleet import EngineSeat


class ThunderAgentPaper(ThunderAgentFrame):
    """The published algorithm without what its code adds or leaves out."""

    def _sent(self, account: Account, seat: EngineSeat, now_s: float) -> list[Action]:
        return self._refused(account.program) or super()._sent(account, seat, now_s)

    def _node_for_new(self, account: Account) -> Node | None:
        if self._paused:
            return None
        able = [node for node in self._open_nodes() if _room(node) - node.tokens >= account.tokens]
        return min(able, key=lambda node: node.tokens, default=None)

    # ---- the tick ----

    def _tick(self, now_s: float) -> list[Action]:
        refused = self._turned_down()
        for node in self._nodes.values():
            self._pause_thrashing(node, now_s)
        self._restore(now_s)
        return refused

    def _turned_down(self) -> list[Action]:
        actions: list[Action] = []
        for account in [a for a in self._paused.values() if a.reasoning]:
            refused = self._refused(account.program)
            if refused:
                self._close(account)
            actions += refused
        return actions

    def _pause_thrashing(self, node: Node, now_s: float) -> None:
        candidates = [a for a in node.accounts.values() if not a.marked]
        used = sum(_weight(account, now_s) for account in candidates)
        for account in sorted(candidates, key=_pause_score, reverse=True):
            if used <= _room(node):
                return
            used -= _weight(account, now_s)
            if account.reasoning:
                account.marked = True
            else:
                self._pause(account, now_s)

    def _restore(self, now_s: float) -> None:
        left = {node.seat.id: _room(node) - _used(node, now_s) for node in self._open_nodes()}
        for account in sorted(self._picked(sum(max(0.0, r) for r in left.values())), key=lambda a: -a.tokens):
            roomiest = max(left, key=lambda id_: left[id_])
            if account.tokens <= left[roomiest]:
                self._resume(account, self._nodes[roomiest], now_s)
                left[roomiest] -= account.tokens

    def _picked(self, left: float) -> list[Account]:
        picked: list[Account] = []
        for account in sorted(self._paused.values(), key=_restore_score, reverse=True):
            if account.tokens > left:
                break
            left -= account.tokens
            picked.append(account)
        return picked


def _room(node: Node) -> int:
    return node.seat.kv.capacity_tokens


def _used(node: Node, now_s: float) -> float:
    return sum(_weight(account, now_s) for account in node.accounts.values())


def _weight(account: Account, now_s: float) -> float:
    if account.reasoning:
        return account.tokens
    ticks = (now_s - account.program.acting_since_s) / TICK_S
    return account.tokens * 2.0**-ticks


def _pause_score(account: Account) -> float:
    return 1 / max(1, account.tokens) + (not account.reasoning)


def _restore_score(account: Account) -> float:
    return 1 / max(1, account.tokens) + account.reasoning
