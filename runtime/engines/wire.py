"""What crosses between the runtime and an engine process, as JSON over HTTP on a Unix socket.

    GET  /capabilities            -> Capabilities
    GET  /load                    -> Load
    POST /generate                GenerateRequest -> GenerateReply     one reply at turn end
    POST /abort                   {"request_id"}  -> {}                exact id; generate then answers
    POST /release                 {"program_id"}  -> {}                idempotent; gives up the held KV
    POST /offload                 {"program_id"}  -> {}                idempotent; held KV to the lower tier
    POST /restore                 {"program_id"}  -> {}                idempotent; and back, ahead of its turn
    POST /pause                   {"mode"}        -> {}                idempotent; see PauseMode
    POST /resume                  -> {}                                idempotent
    POST /score                   ScoreRequest    -> ScoreReply
    POST /update/prepare          Manifest -> {}   copies and verifies beside the old weights
    POST /update/commit           CommitRequest   -> CommitReply       swaps between two steps
    POST /update/abandon          {"version"}     -> {}                forgets what was prepared
    POST /adapters/load   AdapterRequest -> AdapterReply   for new requests; those that run keep theirs
    POST /adapters/unload           {"name"}      -> {}    idempotent
    POST /flush                   -> {}                                drops every KV that no request runs on
With `POST /generate?stream=1` the answer is lines of JSON: {"span": WireSpan} as tokens come, then one
{"reply": GenerateReply}, whose tokens are those of the spans, or a refusal.
A refusal is {"error", "message", "remedy"} with a 4xx status when the request is at fault, else 5xx.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

SPAN_LINE, REPLY_LINE, ERROR_LINE = b'{"span":', b'{"reply":', b'{"error":'
"""How the lines of a stream begin."""


class Wire(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Feature(StrEnum):
    """What not every engine can do.  Asked for where it is missing, it is refused (400, "unsupported")."""

    HOLD = "hold"
    """Keeps a program's KV between its turns, until `release`."""
    OFFLOAD = "offload"
    """Has a lower tier of memory for held KV."""
    SCORE = "score"
    UPDATE = "update"
    """Takes new weights while it serves."""
    PAUSE = "pause"
    STREAM = "stream"
    TRUNCATION = "truncation"
    """top_p, top_k and min_p."""
    PENALTIES = "penalties"
    GRAMMAR = "grammar"
    TOP_LOGPROBS = "top_logprobs"
    ROUTED_EXPERTS = "routed_experts"
    KV_AGE = "kv_age"
    """Gives up KV by the version that computed it."""
    ADAPTERS = "adapters"
    """LoRA adapters, chosen by each request."""


class Grammar(Wire):
    """What the sampled text must be; exactly one of the fields."""

    json_schema: str | None = None
    """A JSON schema, as JSON."""
    regex: str | None = None
    lark: str | None = None
    """A grammar in Lark's EBNF."""
    structural_tag: str | None = None
    """Texts, JSON and tags around them, as JSON in the format of xgrammar."""

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if len(self.model_dump(exclude_none=True)) != 1:
            raise ValueError("give exactly one of json_schema, regex, lark and structural_tag")
        return self

    @property
    def given(self) -> tuple[str, str]:
        """The field that is given, and its text."""
        ((field, text),) = self.model_dump(exclude_none=True).items()
        return field, text


