"""What crosses between the runtime and an engine process, as JSON over HTTP on a Unix socket.

    GET  /capabilities            -> Capabilities
    GET  /load                    -> Load
    POST /generate                GenerateRequest -> GenerateReply     one reply at turn end
    POST /abort                   {"request_id"}  -> {}                exact id; generate then answers
    POST /release                 {"program_id"}  -> {}                idempotent; gives up the held KV
    POST /score                   ScoreRequest    -> ScoreReply
    POST /update/prepare          Manifest -> {}   copies and verifies beside the old weights
    POST /update/commit           CommitRequest   -> CommitReply       swaps between two steps
    POST /update/abandon          {"version"}     -> {}                forgets what was prepared
    POST /flush                   -> {}                                drops every KV that no request runs on
A refusal is {"error", "message", "remedy"} with a 4xx status when the request is at fault, else 5xx.
"""

from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Wire(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Sampling(Wire):
    """How the next token is drawn.

    The noise depends on (seed, position in the context) alone.  Temperature 0 is greedy; its
    log-probabilities are those of temperature 1.
    """

    temperature: float = Field(default=1.0, ge=0)
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()


class GenerateRequest(Wire):
    request_id: str
    program_id: str
    token_ids: list[int]
    """The whole context; the engine prefills only what it does not hold."""
    max_new_tokens: int = Field(gt=0)
    sampling: Sampling = Sampling()
    hold: bool = True
    """Keep the program's KV when the turn ends, until `release`."""
    min_version: str | None = None
    """Refused (409) while the engine serves an older one."""


class WireVersionSpan(Wire):
    version: str
    start: int
    end: int


class FinishReason(StrEnum):
    STOP = "stop"
    """A stop token (it is the last of token_ids) or a stop string was sampled."""
    LENGTH = "length"
    ABORT = "abort"


class GenerateReply(Wire):
    token_ids: list[int]
    logprobs: list[float]
    versions: list[WireVersionSpan]
    """Of the sampled tokens, in order, covering all of them."""
    finish_reason: FinishReason
    matched: int | str | None = None
    cached_tokens: int
    """Context tokens whose KV was there already."""
    prefilled_tokens: int
    queue_s: float
    prefill_s: float
    decode_s: float
    pause_s: float = 0.0


class ScoreRequest(Wire):
    token_ids: list[int]
    start: int = Field(ge=1)
    """First position to score; needs a token before it."""
    temperature: float = Field(default=1.0, gt=0)


class ScoreReply(Wire):
    logprobs: list[float]
    """Of token_ids[start:], each given all tokens before it."""
    version: str


class Capabilities(Wire):
    model: str
    architecture: str
    vocabulary_size: int
    """Rows of the output layer; ids at or above `tokenizer_size` have no text and are never sampled."""
    tokenizer_size: int | None = None
    """The trainer masks the same ids before its softmax.  `None`: the whole vocabulary has text."""
    context_tokens: int
    kv_tokens: int
    """The whole pool."""
    concurrency: int
    """Requests that decode together."""
    shares_prefixes: bool
    """Whether programs with a common prefix hold it once."""
    block_tokens: int = 1
    """KV is given out in multiples of this."""
    version: str
    dtype: str
    threads: int


class Load(Wire):
    running: int
    waiting: int
    used_kv_tokens: int
    held_kv_tokens: int
    held_programs: int
    prefilled_tokens: int
    """All counters since start."""
    cached_tokens: int
    generated_tokens: int
    updates: int
    busy_s: float
    pause_s: float
    evicted_programs: int = 0
    """Held programs whose KV was taken for a request that had no room."""


class CommitRequest(Wire):
    version: str
    running: Literal["continue", "recompute"] = "recompute"
    """Requests in flight: go on with the KV they have, or prefill it again under the new weights."""
    held: Literal["keep", "drop"] = "drop"
    """KV of programs between turns."""


class CommitReply(Wire):
    version: str
    pause_s: float
    """How long decoding stood still."""
    recomputed_requests: int
    dropped_programs: int
