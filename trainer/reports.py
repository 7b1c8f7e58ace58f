"""What the trainer answers.  Values only, no torch, so that the runtime can read them."""

from dataclasses import dataclass

from sostenuto.types import Version


@dataclass(frozen=True, slots=True)
class TrainerFacts:
    """The model as the trainer holds it."""

    parameters: int
    dtype: str
    architecture: str
    vocabulary_size: int
    """Rows of the output layer."""
    tokenizer_size: int
    """Rows with a text; the others are masked out of every distribution."""
    context_tokens: int
    weight_bytes: int
    version: Version | None
    """None when the weights have moved since the last publication."""
    step: int


@dataclass(frozen=True, slots=True)
class StepReport:
    """One optimizer step.  Means are over the batch's masked tokens, before the weights moved."""

    step: int
    """Number of the step, from 1; unchanged when it was refused."""
    loss: float
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    entropy: float
    """Mean -log p of the recorded choices: the policy's entropy where they are its own samples."""
    mean_abs_dlogp: float | None
    """|log p trainer now - log p engine|; None without behaviour log-probabilities, like the next two."""
    max_abs_dlogp: float | None
    mismatch_k3: float | None
    """Mean exp(d) - 1 - d, d = log p trainer now - log p engine: an estimate of KL(engine || trainer)."""
    engine_difference: float | None
    """Mean |log p trainer - log p engine|, both under the weights that sampled; None where unknown."""
    update_difference: float | None
    """Mean |log p trainer now - log p trainer under the weights that sampled|; None where unknown."""
    clip_share: float
    """Tokens whose gradient the loss's bounds hold back."""
    truncated_share: float
    """Tokens whose importance weight met a bound."""
    rejected_share: float
    """Tokens that were left out because the engine sampled them too differently."""
    kl: float | None
    """Mean of the estimate of KL(policy || reference) in the loss; None without one."""
    samples: int
    micro_batches: int
    tokens: int
    """Through the model, without padding."""
    masked_tokens: int
    elapsed_s: float
    cpu_s: float
    refused: str = ""
    """Why the weights were left as they were; empty for a step that counts."""
    draft_loss: float | None = None
    """Mean -log p of the batch's masked tokens by the draft model that learns from them."""
    teacher_kl: float | None = None
    """Mean of the estimate of KL(student || teacher), as the teaching has it; None without a teacher."""
    value_loss: float | None = None
    """Half the squared error of the critic's values; None without a critic, like the next two."""
    explained_variance: float | None = None
    """1 - Var(return - value) / Var(return), 0 where values say no more than their mean; None also where all
    returns are equal."""
    value_clip_share: float | None = None
    """Tokens whose value has moved as far as the critic's clip allows."""


@dataclass(frozen=True, slots=True)
class ScorerFacts:
    """What a model that scores whole texts says of itself."""

    labels: list[str]
    """One for each of its outputs."""
    vocabulary_size: int
    context_tokens: int
    """0: not told."""


@dataclass(frozen=True, slots=True)
class Exactness:
    """How well a model copies demonstrations when fed the right tokens."""

    exact_share: float
    """Samples whose every masked token is the most likely one."""
    token_accuracy: float
    samples: int
    masked_tokens: int
