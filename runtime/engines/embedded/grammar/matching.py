"""llguidance, with the limits that hold for every grammar.

Imported only where a grammar is asked for: the library is optional.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from sostenuto.runtime.engines.embedded.grammar.structural import lark_of

# Enough for JSON that is indented; without a bound a hot policy writes blanks for ever.
_BLANKS = r"[ \n]{0,24}"
_LIMITS = LLParserLimits(max_lexer_states=100_000, verbose_errors=False)
_SHOWN_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """What llguidance asks of a tokenizer, and one token more: the end, which no model has."""

    tokens: Sequence[bytes]
    special_token_ids: Sequence[int]
    eos_token_id: int
    encode: Callable[[str], list[int]]
    by_bytes: Mapping[bytes, int]
    """Of tokens that are text."""
    longest: int
    """Bytes of one of them."""
    bos_token_id: None = None

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of these very bytes; tokenizers that mark where a text begins would add to them."""
        token_ids = self.encode(text.decode(errors="replace"))
        is_exact = b"".join(self.tokens[token] for token in token_ids) == text
        return token_ids if is_exact else self._longest_first(text)

    def _longest_first(self, text: bytes) -> list[int]:
        token_ids: list[int] = []
        while text:
            sizes = range(min(len(text), self.longest), 0, -1)
            size = next((size for size in sizes if text[:size] in self.by_bytes), 0)
            if not size:
                break
            token_ids.append(self.by_bytes[text[:size]])
            text = text[size:]
        return token_ids


def tokenizer_of(
    tokens: Sequence[bytes], special: Sequence[int], encode: Callable[[str], list[int]]
) -> LLTokenizer:
    """Of tokens by id; the id after the last one stands for the end of the text."""
    end = len(tokens)
    no_text = set(special)
    by_bytes = {text: token for token, text in enumerate(tokens) if text and token not in no_text}
    longest = max(map(len, by_bytes), default=0)
    vocabulary = _Vocabulary([*tokens, b"<end>"], [*special, end], end, encode, by_bytes, longest)
    return LLTokenizer(TokenizerWrapper(vocabulary))


def matcher_of(kind: str, text: str, tokenizer: LLTokenizer, controls: Mapping[str, int]) -> LLMatcher:
    """A matcher at its start; ValueError says what is wrong with the grammar.

    `controls`: by their names the tokens that a structural tag writes as one; special ones to `tokenizer`.
    """
    match kind:
        case "json_schema":
            grammar = LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": _BLANKS})
        case "regex":
            grammar = LLMatcher.grammar_from_regex(text)
        case "structural_tag":
            grammar = LLMatcher.grammar_from_lark(lark_of(text, controls))
        case _:
            grammar = LLMatcher.grammar_from_lark(text)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    if matcher.is_error():
        raise ValueError(said(matcher.get_error()))
    return matcher


def said(error: str) -> str:
    """An error in one short line."""
    return " ".join(error.split())[:_SHOWN_CHARACTERS]
