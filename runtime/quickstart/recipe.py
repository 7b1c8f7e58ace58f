"""The quickstart's recipe: sizes, steps and rates."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A Llama of about half a million parameters, embeddings tied."""

    layers: int = 2
    hidden: int = 128
    heads: int = 4
    feed_forward: int = 384
    context_tokens: int = 512


@dataclass(frozen=True, slots=True)
class CopyShape:
    """One sequence of copying: fresh random tokens, then spans of them again."""

    fresh_tokens: int = 32
    spans: int = 8
    span_tokens: int = 4

    @property
    def tokens(self) -> int:
        return self.fresh_tokens + self.spans * self.span_tokens
