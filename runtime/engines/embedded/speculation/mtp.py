"""A multi-token-prediction head: the layer with which a model was trained to tell the token after the next.

As in DeepSeek-V3 (2024, section 2.2): embedding of token i + 1 and hidden state of token i, a norm each,
are projected together and go through one decoder layer; the model's own output layer follows.  For more
than one guess the layer is applied to its own output.

Its KV is one more layer of the model's, so whatever keeps, shares or moves KV does the same with it.  That
of the last token of a shared prefix may be of another next token: a guess may be worse for it.

Shapes: T = packed tokens, C = hidden size.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import safe_open
from transformers.modeling_layers import MtpModel

from sostenuto.runtime.engines.embedded.attention import Chunk, Step
from sostenuto.runtime.engines.embedded.model import Model
from sostenuto.runtime.engines.embedded.packing import Plan
from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.runtime.engines.embedded.sampling import draw_at
from sostenuto.runtime.engines.embedded.speculation.lengths import StepCost
from sostenuto.runtime.engines.embedded.tensors import as_array, as_tensor
from sostenuto.runtime.engines.embedded.turn import Turn


class Head:
    """The layer, typed, over a model that it shares embedding, positions and output layer with."""

    def __init__(self, model: Model, mtp: MtpModel) -> None:
        self._mtp: Any = mtp
        self._model = model
        self.weights = torch.nn.ModuleDict({"layers": self._mtp.layers})
        self.hidden_size: int = self._mtp.config.hidden_size
        self._seen: torch.Tensor | None = None
        decoder: torch.nn.Module = cast("Any", model.module).get_decoder()
        decoder.register_forward_hook(self._keep)

    def _keep(self, _module: torch.nn.Module, _inputs: object, output: object) -> None:
        self._seen = cast("Any", output).last_hidden_state[0]

    def take_hidden(self) -> torch.Tensor:
        """(T, C) of the model's last forward pass, after its last norm."""
        assert self._seen is not None
        seen, self._seen = self._seen, None
        return seen

    def advance(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, step: Step
    ) -> torch.Tensor:
        """(T, C) after tokens that follow `hidden` (T, C), whose places in the KV are `positions`."""
        embedded = self._mtp.embed_tokens(token_ids[None])
        rotary = self._mtp.rotary_emb(embedded, position_ids=positions[None])
        return self._mtp.layers[0](
            embedded, hidden[None], position_embeddings=rotary, attention_mask=None,
            position_ids=positions[None], cache=None, slots=step,
        )[0]  # fmt: skip

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(N, tokenizer_size) of (N, C)."""
        return self._mtp.shared_head(hidden)[:, : self._model.tokenizer_size]


def load_head(model: Model, folder: Path) -> tuple[Model, Head]:
    """The head that the model's folder has, and the model with a layer of KV more; or Refusal."""
    module: Any = model.module
    layers = module.config.get_text_config().num_hidden_layers
    pattern = rf"^model\.layers\.{layers}\.|^mtp\."
    if not any(re.search(pattern, name) for name in _tensor_names(folder)):
        message = f"--speculation mtp: model folder {folder} has no multi-token-prediction layer"
        remedy = "use a checkpoint that ships one, or --speculation prompt or draft"
        raise Refusal(400, "speculation", message, remedy)
    module._keys_to_ignore_on_load_unexpected = [pattern]  # noqa: SLF001 - by it the library finds them
    try:
        mtp: Any = cast("Any", MtpModel).from_pretrained(module)
        mtp.to(module.device).eval().requires_grad_(False)
        for part in mtp.layers[0].modules():
            if hasattr(part, "layer_idx"):
                part.layer_idx = model.shape.layers
        wider = replace(model, shape=replace(model.shape, layers=model.shape.layers + 1))
        head = Head(wider, mtp)
        _try(head, wider)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as exc:
        message = f"--speculation mtp: the layer of {model.architecture} cannot be run: {exc}"
        raise Refusal(400, "speculation", message, "use --speculation prompt or draft") from exc
    return wider, head


