"""What the embedded engine's lower tier saves: tokens that come back instead of being computed again.

A Llama of the size of SmolLM2-135M with random weights, on one thread; in float32, which every CPU has
kernels for.  Time is the process's own, with that of the thread that copies, so that others on the machine
count little.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median
from time import process_time
from typing import Any, cast

import torch
from tokenizers import Tokenizer
from tokenizers import models as tokenizer_models
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.figure import Tell
from sostenuto.runtime.engines.embedded.core import Core
from sostenuto.runtime.engines.embedded.lower import LowerTier
from sostenuto.runtime.engines.embedded.model import Model, load
from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.runtime.engines.wire import GenerateReply, GenerateRequest, Sampling
from sostenuto.types import Version

_SIZES: dict[str, Any] = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}  # fmt: skip
_QUICK: dict[str, Any] = {"num_hidden_layers": 2, "vocab_size": 1024}
_RESTORED = 1000
_PROGRAMS, _TURNS = 16, 8
_NEW, _SAMPLED = 40, 24
"""Tokens of a turn."""
_LONGEST_GAP = 40
"""Steps of the engine between two turns of a program, at most."""


def measure_memory(tell: Tell, *, quick: bool) -> None:
    """A restore against a prefill, and what programs of several turns prefill in a pool that is too small."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="sostenuto-memory-") as place:
        model = _model(Path(place), quick=quick)
        _restore(tell, model, Path(place), repeats=1 if quick else 2)
        for tiered in (True, False):
            _programs(tell, model, Path(place), tiered=tiered, turns=2 if quick else _TURNS)


def _model(place: Path, *, quick: bool) -> Model:
    sizes = {**_SIZES, **(_QUICK if quick else {})}
    cast("Any", torch).manual_seed(0)
    module = cast("Any", LlamaForCausalLM(LlamaConfig(**sizes)))
    module.save_pretrained(place)
    words = {str(i): i for i in range(sizes["vocab_size"])}
    Tokenizer(tokenizer_models.WordLevel(words, unk_token="0")).save(str(place / "tokenizer.json"))
    return load(place, dtype="float32", device="cpu")


class _Bench:
    """A core, stepped here."""

    def __init__(self, model: Model, *, kv_tokens: int, lower: LowerTier | None) -> None:
        self.core = Core(
            model, version=Version(0, 0), kv_tokens=kv_tokens, concurrency=_PROGRAMS, threads=1, lower=lower
        )
        self._count = 0

    def submit(
        self, program: str, context: list[int], new: int, answer: Callable[[GenerateReply], None]
    ) -> None:
        def answered(reply: GenerateReply | Refusal) -> None:
            assert isinstance(reply, GenerateReply), reply
            answer(reply)

        self._count += 1
        request = GenerateRequest(
            request_id=str(self._count), program_id=program, token_ids=context, max_new_tokens=new,
            sampling=Sampling(seed=self._count),
        )  # fmt: skip
        self.core.submit(request, answered)

    def turn(self, program: str, context: list[int]) -> GenerateReply:
        """One token."""
        replies: list[GenerateReply] = []
        self.submit(program, context, 1, replies.append)
        self.run()
        return replies[0]

    def run(self) -> None:
        while self.core.busy:
            self.core.step()


def _restore(tell: Tell, model: Model, place: Path, *, repeats: int) -> None:
    """A turn with 1,000 tokens of context to its first token: in the lower tier, and nowhere."""
    lower = LowerTier(model.shape, 2 * _RESTORED, place)
    # There is no room for two contexts: what was offloaded is really gone from the pool.
    bench = _Bench(model, kv_tokens=_RESTORED + 64, lower=lower)
    restored: list[float] = []
    computed: list[float] = []
    for i in range(repeats + 1):
        context = _tokens(i, _RESTORED)
        computed.append(_timed(bench, f"p{i}", context, cached=0))
        bench.core.offload(f"p{i}")
        bench.run()
        bench.turn("other", _tokens(-1 - i, _RESTORED))
        bench.core.release("other")
        restored.append(_timed(bench, f"p{i}", context, cached=_RESTORED - 1))
        bench.core.release(f"p{i}")
    # The first of each touches memory for the first time.
    ratio = median(restored[1:]) / median(computed[1:])
    tell("engine_restore_1000_tokens_over_recompute", ratio, "", "<= 0.2")
    tell("engine_lower_tier_tokens_s", lower.tokens_s, "tokens/s")


def _timed(bench: _Bench, program: str, context: list[int], *, cached: int) -> float:
    before_s = process_time()
    reply = bench.turn(program, context)
    spent_s = process_time() - before_s
    assert reply.cached_tokens == cached, f"{reply.cached_tokens} tokens were there, not {cached}"
    return spent_s


class _Program:
    """Turns that follow each other with gaps; `unavoidable` are the tokens that nobody has computed yet."""

    def __init__(self, number: int, turns: int) -> None:
        self.name = f"p{number}"
        self.turns = turns
        self.unavoidable = 0
        self._gap: int | None = 0
        """Steps until it goes on; None while a turn of it runs."""
        self._random = Random(number)
        self._context: list[int] = []

    def step(self, bench: _Bench) -> None:
        """A step passes; the next turn begins when its time has come."""
        if self._gap is not None and self.turns:
            self._gap -= 1
            if self._gap <= 0:
                self._go_on(bench)

    def _go_on(self, bench: _Bench) -> None:
        new = [self._random.randrange(10, 1000) for _ in range(_NEW)]
        # The last token that was sampled has no KV yet.
        self.unavoidable += len(new) + bool(self._context)
        self._context += new
        self._gap = None
        self.turns -= 1
        bench.submit(self.name, self._context, _SAMPLED, self._answered)

    def _answered(self, reply: GenerateReply) -> None:
        self._context += reply.token_ids
        self._gap = self._random.randint(1, _LONGEST_GAP)


def _programs(tell: Tell, model: Model, place: Path, *, tiered: bool, turns: int) -> None:
    working_set = _PROGRAMS * turns * (_NEW + _SAMPLED)
    lower = LowerTier(model.shape, working_set, place) if tiered else None
    bench = _Bench(model, kv_tokens=int(working_set / 1.5), lower=lower)
    programs = [_Program(number, turns) for number in range(_PROGRAMS)]
    before_s = process_time()
    _drive(bench, programs)
    spent_s = process_time() - before_s
    ratio = bench.core.load().prefilled_tokens / sum(program.unavoidable for program in programs)
    how = "with_lower_tier" if tiered else "without_lower_tier"
    tell(f"engine_prefilled_over_unavoidable_{how}", ratio, "", "<= 1.1" if tiered else None)
    tell(f"engine_programs_{how}", 60 * len(programs) / spent_s, "programs per cpu-minute")


def _drive(bench: _Bench, programs: list[_Program]) -> None:
    while bench.core.busy or any(program.turns for program in programs):
        for program in programs:
            program.step(bench)
        if bench.core.busy:
            bench.core.step()


def _tokens(seed: int, count: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(10, 1000) for _ in range(count)]
