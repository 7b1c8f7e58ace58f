"""The grammars of one engine: tried, compiled, and kept for the next request that has them."""

import json
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
from tokenizers import Tokenizer

from sostenuto.runtime.engines.embedded.grammar.vocabulary import special_ids, token_bytes
from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.runtime.engines.wire import Grammar
from sostenuto.runtime.rendering.vocabulary import control_tokens

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from sostenuto.runtime.engines.embedded.grammar.guide import Guide

_KEPT = 64
_AT_ONCE = 2
_DEADLINE_S = 30.0
_MOST_CHARACTERS = 1 << 20
_TRIAL = "sostenuto.runtime.engines.embedded.grammar.trial"


def is_installed() -> bool:
    """Whether the library is there; it is optional."""
    return find_spec("llguidance") is not None


class Grammars:
    """For tokens of one tokenizer below `size`.  Used from the event loop; nothing runs on it for long."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self._tokenizer = tokenizer
        self._size = size
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._places = anyio.Semaphore(_AT_ONCE)
        self._controls = {name: id_ for name, id_ in control_tokens(tokenizer).items() if id_ < size}
        self._vocabularies: dict[bool, LLTokenizer] = {}
        """By whether control tokens are no text in it."""
        self._reading = threading.Lock()

    async def guide(self, grammar: Grammar, stop_ids: frozenset[int]) -> "Guide":
        """A guide at the start of `grammar`; Refusal for one that cannot be served."""
        if not is_installed():
            message = "sampling.grammar: llguidance is not installed where the engine runs"
            raise Refusal(400, "unsupported", message, "install sostenuto[grammar], or leave the grammar out")
        field, text = grammar.given
        if len(text) > _MOST_CHARACTERS:
            raise _refused(field, f"{len(text)} characters are more than {_MOST_CHARACTERS}")
        try:
            with anyio.fail_after(_DEADLINE_S):
                matcher = await self._matcher(grammar)
                guide = await anyio.to_thread.run_sync(self._begin, matcher, stop_ids, abandon_on_cancel=True)
        except TimeoutError:
            message = f"sampling.grammar.{field}: was not ready within {_DEADLINE_S:g} s"
            raise Refusal(503, "busy", message, "try again, or make the grammar simpler") from None
        if guide.problem is not None:
            raise _refused(field, guide.problem)
        return guide

    async def _matcher(self, grammar: Grammar) -> "LLMatcher":
        if grammar not in self._compiled:
            async with self._places:
                # Another request may have had the same one.
                if grammar not in self._compiled:
                    self._compiled[grammar] = await self._compile(*grammar.given)
        self._compiled.move_to_end(grammar)
        matcher = self._compiled[grammar]
        while len(self._compiled) > _KEPT:
            self._compiled.popitem(last=False)
        return matcher

    async def _compile(self, field: str, text: str) -> "LLMatcher":
        if (problem := await _tried(field, text, self._controls_of(field))) is not None:
            raise _refused(field, problem)
        try:
            return await anyio.to_thread.run_sync(self._compile_here, field, text, abandon_on_cancel=True)
        except ValueError as error:
            raise _refused(field, str(error)) from error

    def _compile_here(self, field: str, text: str) -> "LLMatcher":
        from sostenuto.runtime.engines.embedded.grammar.matching import matcher_of, tokenizer_of

        controls = self._controls_of(field)
        with self._reading:
            if bool(controls) not in self._vocabularies:
                tokens = token_bytes(self._tokenizer, self._size)
                special = {token for token in special_ids(self._tokenizer) if token < self._size}
                special |= set(controls.values())
                self._vocabularies[bool(controls)] = tokenizer_of(tokens, sorted(special), self._encode)
        return matcher_of(field, text, self._vocabularies[bool(controls)], controls)

    def _controls_of(self, field: str) -> dict[str, int]:
        """The tokens that a grammar of this kind writes by their names."""
        return self._controls if field == "structural_tag" else {}

    def _begin(self, matcher: "LLMatcher", stop_ids: frozenset[int]) -> "Guide":
        from sostenuto.runtime.engines.embedded.grammar.guide import Guide

        return Guide(matcher.deep_copy(), self._size, stop_ids)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


async def _tried(field: str, text: str, controls: Iterable[str]) -> str | None:
    """What is wrong with a grammar, found out where it can do no harm."""
    done = await anyio.run_process(
        [sys.executable, "-m", _TRIAL], input=json.dumps([field, text, [*controls]]).encode(), check=False
    )
    if done.returncode < 0:
        return "it nests too deeply, or takes too much memory or time to compile"
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return f"it could not be compiled: {' '.join(last)[:300]}"
    problem: str | None = json.loads(done.stdout)["problem"]
    return problem


def _refused(field: str, problem: str) -> Refusal:
    return Refusal(
        400, "grammar", f"sampling.grammar.{field}: {problem}", "correct the grammar, or leave it out"
    )