@torch.no_grad()
def _try(head: Head, model: Model) -> None:
    """Run it once; what does not fit is found before anything is served."""
    keys, values = model.shape.empty(2)
    tokens = torch.arange(2, device=model.shape.device)
    step = Step((), (Chunk(0, keys, values, 0, 2),))
    model.forward(tokens, tokens, tokens, step)
    head.logits(head.advance(tokens, head.take_hidden(), tokens, step))


def _tensor_names(folder: Path) -> list[str]:
    names: list[str] = []
    for path in folder.glob("*.safetensors"):
        with cast("Any", safe_open)(path, framework="pt") as file:
            names.extend(file.keys())
    return names


@dataclass(frozen=True, slots=True, eq=False)
class _Last:
    """What the head said after the last step's tokens of one request."""

    start: int
    """Position of the first."""
    hidden: torch.Tensor
    """(tokens, C)"""


class MultiToken:
    """A source of guesses that goes along with every pass of the model."""

    name = "mtp"

    def __init__(self, head: Head, *, step_s: StepCost) -> None:
        self._head = head
        self.weights: torch.nn.Module = head.weights
        self._step_s = step_s
        self._last: dict[Turn, _Last] = {}

    def ready(self, turn: Turn, most: int) -> int:
        """Each request that decodes took part in the last step."""
        return most if turn in self._last else 0

    def token_s(self, rows: int) -> float:
        """A pass of the head gives one guess for each request."""
        return self._step_s(rows) / rows

    def observe(self, planned: Plan, drawn: Sequence[int]) -> None:
        """Compute the head's KV of the tokens that the model has just computed."""
        positions = as_array(planned.positions)
        following, first = np.empty(len(positions), dtype=np.int64), 0
        for turn, count in planned.fed:
            start = int(positions[first]) + 1
            known = turn.tokens[start : start + count]
            following[first : first + len(known)] = known
            first += count
        if drawn:
            following[as_array(planned.wanted)] = drawn
        hidden = self._head.take_hidden()
        after = self._head.advance(
            as_tensor(following, hidden.device), hidden, planned.positions, planned.step
        )
        self._remember(planned, after)

    def _remember(self, planned: Plan, after: torch.Tensor) -> None:
        self._last, place = {}, 0
        for turn in planned.sampling:
            count = 1 + turn.drafted
            self._last[turn] = _Last(turn.length - 1, after[planned.wanted[place : place + count]])
            place += count

    def draft(self, chosen: Sequence[tuple[Turn, int]]) -> None:
        """The first guess follows from what the last step left, each other one from a pass of the head."""
        last = [(turn, self._last[turn]) for turn, _ in chosen]
        hidden = torch.stack([one.hidden[turn.length - 2 - one.start] for turn, one in last])
        drafts = list(chosen)
        while True:
            places = [(turn, turn.length + turn.drafted) for turn, _ in drafts]
            tokens = draw_at(self._head.logits(hidden), places)
            for (turn, position), token in zip(places, tokens, strict=True):
                turn.tokens[position] = token
                turn.drafted += 1
            going = [i for i, (turn, count) in enumerate(drafts) if turn.drafted < count]
            if not going:
                return
            drafts = [drafts[i] for i in going]
            hidden = self._advance([turn for turn, _ in drafts], hidden[going])

    def _advance(self, turns: Sequence[Turn], hidden: torch.Tensor) -> torch.Tensor:
        """After the last guess of each; its KV lies where the model's will, which is computed anew."""
        places = [turn.length + turn.drafted - 2 for turn in turns]
        chunks: list[Chunk] = []
        for i, (turn, place) in enumerate(zip(turns, places, strict=True)):
            assert turn.lane is not None
            keys, values = turn.lane.keys[:, turn.row], turn.lane.values[:, turn.row]
            chunks.append(Chunk(i, keys, values, place, 1))
        guesses = [int(turn.tokens[place + 1]) for turn, place in zip(turns, places, strict=True)]
        token_ids = torch.tensor(guesses, device=hidden.device)
        positions = torch.tensor(places, device=hidden.device)
        return self._head.advance(token_ids, hidden, positions, Step((), tuple(chunks)))

    def forget(self, program_id: str) -> None:
        """Its KV goes with the model's."""

    def clear(self) -> None:
        """What it said last, it said with other weights."""
        self._last.clear()
