"""What runs for a program under a call id: a tool, or its reward."""

from dataclasses import replace
from functools import partial
from logging import getLogger
from math import inf, isfinite

import anyio

from sostenuto.errors import EnvironmentFailure, ToolServerError
from sostenuto.tools.books import Books
from sostenuto.tools.bounded import bounded, outcome_of, value_of
from sostenuto.tools.host import Host
from sostenuto.tools.logs import CALL
from sostenuto.tools.preparation import GRACE_S
from sostenuto.tools.program import Program
from sostenuto.tools.refused import kind_of
from sostenuto.tools.turns import Turn
from sostenuto.tools.wire import CallRequest, Reward, RewardRequest
from sostenuto.types import ToolResult

log = getLogger(__name__)


async def call_measured(books: Books, program: Program, request: CallRequest, turn: Turn) -> ToolResult:
    """Run the tool when it is its turn, and enter in the books what came of it."""
    CALL.set(request.call_id)
    started_s = anyio.current_time()
    outcome = await outcome_of(partial(_call, books, program, request, turn))
    kind = outcome.status if isinstance(outcome, ToolResult) else kind_of(outcome)
    elapsed_s = anyio.current_time() - started_s
    books.metrics.called(request.name, kind, elapsed_s)
    log.debug("%s: %s after %.3f s", request.name, kind, elapsed_s)
    return value_of(outcome)


async def _call(books: Books, program: Program, request: CallRequest, turn: Turn) -> ToolResult:
    with anyio.move_on_after(request.timeout_s):
        async with turn:
            result = await bounded(
                lambda: _host(program).call(program.id, request),
                timeout_s=inf,
                late=ToolServerError,
                doing=f"calling {request.name}",
            )
        observation = books.edge.observation(result, program.output_bytes.get(request.name))
        return replace(observation, queued_s=turn.queued_s)
    return turn.late()


async def score(program: Program, request: RewardRequest) -> Reward:
    """Score the episode; EnvironmentFailure for a reward that is late or no finite number."""
    reward = await bounded(
        lambda: _host(program).reward(program.id, request),
        timeout_s=request.timeout_s + GRACE_S,
        late=EnvironmentFailure,
        doing="scoring the episode",
    )
    by_turn = {f"turns[{index}]": number for index, number in enumerate(reward.turns)}
    value = {} if reward.value is None else {"value": reward.value}
    for name, number in {**value, **reward.metrics, **by_turn}.items():
        if not isfinite(number):
            raise EnvironmentFailure(f"reward: {name} is {number}; return a finite number")
    return reward


def _host(program: Program) -> Host:
    assert program.host is not None, "a program that was prepared has a host"
    return program.host
