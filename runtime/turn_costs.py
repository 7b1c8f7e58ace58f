"""What one turn of a program cost, as engine and tool server tell it."""

from collections.abc import Sequence

from sostenuto.runtime.engines.wire import GenerateReply
from sostenuto.scheduler.events import TurnCost
from sostenuto.types import ToolResult, Usage


def cost_of(reply: GenerateReply) -> TurnCost:
    return TurnCost(
        prefilled_tokens=reply.prefilled_tokens,
        prefill_s=reply.prefill_s,
        generated_tokens=len(reply.token_ids),
        decode_s=reply.decode_s,
        queue_s=reply.queue_s,
    )


def used_by(reply: GenerateReply, *, prompt_tokens: int = 0) -> Usage:
    return Usage(
        decode_s=reply.decode_s,
        prefill_s=reply.prefill_s,
        queue_s=reply.queue_s,
        pause_s=reply.pause_s,
        prompt_tokens=prompt_tokens,
        cached_tokens=reply.cached_tokens,
        prefilled_tokens=reply.prefilled_tokens,
        generated_tokens=len(reply.token_ids),
    )


def queued_s_of(results: Sequence[ToolResult]) -> float:
    """How long the call that came back last waited for its turn; the turn's calls begin together."""
    last = max(results, key=lambda result: result.queued_s + result.elapsed_s, default=None)
    return last.queued_s if last else 0.0
