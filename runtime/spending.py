"""What a program has used so far: `Usage` in the making, which costs nothing to add to."""

from dataclasses import asdict, dataclass

from sostenuto.runtime.engines.wire import GenerateReply
from sostenuto.types import Usage


@dataclass(slots=True)
class Spending:
    """Of one program; the fields are those of `Usage`."""

    decode_s: float = 0.0
    prefill_s: float = 0.0
    tool_s: float = 0.0
    queue_s: float = 0.0
    pause_s: float = 0.0
    environment_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0

    def decoded(self, reply: GenerateReply, *, prompt_tokens: int) -> None:
        self.decode_s += reply.decode_s
        self.prefill_s += reply.prefill_s
        self.queue_s += reply.queue_s
        self.pause_s += reply.pause_s
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += reply.cached_tokens
        self.prefilled_tokens += reply.prefilled_tokens
        self.generated_tokens += len(reply.token_ids)

    def usage(self) -> Usage:
        return Usage(**asdict(self))
