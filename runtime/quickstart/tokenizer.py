"""The quickstart's tokenizer, trained on the spot on demonstrations.

- A word is the same token after a space, a quote or a newline; a number of the task is one token.
- Any text can be encoded: what was not seen falls apart into bytes.
- Role markers and the end of a turn are special tokens.  The tool-call tags are ordinary added tokens, as
  in other Hermes models: they stay in decoded text, and they end or open nothing.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from sostenuto.envs.storeroom.demonstrations import warm_start
from sostenuto.envs.storeroom.world import LARGEST_COUNT, NOUNS, PLACES
from sostenuto.types import Message

END = "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
SPECIAL_TOKENS = (END, *ROLES)
TOOL_CALL_TAGS = ("<tool_call>", "</tool_call>")
LARGEST_VOCABULARY = 768
DEMONSTRATIONS = 500

CHAT_TEMPLATE = (
    "{%- if tools -%}"
    "{{ '<|system|>' + (tools | map(attribute='function.name') | join(' ')) }}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{{ '<|' + message.role + '|>' + (message.content or '') }}"
    "{%- for call in message.tool_calls or [] -%}"
    "{%- set function = call.function or call -%}"
    """{{ '<tool_call>{"name":"' + function.name + '","arguments":' }}"""
    "{%- if function.arguments is string -%}{{ function.arguments }}"
    "{%- else -%}{{ function.arguments | tojson(separators=(',', ':')) }}{%- endif -%}"
    "{{ '}</tool_call>' }}"
    "{%- endfor -%}"
    "{%- if message.role == 'assistant' -%}{{ '<|end|>' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)
"""A role marker before a message and an end after an assistant's.  Of the tools, the names alone."""

_PRE_TOKENS = Regex(r"\p{L}+|\p{N}+|[^\p{L}\p{N}\s]+|\s+")


def train_tokenizer(demonstrations: Iterable[list[Message]]) -> Tokenizer:
    """Train byte-pair merges on the text of `demonstrations` and the words of every world."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_PRE_TOKENS, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=LARGEST_VOCABULARY - len(TOOL_CALL_TAGS),
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(demonstrations), trainer)
    tags = [AddedToken(tag, special=False, normalized=False) for tag in TOOL_CALL_TAGS]
    cast("Any", tokenizer).add_tokens(tags)  # its own type is partial
    return tokenizer


def tokenizer_material(seed: int) -> list[list[Message]]:
    """Demonstrations and lessons, half and half, enough to learn every word that they are made of."""
    return list(islice(warm_start(seed, 1, lessons_at_start=0.5, lessons_at_end=0.5), DEMONSTRATIONS))


def copyable_ids(tokenizer: Tokenizer) -> NDArray[np.int32]:
    """Every token but the special tokens and tags: what copy pre-training draws from."""
    apart = {tokenizer.token_to_id(text) for text in (*SPECIAL_TOKENS, *TOOL_CALL_TAGS)}
    return np.array([id_ for id_ in range(tokenizer.get_vocab_size()) if id_ not in apart], dtype=np.int32)


def _texts(demonstrations: Iterable[list[Message]]) -> Iterator[str]:
    # Twice, so that each of them is merged to one token however rare it is in the demonstrations.
    for _ in range(2):
        yield " ".join((*NOUNS, *PLACES, *map(str, range(2 * LARGEST_COUNT + 1))))
    for messages in demonstrations:
        for message in messages:
            yield message.content
            for call in message.tool_calls:
                yield f'{{"name":"{call.name}","arguments":{call.arguments}}}'
