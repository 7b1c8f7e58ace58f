"""Tokens as clients read them: texts, bytes and log-probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sostenuto.runtime.rendering.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class TokenText:
    """One token.  A character may span several of them."""

    token_id: int
    text: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()

    def by_id(self) -> "TokenText":
        """Named by ids instead of texts, which several tokens may share."""
        top = tuple((token_id, f"token_id:{token_id}", value) for token_id, _, value in self.top)
        return replace(self, text=f"token_id:{self.token_id}", top=top)


class Texts:
    """Of one model."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._known: dict[int, str] = {}

    def encode(self, text: str) -> list[int]:
        """A prompt that is plain text; control tokens in it stay text."""
        disguise = self._vocabulary.disguise([text])
        return self._vocabulary.encode(disguise.hide(text), disguise)

    @property
    def end(self) -> int:
        """Above the highest id of a token."""
        return self._vocabulary.end

    def decode(self, token_ids: Sequence[int], *, special: bool = True) -> str:
        """`special`: whether special tokens are shown, too."""
        return self._vocabulary.decode(token_ids, special=special)

    def token(self, token_id: int) -> str:
        """Of the token alone."""
        if token_id not in self._known:
            self._known[token_id] = self._vocabulary.decode([token_id])
        return self._known[token_id]

    def logprobs(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        top: Sequence[Sequence[tuple[int, float]]] | None,
    ) -> list[TokenText]:
        return [
            TokenText(
                token_id,
                self.token(token_id),
                logprob,
                tuple((id_, self.token(id_), value) for id_, value in (top[index] if top else ())),
            )
            for index, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True))
        ]
