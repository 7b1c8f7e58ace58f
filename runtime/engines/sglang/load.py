"""What a server has to do, from `/v1/loads` and from what went through this adapter."""

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from sostenuto.runtime.engines.sglang.facts import Facts
from sostenuto.runtime.engines.sglang.names import Sessions
from sostenuto.runtime.engines.wire import GenerateReply, Load


class RankLoad(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int
    """KV that requests run on; what is only cached is not in it."""


class Loads(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    loads: list[RankLoad] = Field(min_length=1)

    @property
    def requests(self) -> int:
        return sum(rank.num_running_reqs + rank.num_waiting_reqs for rank in self.loads)


@dataclass(slots=True)
class Totals:
    """Tokens of all answers since the adapter was made."""

    prefilled: int = 0
    cached: int = 0
    generated: int = 0

    def count(self, reply: GenerateReply) -> None:
        self.prefilled += reply.prefilled_tokens
        self.cached += reply.cached_tokens
        self.generated += len(reply.token_ids)


def current_load(
    said: Loads,
    facts: Facts,
    totals: Totals,
    sessions: Sessions,
    *,
    updates: int,
    busy_s: float,
    pause_s: float,
) -> Load:
    """Held KV is what was asked to be held; the server evicts where it needs the room, and does not say."""
    rank = said.loads[0]
    used = min(rank.num_used_tokens, facts.server.max_total_num_tokens)
    held = min(sessions.tokens, facts.server.max_total_num_tokens - used)
    return Load(
        running=rank.num_running_reqs,
        waiting=rank.num_waiting_reqs,
        used_kv_tokens=used + held,
        held_kv_tokens=held,
        held_programs=len(sessions),
        prefilled_tokens=totals.prefilled,
        cached_tokens=totals.cached,
        generated_tokens=totals.generated,
        updates=updates,
        busy_s=busy_s,
        pause_s=pause_s,
    )
