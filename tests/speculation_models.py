"""Cores that guess, sources of guesses that are as good as a test wants, and exact joint distributions."""

from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from engine_models import TOKENIZER_SIZE, Desk, make_core
from sostenuto.runtime.engines.embedded import attention
from sostenuto.runtime.engines.embedded.packing import Plan
from sostenuto.runtime.engines.embedded.speculation.speculator import Source, Speculator
from sostenuto.runtime.engines.embedded.tensors import use_attention
from sostenuto.runtime.engines.embedded.turn import Turn

TEMPERATURE = 0.4


def guessing_desk(
    folder: Path,
    source: Source,
    *,
    kv_tokens: int = 4096,
    most: int = 4,
    concurrency: int = 16,
    lower_tokens: int = 0,
) -> Desk:
    """A core that guesses as far as it can in every step: guesses cost nothing."""
    speculator = Speculator(source, most=most, step_s=lambda _: 1.0)
    return Desk(
        make_core(
            folder,
            kv_tokens=kv_tokens,
            concurrency=concurrency,
            lower_tokens=lower_tokens,
            speculator=speculator,
        )
    )


class Foreseen:
    """Guesses what a request was answered before, with every n-th token wrong."""

    name = "prompt"
    weights = None

    def __init__(self, answers: dict[str, list[int]], wrong_every: int = 10**9) -> None:
        self._answers = answers
        self._wrong_every = wrong_every

    def ready(self, turn: Turn, most: int) -> int:
        known = self._answers[turn.request.request_id][turn.generated : turn.generated + most]
        for i, token in enumerate(known):
            wrong = (turn.generated + i) % self._wrong_every == self._wrong_every - 1
            turn.tokens[turn.length + i] = (token + wrong) % TOKENIZER_SIZE
        return len(known)

    def token_s(self, rows: int) -> float:
        del rows
        return 0.0

    def draft(self, chosen: Sequence[tuple[Turn, int]]) -> None:
        for turn, count in chosen:
            turn.drafted = count

    def observe(self, planned: Plan, drawn: Sequence[int]) -> None:
        """It knows already."""

    def forget(self, program_id: str) -> None:
        """It keeps nothing."""

    def clear(self) -> None:
        """It has no weights."""


def guesses(desk: Desk) -> tuple[int, int]:
    """Drafted and accepted so far."""
    speculation = desk.core.load().speculation
    assert speculation is not None
    return speculation.total.drafted, speculation.total.accepted


def draw_many(desk: Desk, context: list[int], *, count: int) -> list[tuple[int, ...]]:
    """The next three tokens, drawn with as many seeds at `TEMPERATURE`."""
    for seed in range(count):
        sampling = {"seed": seed, "temperature": TEMPERATURE}
        desk.submit(str(seed), context, max_new_tokens=4, sampling=sampling, hold=False)
    desk.run(steps=count)
    return [tuple(desk.reply(str(seed)).token_ids[:3]) for seed in range(count)]


def joint(module: PreTrainedModel, context: list[int], temperature: float) -> NDArray[np.float64]:
    """Probability of each three next tokens, (V, V, V), by one eager pass over every two of them."""
    pairs = list(product(range(TOKENIZER_SIZE), repeat=2))
    use_attention(module, "eager")
    with torch.no_grad():
        ids = torch.tensor([[*context, *pair] for pair in pairs])
        logits = cast("Any", module)(input_ids=ids).logits[:, -3:, :TOKENIZER_SIZE].double()
    use_attention(module, attention.NAME)
    shares = (logits / temperature).softmax(-1).view(TOKENIZER_SIZE, TOKENIZER_SIZE, 3, -1).numpy()
    first, second, third = shares[0, 0, 0], shares[:, 0, 1], shares[:, :, 2]
    return first[:, None, None] * second[:, :, None] * third


def chi_square_p(expected: NDArray[np.float64], drawn: list[tuple[int, ...]]) -> float:
    """That `drawn` is of `expected`, (V, V, V): likely outcomes one by one, and all others together."""
    flat = expected.ravel()
    likely = np.flatnonzero(flat * len(drawn) >= 10)
    counts = Counter(int(np.ravel_multi_index(tokens, expected.shape)) for tokens in drawn)
    shares = np.append(flat[likely], 1 - flat[likely].sum())
    seen = np.array([counts[int(cell)] for cell in likely])
    seen = np.append(seen, len(drawn) - seen.sum())
    statistic = float(((seen - shares * len(drawn)) ** 2 / (shares * len(drawn))).sum())
    # The survival function of chi-square is the regularised upper incomplete gamma function.
    halves = torch.tensor([len(likely) / 2, statistic / 2], dtype=torch.float64)
    return float(cast("Any", torch).special.gammaincc(halves[0], halves[1]))
