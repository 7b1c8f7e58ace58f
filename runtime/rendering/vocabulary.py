"""A tokenizer in which text can never become a control token.

Control tokens are the special tokens and the added tokens that look like markup (`<...>`, `[...]`).
Two things keep them apart from text that only looks like them:

- `Disguise` replaces the first character of each look-alike in a message by a private-use stand-in
  before the template runs, so that what still reads as a control token was written by the template.
- `encode` runs on a copy of the tokenizer in which every control token has an unguessable name.  The
  template's control tokens are renamed, the stand-ins taken back, and the whole text encoded in one
  pass: the ids are those of the original tokenizer, with merges, prefixes and stripping as it does them.
"""

import json
import re
import secrets
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, cast

from tokenizers import Encoding, Tokenizer

from sostenuto.errors import ConfigError

_MARKUP = re.compile(r"<.+>|\[.+\]", re.DOTALL)
_STAND_INS = range(0xE000, 0xF8F0)
_OPEN, _CLOSE = "\uf8f0", "\uf8f1"
"""Around the secret names; never stand-ins."""


@dataclass(frozen=True, slots=True)
class Disguise:
    """Stand-ins for the first characters of control tokens.  Texts keep their length."""

    starts: re.Pattern[str] | None
    stand_ins: dict[int, int]
    originals: dict[int, int]

    def hide(self, text: str) -> str:
        """`text` with every look-alike broken; lone surrogates, which have no encoding, become `?`."""
        clean = text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
        if self.starts is None or not any(chr(code) in clean for code in self.stand_ins):
            return clean
        return self.starts.sub(lambda match: match[0].translate(self.stand_ins), clean)

    def reveal(self, text: str) -> str:
        return text.translate(self.originals)


class Vocabulary:
    """Text to ids and back, with control tokens only where they were asked for."""

    def __init__(self, tokenizer_json: str) -> None:
        try:
            self._tokenizer = Tokenizer.from_str(tokenizer_json)
        except Exception as exc:
            raise ConfigError(
                f"tokenizer.json: {exc}; save it again with the installed tokenizers library"
            ) from exc
        added = self._tokenizer.get_added_tokens_decoder()
        self.control_ids = control_tokens(self._tokenizer)
        longest_first = sorted(self.control_ids, key=len, reverse=True)
        choice = "|".join(re.escape(text) for text in longest_first)
        self._controls = re.compile(choice) if choice else None
        self._starts = re.compile(f"(?s)(?=(?:{choice})).") if choice else None
        self._first_characters = sorted({text[0] for text in longest_first})
        nonce = secrets.token_hex(8)
        self._names = {text: f"{_OPEN}{nonce}{id_}{_CLOSE}" for text, id_ in self.control_ids.items()}
        self._encoder = _renamed(tokenizer_json, self._names, self.control_ids)
        self._anchor = self._find_anchor(added)

    def _find_anchor(self, added: dict[int, Any]) -> tuple[str, int] | None:
        """A control token that swallows no white space: what stands before a text in the middle."""
        for text, id_ in self.control_ids.items():
            if not (added[id_].rstrip or added[id_].single_word):
                return self._names[text], id_
        return None

    def disguise(self, texts: Iterable[str]) -> Disguise:
        """Stand-ins that occur in none of `texts`."""
        used = {char for text in texts if not text.isascii() for char in text}
        free = (code for code in _STAND_INS if chr(code) not in used)
        stand_ins = {ord(char): next(free) for char in self._first_characters}
        return Disguise(self._starts, stand_ins, {code: char for char, code in stand_ins.items()})

    def controls_in(self, text: str, start: int = 0) -> list[re.Match[str]]:
        """Where disguised `text` holds control tokens from `start` on, in order."""
        return [] if self._controls is None else list(self._controls.finditer(text, start))

    def units(self, text: str) -> list[str]:
        """Control tokens and single characters."""
        cut: list[str] = []
        done = 0
        for match in self.controls_in(text):
            cut += [*text[done : match.start()], match[0]]
            done = match.end()
        return cut + list(text[done:])

    def encode(self, text: str, disguise: Disguise | None = None, *, continues: bool = False) -> list[int]:
        """Ids of disguised `text`; `continues` when it follows other tokens instead of opening a context."""
        return [id_ for _, ids in self.encode_parts(text, [0], disguise, continues=continues) for id_ in ids]

    def encode_parts(
        self, text: str, starts: Sequence[int], disguise: Disguise | None = None, *, continues: bool = False
    ) -> list[tuple[int, list[int]]]:
        """Encode `text` in one pass and cut the ids at `starts` (ascending, the first is 0).

        Returns runs (index of the part, ids); a token that spans a cut belongs to where it begins.
        """
        named, cuts = self._rename(text, starts)
        if disguise is not None:
            named = disguise.reveal(named)
        skip = 0
        if continues and self._anchor:
            named, skip = self._anchor[0] + named, len(self._anchor[0])
        encoding = self._encoder.encode(named, add_special_tokens=False)
        ids, first = encoding.ids, int(skip > 0)
        bounds = [first, *(_first_from(encoding, first, cut + skip) for cut in cuts[1:]), len(ids)]
        runs = ((part, ids[begin:end]) for part, (begin, end) in enumerate(pairwise(bounds)))
        return [run for run in runs if run[1]]

    def _rename(self, text: str, starts: Sequence[int]) -> tuple[str, list[int]]:
        """Put the secret names in, and say where `starts` have moved to."""
        pieces: list[str] = []
        cuts: list[int] = []
        done = shift = 0
        for match in self.controls_in(text):
            while len(cuts) < len(starts) and starts[len(cuts)] <= match.start():
                cuts.append(starts[len(cuts)] + shift)
            name = self._names[match[0]]
            pieces += (text[done : match.start()], name)
            done = match.end()
            shift += len(name) - len(match[0])
        cuts += [start + shift for start in starts[len(cuts) :]]
        return "".join((*pieces, text[done:])), cuts

    def decode(self, token_ids: Sequence[int], *, special: bool = True) -> str:
        """Text of the ids; ids without a text are left out, and special tokens if they are not wanted."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=not special)

    def id_of(self, text: str) -> int | None:
        return self._tokenizer.token_to_id(text)

    @property
    def size(self) -> int:
        return self._tokenizer.get_vocab_size()

    @cached_property
    def end(self) -> int:
        """Above the highest id; there may be gaps below."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def control_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids of the special tokens and of added ones that look like markup, by their names."""
    return {
        token.content: id_
        for id_, token in tokenizer.get_added_tokens_decoder().items()
        if token.content and (token.special or _MARKUP.fullmatch(token.content))
    }


