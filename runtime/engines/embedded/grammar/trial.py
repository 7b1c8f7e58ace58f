"""`python -m sostenuto.runtime.engines.embedded.grammar.trial`: whether a grammar can be served.

Reads [kind, text, names of control tokens] as JSON, compiles the grammar over single bytes and writes
along it for some tokens.  Writes {"problem": null, or what is wrong} as JSON.  A grammar that ends the
process cannot be served.
"""

import json
import random
import resource
import sys
import threading

from sostenuto.runtime.engines.embedded.grammar.guide import Guide
from sostenuto.runtime.engines.embedded.grammar.matching import matcher_of, tokenizer_of

_CPU_S = 5
_MEMORY_BYTES = 2 << 30
# Half of what a thread of the engine has: what goes well here does so there.
_STACK_BYTES = 4 << 20
_TOKENS = 48


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    kind, text, controls = json.load(sys.stdin)
    threading.stack_size(_STACK_BYTES)
    found: list[str | None] = []
    thread = threading.Thread(target=lambda: found.append(_problem(kind, text, controls)))
    thread.start()
    thread.join()
    sys.stdout.write(json.dumps({"problem": found[0]}))


def _problem(kind: str, text: str, controls: list[str]) -> str | None:
    ids = {name: 256 + place for place, name in enumerate(controls)}
    tokens = [*(bytes([byte]) for byte in range(256)), *(name.encode() for name in controls)]
    tokenizer = tokenizer_of(tokens, list(ids.values()), lambda text: list(text.encode()))
    try:
        guide = Guide(matcher_of(kind, text, tokenizer, ids), len(tokens), frozenset())
    except ValueError as error:
        return str(error)
    generator = random.Random(0)
    for _ in range(_TOKENS):
        if guide.problem is not None or guide.is_over:
            break
        guide.take(generator.choice(guide.tokens()))
    return guide.problem


if __name__ == "__main__":
    main()
