"""A model that gives numbers for a whole text: sequence classification, or a value head of one output."""

from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from sostenuto.errors import ConfigError, RecordError
from sostenuto.trainer.loading import load_folder
from sostenuto.trainer.reports import ScorerFacts


class Scorer:
    """What a local folder holds.  Texts run one at a time, so that none depends on another's length."""

    def __init__(self, directory: Path, dtype: str, device: str) -> None:
        """ConfigError for a folder without such a model, its head included, or a device that is not there."""
        self._module = _load(directory, dtype)
        try:
            cast("Any", self._module).to(device)
        except (RuntimeError, AssertionError) as error:
            raise ConfigError(f"device {device!r} cannot be used: {error}; give 'cpu'") from error
        self._module.eval()
        self._device = device

    def facts(self) -> ScorerFacts:
        config = cast("Any", self._module.config)
        named = {int(index): str(name) for index, name in config.id2label.items()}
        return ScorerFacts(
            labels=[named.get(index, f"LABEL_{index}") for index in range(int(config.num_labels))],
            vocabulary_size=int(config.get_text_config().vocab_size),
            context_tokens=int(getattr(config.get_text_config(), "max_position_embeddings", 0) or 0),
        )

    def score(self, texts: list[list[int]]) -> list[list[float]]:
        """The outputs for each text, one for each label.  RecordError for ids that it does not have."""
        rows = self.facts().vocabulary_size
        if any(not ids or max(ids) >= rows or min(ids) < 0 for ids in texts):
            raise RecordError(f"score: a text is empty or has an id beyond the model's {rows}")
        with torch.no_grad():
            return [self._outputs(ids) for ids in texts]

    def _outputs(self, ids: list[int]) -> list[float]:
        row = torch.tensor([ids], device=self._device)
        found = cast("Any", self._module)(input_ids=row, attention_mask=torch.ones_like(row))
        return [float(number) for number in found.logits[0].float().tolist()]


def _load(directory: Path, dtype: str) -> PreTrainedModel:
    module, wrong = load_folder(AutoModelForSequenceClassification, directory, dtype)
    # Its head would be drawn at random, and every reward with it.
    if wrong:
        raise ConfigError(
            f"model {directory}: is no model of sequence classification: {wrong}; give one that was saved "
            "as AutoModelForSequenceClassification, with its head"
        )
    return module
