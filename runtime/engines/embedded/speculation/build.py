"""From the settings to a source of guesses, and what passes cost on this machine."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sostenuto.runtime.engines.embedded.attention import Chunk, Step
from sostenuto.runtime.engines.embedded.model import Model, load
from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.runtime.engines.embedded.settings import EmbeddedSettings
from sostenuto.runtime.engines.embedded.speculation.draft import DraftModel
from sostenuto.runtime.engines.embedded.speculation.lengths import StepCost, measure
from sostenuto.runtime.engines.embedded.speculation.lookup import PromptLookup
from sostenuto.runtime.engines.embedded.speculation.mtp import Head, MultiToken, load_head
from sostenuto.runtime.engines.embedded.speculation.speculator import Source, Speculator

_MOST_MEASURED = 128


@dataclass(frozen=True, slots=True)
class Drafting:
    """What is there to guess with, and the model as it is served with it."""

    settings: EmbeddedSettings
    model: Model
    draft: Model | None = None
    head: Head | None = None

    @property
    def token_bytes(self) -> int:
        """KV of one token that the drafter keeps beside the pool."""
        return self.draft.shape.token_bytes if self.draft else 0

    def speculator(self) -> Speculator | None:
        """None when the settings ask for none; measures what passes cost."""
        if self.settings.speculation is None:
            return None
        most = self.settings.concurrency * (1 + self.settings.draft_tokens)
        return Speculator(
            self._source(), most=self.settings.draft_tokens, step_s=_measured(_pass(self.model), most)
        )

    def _source(self) -> Source:
        rows = self.settings.concurrency
        if self.draft is not None:
            cost = _measured(_pass(self.draft), rows)
            return DraftModel(self.draft, budget_tokens=self.settings.kv_tokens, step_s=cost)
        if self.head is not None:
            return MultiToken(self.head, step_s=_measured(_head_pass(self.head, self.model), rows))
        return PromptLookup()


def check_speculation(settings: EmbeddedSettings) -> None:
    """Refuse settings that do not go together, before anything is loaded."""
    if settings.speculation == "draft" and settings.draft_model is None:
        raise _refused("--speculation draft needs --draft-model", "give the folder of a smaller model")
    if settings.speculation != "draft" and settings.draft_model is not None:
        asked = settings.speculation or "none"
        raise _refused(
            f"--draft-model is used by --speculation draft, not by {asked}", "leave one of them out"
        )


def drafting_for(model: Model, settings: EmbeddedSettings) -> Drafting:
    """Load what the settings ask for, or raise Refusal."""
    if settings.speculation == "mtp":
        model, head = load_head(model, settings.model)
        return Drafting(settings, model, head=head)
    if settings.draft_model is not None:
        draft = load(settings.draft_model, dtype=settings.dtype, device=settings.device)
        if draft.tokenizer.get_vocab() != model.tokenizer.get_vocab():
            message = f"--draft-model {settings.draft_model}: its tokenizer is not that of {settings.model}"
            raise _refused(message, "use a draft model of the same family")
        return Drafting(settings, model, draft=draft)
    return Drafting(settings, model)


def _refused(message: str, remedy: str) -> Refusal:
    return Refusal(400, "speculation", message, remedy)


def _measured(run: Callable[[int], None], most: int) -> StepCost:
    """By tokens: 1, 2, 4 and so on to `most`, or 128."""
    points = [1 << power for power in range(8) if 1 << power <= min(most, _MOST_MEASURED)]
    # Processor time: other processes of the machine are no part of the cost.
    return measure(run, points, time.process_time)


def _pass(model: Model) -> Callable[[int], None]:
    """A pass whose every token is drawn from."""
    keys, values = model.shape.empty(_MOST_MEASURED)
    device = model.shape.device

    @torch.no_grad()
    def run(tokens: int) -> None:
        places = torch.arange(tokens, device=device)
        step = Step((), (Chunk(0, keys, values, 0, tokens),))
        _drawn(model.forward(places % model.tokenizer_size, places, places, step))

    return run


def _head_pass(head: Head, model: Model) -> Callable[[int], None]:
    keys, values = model.shape.empty(_MOST_MEASURED)
    device = model.shape.device
    hidden = torch.zeros(_MOST_MEASURED, head.hidden_size, dtype=model.shape.dtype, device=device)

    @torch.no_grad()
    def run(tokens: int) -> None:
        places = torch.arange(tokens, device=device)
        step = Step((), (Chunk(0, keys, values, 0, tokens),))
        after = head.advance(places % model.tokenizer_size, hidden[:tokens], places, step)
        _drawn(head.logits(after))

    return run


def _drawn(logits: torch.Tensor) -> None:
    logits.float().softmax(-1).sum().item()
