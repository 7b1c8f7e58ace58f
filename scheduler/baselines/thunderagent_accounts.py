"""ThunderAgent's view of programs and nodes, which its paper and its code have in common.

A program is active on a node, or paused: then it stands in the one global queue, also while its tool
runs.  Pausing says nothing to the engine, whose KV is left to its own least-recently-used order, and a
paused program is resumed on any node.  A program that decodes cannot be paused; it is marked, and
paused when its turn ends.

What is counted is tokens per program: a prefix that programs share is counted once for each of them.
The count is taken when a request arrives and when it ends; the published code also estimates it from
characters and adds what is streamed, which the frame does not report.
"""

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field

from sostenuto.scheduler.actions import Action
from sostenuto.scheduler.baselines.baseline import Baseline, is_over
from sostenuto.scheduler.events import EngineJoined, EngineLost
from sostenuto.scheduler.fleet import EngineSeat
from sostenuto.scheduler.lifecycle import Move
from sostenuto.scheduler.program import Program, Reason
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.types import EngineId, ProgramId

TICK_S = 5.0


@dataclass(slots=True)
class Account:
    """One program."""

    program: Program
    tokens: int
    reasoning: bool = True
    """A request is in flight or in hand; otherwise its tool runs."""
    node: "Node | None" = None
    """None: paused."""
    origin: EngineId | None = None
    """Where it was paused."""
    marked: bool = False
    asked_s: float = 0.0
    """Since when its request is in hand."""

    @property
    def is_new(self) -> bool:
        return self.program.turn == 0


@dataclass(slots=True)
class Node:
    """One engine and the programs that are active on it."""

    seat: EngineSeat
    accounts: dict[ProgramId, Account] = field(default_factory=dict[ProgramId, Account])
    tokens: int = 0

    def register(self, account: Account) -> None:
        self.accounts[account.program.id] = account
        self.tokens += account.tokens
        account.node = self

    def unregister(self, account: Account) -> None:
        del self.accounts[account.program.id]
        self.tokens -= account.tokens
        account.node, account.origin = None, self.seat.id

    def decoding(self) -> list[Account]:
        return [account for account in self.accounts.values() if account.reasoning]

    def acting(self) -> list[Account]:
        return [account for account in self.accounts.values() if not account.reasoning]


class ThunderAgentFrame(Baseline):
    """Programs pause and resume at a tick; what is paused and resumed there is for a subclass to say."""

    def __init__(self, settings: SchedulerSettings | None = None) -> None:
        super().__init__(settings)
        self._accounts: dict[ProgramId, Account] = {}
        self._nodes: dict[EngineId, Node] = {}
        self._paused: dict[ProgramId, Account] = {}
        """The global queue, in the order of entry."""
        self._turns: dict[ProgramId, None] = {}
        """Of active programs; empty while their nodes take requests."""
        self._next_tick_s: float | None = None

    @abstractmethod
    def _tick(self, now_s: float) -> list[Action]:
        """Pause and resume; returns what else has to be done."""

    @abstractmethod
    def _node_for_new(self, account: Account) -> Node | None:
        """Where a new program starts at once; None: it waits for a tick."""

    # ---- hooks ----

    def _look_again_s(self) -> float | None:
        return self._next_tick_s if self._accounts else None

    def _waiting_count(self) -> int:
        return len(self._turns) + sum(account.reasoning for account in self._paused.values())

    def _new_seat(self, event: EngineJoined) -> EngineSeat:
        seat = super()._new_seat(event)
        self._nodes[seat.id] = Node(seat)
        return seat

    def _on_engine_lost(self, event: EngineLost, now_s: float) -> list[Action]:
        node = self._nodes.pop(event.engine_id, None)
        for account in list(node.accounts.values()) if node else []:
            self._unregister(account, now_s)
        return super()._on_engine_lost(event, now_s)

    def _became_runnable(self, program: Program, now_s: float) -> None:
        account = self._accounts.get(program.id) or self._opened(program)
        account.reasoning = True
        self._count(account, program.footprint.tokens)
        if account.node is None and program.id not in self._paused:
            node = self._node_for_new(account)
            if node is not None:
                node.register(account)
        self._await(account, now_s)

    def _began_acting(self, program: Program, now_s: float) -> None:
        account = self._accounts[program.id]
        account.reasoning = False
        self._count(account, program.footprint.tokens)
        if account.marked:
            self._pause(account, now_s)

    def _leaves(self, program: Program, now_s: float) -> None:
        super()._leaves(program, now_s)
        self._turns.pop(program.id, None)
        account = self._accounts.get(program.id)
        if account is not None and is_over(program):
            self._close(account)

    def _decide(self, now_s: float) -> list[Action]:
        if self._next_tick_s is None:
            self._next_tick_s = now_s + TICK_S
        actions = self._tick(now_s) if now_s >= self._next_tick_s else []
        while self._next_tick_s <= now_s:
            self._next_tick_s += TICK_S
        return actions + self._send(now_s)

    def _send(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        for program_id in list(self._turns):
            account = self._accounts[program_id]
            assert account.node is not None
            if self.gate.may_start(account.node.seat.id):
                del self._turns[program_id]
                actions += self._sent(account, account.node.seat, now_s)
        return actions

    def _sent(self, account: Account, seat: EngineSeat, now_s: float) -> list[Action]:
        """The request goes out, whatever its size."""
        return [self._start(account.program, seat, now_s)]

    # ---- the two primitives ----

    def _pause(self, account: Account, now_s: float) -> None:
        self._unregister(account, now_s)
        if account.program.phase.holds_kv:
            self._give_up_kv(account.program, Move.EVICT, now_s)

    def _resume(self, account: Account, node: Node, now_s: float) -> None:
        del self._paused[account.program.id]
        node.register(account)
        if account.reasoning:
            self._await(account, now_s)

    # ---- accounts ----

    def _open_nodes(self) -> Iterable[Node]:
        return (node for node in self._nodes.values() if self.gate.may_start(node.seat.id))

    def _opened(self, program: Program) -> Account:
        account = self._accounts[program.id] = Account(program, program.footprint.tokens)
        return account

    def _close(self, account: Account) -> None:
        if account.node is not None:
            account.node.unregister(account)
        self._paused.pop(account.program.id, None)
        del self._accounts[account.program.id]

    def _count(self, account: Account, tokens: int) -> None:
        if account.node is not None:
            account.node.tokens += tokens - account.tokens
        account.tokens = tokens

    def _unregister(self, account: Account, now_s: float) -> None:
        assert account.node is not None
        account.node.unregister(account)
        account.marked = False
        self._paused[account.program.id] = account
        if account.program.id in self._turns:
            del self._turns[account.program.id]
            self._await(account, now_s)

    def _await(self, account: Account, now_s: float) -> None:
        """Its request is in hand: it goes to the program's node, or waits in the global queue."""
        program = account.program
        if account.node is not None:
            self._turns[program.id] = None
            self._note(program, Reason.VERSION, now_s)
            return
        self._paused[program.id] = account
        account.asked_s = now_s
        self._note(program, Reason.KV, now_s)
