"""llguidance, with the limits that hold for every grammar.

Imported only where a grammar is asked for: the library is optional.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

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
    bos_token_id: None = None

    def __call__(self, text: str) -> list[int]:
        return self.encode(text)


def tokenizer_of(
    tokens: Sequence[bytes], special: Sequence[int], encode: Callable[[str], list[int]]
) -> LLTokenizer:
    """Of tokens by id; the id after the last one stands for the end of the text."""
    end = len(tokens)
    vocabulary = _Vocabulary([*tokens, b"<end>"], [*special, end], end, encode)
    return LLTokenizer(TokenizerWrapper(vocabulary))


def matcher_of(kind: str, text: str, tokenizer: LLTokenizer) -> LLMatcher:
    """A matcher at its start; ValueError says what is wrong with the grammar."""
    match kind:
        case "json_schema":
            grammar = LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": _BLANKS})
        case "regex":
            grammar = LLMatcher.grammar_from_regex(text)
        case _:
            grammar = LLMatcher.grammar_from_lark(text)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    if matcher.is_error():
        raise ValueError(said(matcher.get_error()))
    return matcher


def said(error: str) -> str:
    """An error in one short line."""
    return " ".join(error.split())[:_SHOWN_CHARACTERS]
