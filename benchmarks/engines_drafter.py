"""A draft model for a larger one: its own first layers, taught its distribution on given text."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from sostenuto.runtime.rendering.demonstration import Demonstration
from sostenuto.trainer.tensors import backpropagate

LAYERS = 4
_RATE = 2e-4
_CACHE = Path(__file__).parent.parent / ".cache" / "benchmarks"


def taught_drafter(folder: Path, shown: Sequence[Demonstration]) -> Path:
    """The drafter's folder, kept for the next time.

    One step on each of `shown`: the forward KL from the model to the drafter at the assistant's tokens
    (Zhou et al. 2023, DistillSpec).
    """
    place = _CACHE / f"drafter-of-{folder.name}-{LAYERS}-layers-{len(shown)}-steps"
    if not place.is_dir():
        teacher, drafter = _load(folder), _first_layers(folder)
        optimizer = torch.optim.AdamW(drafter.parameters(), lr=_RATE, weight_decay=0.0)
        for one in shown:
            backpropagate(_divergence(teacher, drafter, one))
            cast("Any", torch.nn.utils).clip_grad_norm_(drafter.parameters(), 1.0)
            cast("Any", optimizer).step()
            optimizer.zero_grad()
        _save(drafter, folder, place)
    return place


def _load(folder: Path, dtype: torch.dtype = torch.bfloat16, **options: object) -> Any:  # noqa: ANN401
    from transformers import AutoModelForCausalLM

    library = cast("Any", AutoModelForCausalLM)
    return library.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa", **options).eval()


def _first_layers(folder: Path) -> Any:  # noqa: ANN401 - transformers' own types say as much
    return _load(folder, torch.float32, num_hidden_layers=LAYERS)


def _divergence(teacher: Any, drafter: Any, shown: Demonstration) -> Tensor:  # noqa: ANN401
    ids = torch.tensor(shown.token_ids[None], dtype=torch.long)
    before = torch.tensor(shown.mask[1:])
    with torch.no_grad():
        wanted = _logits(teacher, ids, before).float().log_softmax(-1)
    with torch.autocast("cpu", torch.bfloat16):
        found = _logits(drafter, ids, before)
    found = found.float().log_softmax(-1)
    return (wanted.exp() * (wanted - found)).sum(-1).mean()


def _logits(module: Any, ids: Tensor, before: Tensor) -> Tensor:  # noqa: ANN401
    """At the chosen places alone: the output layer is the larger half of a drafter."""
    hidden = module.model(ids, use_cache=False).last_hidden_state[0, :-1]
    return module.lm_head(hidden[before])


def _save(drafter: Any, folder: Path, place: Path) -> None:  # noqa: ANN401
    part = place.with_name(f"{place.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    drafter.to(torch.bfloat16).save_pretrained(part)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, part)
    part.rename(place)
