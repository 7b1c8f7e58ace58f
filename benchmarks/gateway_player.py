"""An engine that plays the model: what it says is decided by what it was told last."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel

from benchmarks.wiretap import Exchange
from sostenuto.errors import EngineError
from sostenuto.runtime.engines.wire import (
    Capabilities,
    CommitReply,
    CommitRequest,
    Feature,
    FinishReason,
    GenerateReply,
    GenerateRequest,
    Load,
    PauseMode,
    ScoreReply,
    ScoreRequest,
    Spans,
    WireSpan,
    WireVersionSpan,
)
from sostenuto.runtime.rendering.renderer import Renderer
from sostenuto.runtime.rendering.vocabulary import Vocabulary
from sostenuto.trainer.publication.manifest import Manifest
from sostenuto.types import Message, ProgramId

_VERSION = "0.0"


@dataclass
class Player:
    """Implements `Engine`.

    `lines`: by a text, what is said to it; of several that the context holds, the last one counts.
    """

    renderer: Renderer
    vocabulary: Vocabulary
    lines: Mapping[str, Message]
    kv_tokens: int
    context_tokens: int = 16_384
    concurrency: int = 64
    token_s: float = 0.002
    exchanges: dict[str, list[Exchange]] = field(default_factory=dict[str, list[Exchange]])
    """By program, in order."""
    held: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    """The context of a program's KV."""
    most_held: int = 0
    reread_tokens: int = 0
    """Prefilled, although a turn of the same program had read or sampled them before."""

    async def capabilities(self) -> Capabilities:
        return Capabilities(
            model="player",
            architecture="Player",
            vocabulary_size=self.vocabulary.size,
            context_tokens=self.context_tokens,
            kv_tokens=self.kv_tokens,
            concurrency=self.concurrency,
            shares_prefixes=False,
            version=_VERSION,
            dtype="float32",
            threads=1,
            # It says what it has to say, and whoever wrote its lines keeps to the schemas.
            features=frozenset({Feature.GRAMMAR}),
        )

    async def generate(self, request: GenerateRequest, *, spans: Spans | None = None) -> GenerateReply:
        said = self._said(self.vocabulary.decode(request.token_ids))
        whole = self.renderer.write([Message("user", "")], said, ())
        ids = whole[: request.max_new_tokens]
        for id_ in ids:
            await anyio.sleep(self.token_s)
            if spans is not None:
                spans(WireSpan(token_ids=[id_], logprobs=[-0.5], version=_VERSION))
        return self._entered(request, ids, is_cut=ids != whole)

    def _said(self, text: str) -> Message:
        last = max(self.lines, key=text.rfind)
        if last not in text:
            raise EngineError(f"nobody wrote a line for: {text[-200:]!r}")
        return self.lines[last]

    def _entered(self, request: GenerateRequest, ids: list[int], *, is_cut: bool) -> GenerateReply:
        program, context = request.program_id, request.token_ids
        cached = _common(self.held.get(program, []), context)
        earlier = self.exchanges.setdefault(program, [])
        if earlier:
            known = _common([*earlier[-1].context, *earlier[-1].sampled], context)
            self.reread_tokens += max(0, known - cached)
        earlier.append(Exchange(list(context), ids, len(context) - cached))
        self.held[program] = [*context, *ids]
        self.most_held = max(self.most_held, sum(map(len, self.held.values())))
        return GenerateReply(
            token_ids=ids,
            logprobs=[-0.5] * len(ids),
            versions=[WireVersionSpan(version=_VERSION, start=0, end=len(ids))],
            finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP,
            cached_tokens=cached,
            prefilled_tokens=len(context) - cached,
            queue_s=0.0,
            prefill_s=0.0,
            decode_s=self.token_s * len(ids),
        )

    async def release(self, program_id: ProgramId) -> None:
        await anyio.lowlevel.checkpoint()
        self.held.pop(program_id, None)

    async def flush(self) -> None:
        self.held.clear()

    async def offload(self, program_id: ProgramId) -> None:
        raise _no(f"lower tier for {program_id}")

    async def restore(self, program_id: ProgramId) -> None:
        raise _no(f"lower tier for {program_id}")

    async def pause(self, mode: PauseMode) -> None:
        raise _no(f"pause {mode}")

    async def resume(self) -> None:
        raise _no("pause")

    async def load(self) -> Load:
        raise _no("load")

    async def abort(self, request_id: str) -> None:
        raise _no(f"way to end {request_id}")

    async def score(self, request: ScoreRequest) -> ScoreReply:
        raise _no(f"score for {len(request.token_ids)} tokens")

    async def prepare_update(self, manifest: Manifest) -> None:
        raise _no(f"weights {manifest.version}")

    async def commit_update(self, request: CommitRequest) -> CommitReply:
        raise _no(f"weights {request.version}")

    async def abandon_update(self, version: str) -> None:
        raise _no(f"weights {version}")


def _no(what: str) -> EngineError:
    return EngineError(f"a player has no {what}")


def _common(one: list[int], other: list[int]) -> int:
    shorter = min(len(one), len(other))
    return next((at for at in range(shorter) if one[at] != other[at]), shorter)
