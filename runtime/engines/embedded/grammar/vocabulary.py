"""The bytes that each token adds to a text, whatever the tokenizer's decoder does."""

import re
import string
from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NO_TEXT = "\ufffd"


def special_ids(tokenizer: Tokenizer) -> list[int]:
    """Tokens that are no text, and have none when they are left out."""
    added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
    return sorted(token for token, entry in added.items() if entry.special)


def token_bytes(tokenizer: Tokenizer, size: int) -> list[bytes]:
    """Of tokens 0 to size - 1, each in the middle of a text; empty: it adds nothing.

    What a token decodes to behind another one is what it adds.  Only where that is a part of a character
    do its bytes come from its name, by the two conventions for that.
    """
    anchor = _anchor(tokenizer, size)
    before = tokenizer.decode([anchor], skip_special_tokens=False)
    texts: Sequence[str] = tokenizer.decode_batch(
        [[anchor, token] for token in range(size)], skip_special_tokens=False
    )
    return [_added(tokenizer, token, before, text) for token, text in enumerate(texts)]


def _anchor(tokenizer: Tokenizer, size: int) -> int:
    """A token that is one letter and nothing else; not a byte, which would be one character with others."""
    for token in range(size):
        letter = tokenizer.decode([token], skip_special_tokens=False)
        is_byte = _BYTE.fullmatch(tokenizer.id_to_token(token) or "")
        if letter and letter in string.ascii_letters and not is_byte:
            return token
    return 0


def _added(tokenizer: Tokenizer, token: int, before: str, text: str) -> bytes:
    if not text.startswith(before):
        return b""
    added = text[len(before) :]
    if _NO_TEXT not in added:
        return added.encode()
    name = tokenizer.id_to_token(token) or ""
    if match := _BYTE.fullmatch(name):
        return bytes([int(match[1], 16)])
    return bytes(_BYTE_OF[character] for character in name if character in _BYTE_OF)


def _bytes_by_character() -> dict[str, int]:
    """How byte-level BPE names bytes (Radford et al. 2019): what cannot be printed from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(256 + i): byte for i, byte in enumerate(others)},
    }


_BYTE_OF = _bytes_by_character()