def _first_from(encoding: Encoding, first: int, position: int) -> int:
    """The first token that begins at `position` or later; few of a long context's are looked at."""

    def begins(place: int) -> int:
        characters = encoding.token_to_chars(place)
        assert characters is not None, "a token of a text has a place in it"
        return characters[0]

    return first + bisect_left(range(first, len(encoding)), position, key=begins)


def _renamed(tokenizer_json: str, names: dict[str, str], ids: dict[str, int]) -> Tokenizer:
    """The tokenizer with `names` instead of its control tokens, each under its old id."""
    tree = cast("dict[str, Any]", json.loads(tokenizer_json))
    for token in tree["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    _rename_in_model(tree["model"], names)
    tree["post_processor"] = None
    tree["truncation"] = tree["padding"] = None
    tokenizer = Tokenizer.from_str(json.dumps(tree))
    moved = [text for text, id_ in ids.items() if tokenizer.token_to_id(names[text]) != id_]
    if moved:
        raise ConfigError(
            f"tokenizer.json: the added token {moved[0]!r} has another id than its place in the vocabulary; "
            "save the tokenizer again"
        )
    return tokenizer


def _rename_in_model(model: dict[str, Any], names: dict[str, str]) -> None:
    vocabulary: object = model["vocab"]
    if isinstance(vocabulary, dict):
        entries = cast("dict[str, int]", vocabulary)
        model["vocab"] = {names.get(text, text): id_ for text, id_ in entries.items()}
    else:
        scored = cast("list[list[Any]]", vocabulary)
        model["vocab"] = [[names.get(text, text), score] for text, score in scored]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not _makes_control(merge, names)]


def _makes_control(merge: str | list[str], names: dict[str, str]) -> bool:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in names or right in names or left + right in names
