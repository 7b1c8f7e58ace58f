"""The engines' draft model, learning what the policy samples: its guesses stay right while that moves.

The loss is the cross-entropy on the sampled tokens.  They are drawn from the policy, so it is the forward
KL from the policy to the draft model and a constant (Zhou et al. 2023, DistillSpec, section 4).
"""

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from sostenuto.errors import ConfigError
from sostenuto.trainer.batching import MicroBatch, collate, plan
from sostenuto.trainer.logprobs import token_logprobs
from sostenuto.trainer.model import Policy, load_policy
from sostenuto.trainer.optimizer import Optimizer
from sostenuto.trainer.publication.manifest import DRAFT_PREFIX
from sostenuto.trainer.publication.snapshot import unique_tensors
from sostenuto.trainer.samples import Sample
from sostenuto.trainer.settings import LearnerSettings, Schedule
from sostenuto.trainer.tensors import backpropagate


class Drafter:
    """The weights of a draft model and their optimizer."""

    def __init__(self, model: Policy, source: Path, settings: LearnerSettings, rate: float) -> None:
        self.model = model
        self.source = source
        """The folder that it was read from."""
        self._microbatch_tokens = settings.microbatch_tokens
        schedule = Schedule(learning_rate=rate)
        self._optimizer = Optimizer(model.module, settings.model_copy(update={"schedule": schedule}))

    def learn(self, samples: list[Sample], temperature: float = 1.0) -> float | None:
        """One step on the masked tokens; their mean -log p before it, in nats.

        None: no sample has any within the model's context.
        """
        batches = self._batches(samples)
        if not batches:
            return None
        total = sum(len(batch.targets) for batch in batches)
        loss = sum(self._accumulate(batch, temperature, total) for batch in batches)
        self._optimizer.step()
        return loss

    def named(self) -> list[tuple[str, Tensor]]:
        """Its tensors under the names that they are published by."""
        state = unique_tensors(self.model.module.state_dict())
        return [(DRAFT_PREFIX + name, tensor) for name, tensor in state]

    def restore(self, folder: Path, dtype: str) -> None:
        """Take the weights that were saved in `folder`."""
        saved = load_policy(folder, dtype)
        try:
            self.model.module.load_state_dict(saved.module.state_dict())
        except RuntimeError as error:
            raise ConfigError(f"checkpoint {folder}: weights of another draft model: {error}") from error

    def _accumulate(self, batch: MicroBatch, temperature: float, total: int) -> float:
        loss = -token_logprobs(self.model, batch, temperature).sum() / total
        backpropagate(loss)
        self._optimizer.accumulate()
        return float(loss.detach())

    def _batches(self, samples: list[Sample]) -> list[MicroBatch]:
        context = self.model.context_tokens or max(map(len, samples), default=0)
        fits = [i for i, sample in enumerate(samples) if sample.masked_tokens and len(sample) <= context]
        groups = plan([len(samples[i]) for i in fits], self._microbatch_tokens, padded=not self.model.packs)
        flat, old = [1.0] * len(samples), [False] * len(samples)
        batches = [collate(samples, [fits[i] for i in group], flat, old) for group in groups]
        return [replace(batch, experts=None) for batch in batches]


def open_drafter(folder: str | None, policy: Policy, settings: LearnerSettings) -> Drafter | None:
    """What `settings` ask for.  ConfigError without a draft model, or for one with other tokens."""
    if settings.draft_learning_rate is None:
        return None
    if folder is None:
        raise ConfigError(
            "learner.draft_learning_rate: the engines have no draft model; give engine.draft_model, or leave "
            "it out"
        )
    model = load_policy(Path(folder), settings.dtype)
    if model.tokenizer_size != policy.tokenizer_size:
        raise ConfigError(
            f"engine.draft_model {folder}: its tokenizer has {model.tokenizer_size} tokens, that of the "
            f"model {policy.tokenizer_size}; use a draft model of the same family"
        )
    return Drafter(model, Path(folder), settings, settings.draft_learning_rate)