class Sampling(Wire):
    """How the next token is drawn.

    The noise depends on (seed, position in the context) alone.  Temperature 0 is greedy; its
    log-probabilities are those of temperature 1.  In this order: penalties change the logits, a grammar
    leaves out tokens, the temperature divides the rest, top_k, top_p and min_p leave out more, each of
    what the one before left, and what is left is drawn from.
    Log-probabilities are those of the distribution that was drawn from.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    temperature: float = Field(default=1.0, ge=0)
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    top_k: int = Field(default=0, ge=0)
    """Only the most probable tokens; 0: all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Only the smallest set of most probable tokens that has at least this probability."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Only tokens at least this times as probable as the most probable one."""
    repetition_penalty: float = Field(default=1.0, gt=0)
    """Divides positive and multiplies negative logits of tokens of the context (Keskar et al. 2019)."""
    presence_penalty: float = 0.0
    """Taken from the logits of tokens that this turn has sampled."""
    frequency_penalty: float = 0.0
    """Taken from the logits for each time that this turn has sampled the token."""
    grammar: Grammar | None = None

    @property
    def ranks(self) -> bool:
        """Whether tokens are left out by their rank."""
        return self.top_k > 0 or self.top_p < 1

    @property
    def truncates(self) -> bool:
        return self.ranks or self.min_p > 0

    @property
    def penalises(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


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
    """Refused (409, "version") while the engine serves an older one."""
    exact_version: str | None = None
    """Refused (409, "version") while the engine serves another one; ended with the tokens it has
    (FinishReason.ABORT) when the engine goes on to another."""
    priority: int = 0
    """Among requests that wait in the engine, higher goes first."""
    adapter: str | None = None
    """Name of a loaded LoRA adapter to sample with; KV of different adapters is never shared."""
    salt: str = Field(default="", pattern=r"^[^\x00]*$")
    """Only programs with the same salt share KV."""
    top_logprobs: int = Field(default=0, ge=0)
    """Also return this many most probable tokens of each position."""
    routed_experts: bool = False
    """Also return which experts each token was routed to."""
    routed_experts_from: int = Field(default=0, ge=0)
    """Position of the first token to return them of; those before are in the record already."""


class WireSpan(Wire):
    """Tokens of a turn that is still being sampled."""

    token_ids: list[int]
    logprobs: list[float]
    version: str


Spans = Callable[[WireSpan], None]
"""Called with tokens as they come."""


class PauseMode(StrEnum):
    """What becomes of the requests that run; new ones wait for `resume` in each mode."""

    KEEP = "keep"
    """They stand still, with their KV."""
    RETRACT = "retract"
    """They wait with the new ones, and prefill again what they have; no token is lost."""
    ABORT = "abort"
    """They are answered with the tokens they have."""
    FINISH = "finish"
    """They run to their end; `pause` answers when the last one has."""


class RoutedExperts(Wire):
    """The experts of each token that was computed: all but the last sampled one.

    Of tokens whose KV was there already, too.  None in a reply: the KV was lost before the turn ended.
    """

    start: int
    """Position in the context of the first token."""
    shape: tuple[int, int, int]
    """(tokens, mixture-of-experts layers, experts a token)."""
    data: str
    """Base64 of the expert numbers, little-endian int16 in C order."""


class WireVersionSpan(Wire):
    version: str
    start: int
    end: int


class FinishReason(StrEnum):
    STOP = "stop"
    """A stop token (it is the last of token_ids) or a stop string was sampled, or, where there is no stop
    token, a grammar is complete and nothing can follow."""
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
    top_logprobs: list[list[tuple[int, float]]] | None = None
    """For each sampled token the most probable ones (token, log-probability), best first."""
    routed_experts: RoutedExperts | None = None

    def spans(self, start: int = 0) -> list[WireSpan]:
        """The sampled tokens from place `start` on, version by version."""
        return [
            WireSpan(
                token_ids=self.token_ids[max(start, span.start) : span.end],
                logprobs=self.logprobs[max(start, span.start) : span.end],
                version=span.version,
            )
            for span in self.versions
            if span.end > max(start, span.start)
        ]


def tell(reply: GenerateReply, spans: Spans | None) -> None:
    """Tell the spans of a turn that is known as a whole."""
    if spans is not None:
        for span in reply.spans():
            spans(span)


class AdapterRequest(Wire):
    name: str = Field(min_length=1)
    """What requests ask for it by; one of this name that is loaded already is replaced."""
    path: str
    """Folder in PEFT's format that the engine can read."""
    version: str | None = None
    """Of what is sampled with it; None: that of the engine's weights."""


class AdapterReply(Wire):
    name: str
    layers: int
    rank: int
    nbytes: int


class ScoreRequest(Wire):
    token_ids: list[int]
    start: int = Field(ge=1)
    """First position to score; needs a token before it."""
    temperature: float = Field(default=1.0, gt=0)
    top_logprobs: int = Field(default=0, ge=0)
    adapter: str | None = None
    """Name of a loaded LoRA adapter to score with."""


class ScoreReply(Wire):
    logprobs: list[float]
    """Of token_ids[start:], each given all tokens before it."""
    version: str
    top_logprobs: list[list[tuple[int, float]]] | None = None
    """At each of these positions, best first."""


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
    quantization: str | None = None
    """How matrices are kept: int8, fp8 or nvfp4; None: in `dtype`."""
    weight_bytes: int = 0
    """Memory of one version of the weights; 0: not told."""
    kind: str = "embedded"
    """embedded, vllm or sglang."""
    features: frozenset[Feature] = frozenset()
    lower_tokens: int = 0
    """Room of the lower tier; 0: there is none."""
    lower_tokens_s: float = 0.0
    """Tokens a second that come back from it."""


class Guesses(Wire):
    """Tokens that were drafted, and those of them that were drawn, too."""

    drafted: int = 0
    accepted: int = 0

    @property
    def right(self) -> float | None:
        """The share that was accepted; None: nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None


class Speculation(Wire):
    """What drafting has come to, by updates of the weights of the model or of the drafter."""

    source: str
    """prompt, draft or mtp."""
    version: str | None = None
    """Of the drafter's weights, when it has any."""
    total: Guesses
    since_update: Guesses
    before_update: Guesses
    """Between the last two updates."""


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
    speculation: Speculation | None = None
    cached_kv_tokens: int = 0
    """KV that nobody holds, kept until somebody needs the room; beside the used."""
    lower_kv_tokens: int = 0
    """In the lower tier."""
    lower_programs: int = 0


class CommitRequest(Wire):
    version: str
    running: Literal["continue", "recompute"] = "recompute"
    """Requests in flight: go on with the KV they have, or prefill it again under the new weights."""
    held: Literal["keep", "drop"] = "drop"
    """KV of programs between turns."""
    oldest_kv: str | None = None
    """With Feature.KV_AGE: of what may go on, KV that an older version has computed does not."""


class CommitReply(Wire):
    version: str
    pause_s: float
    """How long decoding stood still."""
    recomputed_requests: int
    dropped_programs: int
    dropped: list[str] = []
    """Programs that lost held KV by `oldest_kv` alone."""
