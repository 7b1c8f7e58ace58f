"""A second, smaller model that guesses: it draws from its own distribution with the noise of the position.

Where both models have the same distribution they draw the same token, so the guess is right.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sostenuto.runtime.engines.embedded.attention import Chunk, Step
from sostenuto.runtime.engines.embedded.model import Model
from sostenuto.runtime.engines.embedded.packing import Plan
from sostenuto.runtime.engines.embedded.sampling import draw_at
from sostenuto.runtime.engines.embedded.speculation.draft_kv import DraftKv, DraftRow
from sostenuto.runtime.engines.embedded.speculation.lengths import StepCost
from sostenuto.runtime.engines.embedded.tensors import as_tensor
from sostenuto.runtime.engines.embedded.turn import Turn

_CATCH_UP_TOKENS = 512
"""Context tokens that the draft model computes in one step, of all requests together."""


@dataclass(slots=True, eq=False)
class _Draft:
    """Of one request, in one step."""

    turn: Turn
    row: DraftRow
    count: int

    @property
    def missing(self) -> int:
        return self.turn.length + self.turn.drafted - len(self.row.tokens)


class DraftModel:
    """A source of guesses with weights and KV of its own."""

    name = "draft"

    def __init__(self, model: Model, *, budget_tokens: int, step_s: StepCost) -> None:
        self.model = model
        self.weights: torch.nn.Module = model.module
        self._kv = DraftKv(model.shape, budget_tokens=budget_tokens)
        self._step_s = step_s

    def ready(self, turn: Turn, most: int) -> int:
        """Its context may be shorter than the model's."""
        return max(0, min(most, self.model.context_tokens - turn.length))

    def token_s(self, rows: int) -> float:
        """A pass of the draft model gives one guess for each request."""
        return self._step_s(rows) / rows

    def draft(self, chosen: Sequence[tuple[Turn, int]]) -> None:
        """Those whose context the draft model has not all computed get guesses in a later step."""
        in_use = {turn.request.program_id for turn, _ in chosen}
        drafts: list[_Draft] = []
        for turn, count in chosen:
            row = self._kv.row(turn.request.program_id, turn.context, count, in_use)
            if row is not None and all(row is not other.row for other in drafts):
                drafts.append(_Draft(turn, row, count))
        drafts = self._caught_up(drafts)
        while drafts:
            self._guess(drafts)
            drafts = [draft for draft in drafts if draft.turn.drafted < draft.count]

    def observe(self, planned: Plan, drawn: Sequence[int]) -> None:
        """The contexts say everything."""

    def forget(self, program_id: str) -> None:
        self._kv.forget(program_id)

    def clear(self) -> None:
        """Forget all KV: it is of other weights."""
        self._kv.clear()

    def _caught_up(self, drafts: list[_Draft]) -> list[_Draft]:
        """Those whose context fits into this step; of the others as much is computed as does."""
        ready: list[_Draft] = []
        partly: list[tuple[_Draft, int]] = []
        budget = _CATCH_UP_TOKENS
        for draft in sorted(drafts, key=lambda draft: draft.missing):
            if draft.missing <= budget:
                ready.append(draft)
            elif budget:
                partly.append((draft, budget))
            budget -= min(draft.missing, budget)
        if partly:
            self._pass(partly)
        return ready

    def _guess(self, drafts: list[_Draft]) -> None:
        """One more guess for each."""
        logits = self._pass([(draft, draft.missing) for draft in drafts])
        places = [(draft.turn, draft.turn.length + draft.turn.drafted) for draft in drafts]
        for (turn, position), token in zip(places, draw_at(logits, places), strict=True):
            turn.tokens[position] = token
            turn.drafted += 1

    def _pass(self, fed: Sequence[tuple[_Draft, int]]) -> torch.Tensor:
        """Compute so many tokens of each; logits after the last of each."""
        chunks: list[Chunk] = []
        first = 0
        for draft, count in fed:
            row, start = draft.row, len(draft.row.tokens)
            chunks.append(Chunk(first, row.keys, row.values, start, count))
            row.tokens = draft.turn.tokens[: start + count].copy()
            first += count
        token_ids = np.concatenate([draft.row.tokens[-count:] for draft, count in fed])
        positions = np.concatenate([np.arange(chunk.start, chunk.start + chunk.count) for chunk in chunks])
        device = self.model.shape.device
        # The vocabulary of the model may be padded further than that of the draft model.
        known = np.minimum(token_ids, self.model.vocabulary_size - 1).astype(np.int64)
        wanted = torch.tensor([chunk.last - 1 for chunk in chunks], device=device)
        return self.model.forward(
            as_tensor(known, device), as_tensor(positions, device), wanted, Step((), tuple(chunks))
        )
