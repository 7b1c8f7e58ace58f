"""From the settings to a source of guesses, and what a step of this model costs here."""

import time
from collections.abc import Callable

import torch

from sostenuto.runtime.engines.embedded.attention import Chunk, Step
from sostenuto.runtime.engines.embedded.model import Model
from sostenuto.runtime.engines.embedded.settings import EmbeddedSettings
from sostenuto.runtime.engines.embedded.speculation.lengths import StepCost, measure
from sostenuto.runtime.engines.embedded.speculation.lookup import PromptLookup
from sostenuto.runtime.engines.embedded.speculation.speculator import Speculator

_MOST_MEASURED = 128


def speculator_for(model: Model, settings: EmbeddedSettings) -> Speculator | None:
    """What the settings ask for."""
    if settings.speculation is None:
        return None
    tokens = settings.concurrency * (1 + settings.draft_tokens)
    return Speculator(PromptLookup(), most=settings.draft_tokens, step_s=step_cost(model, tokens))


def step_cost(model: Model, most: int) -> StepCost:
    """Of a pass whose every token is drawn from, by tokens: 1, 2, 4 and so on to `most`, or 128."""
    points = [1 << power for power in range(8) if 1 << power <= min(most, _MOST_MEASURED)]
    # Processor time: other processes of the machine are no part of the cost.
    return measure(_pass(model, points[-1]), points, time.process_time)


def _pass(model: Model, most: int) -> Callable[[int], None]:
    keys, values = model.shape.empty(most)
    device = model.shape.device

    @torch.no_grad()
    def run(tokens: int) -> None:
        places = torch.arange(tokens, device=device)
        step = Step((), (Chunk(0, keys, values, 0, tokens),))
        logits = model.forward(places % model.tokenizer_size, places, places, step)
        logits.float().softmax(-1).sum().item()

    return run
