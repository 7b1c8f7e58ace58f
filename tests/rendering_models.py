"""Small model folders for the rendering tests: tokenizers trained here, templates of known kinds."""

import json
from collections.abc import Mapping
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from sostenuto.runtime.engines.wire import FinishReason, GenerateReply, WireVersionSpan
from sostenuto.tools.wire import ToolSchema

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

DEFAULT_SYSTEM = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Renders tools, calls and reasoning; drops the reasoning of turns before the last user message.
THINKING = """
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- "# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n" }}
{{- "You are provided with function signatures within <tools></tools> XML tags:\\n<tools>" }}
{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
{{- "\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments " }}
{{- "within <tool_call></tool_call> XML tags:\\n<tool_call>\\n" }}
{{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or message.reasoning_content) %}
{{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{%- if (loop.first and message.content) or not loop.first %}{{- '\\n' }}{%- endif %}
{%- set call = call.function %}
{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
{%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# No markers but the two of the sequence, no system role, roles must alternate.
STRICT = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if message.role == 'user' %}{{ '[INST] ' + message.content | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + message.content | trim + eos_token }}{% endif %}{% endfor %}"
)

TOOL = ToolSchema(
    name="find",
    description="Find a city.",
    parameters={"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    timeout_s=1.0,
)

_CORPUS = [
    "user assistant system tool hello world you are a helpful assistant\n the answer is 42",
    '<tool_call>\n{"name": "find", "arguments": {"city": "Ouagadougou"}}\n</tool_call> function call',
    "you may call one or more functions to assist with the user query within xml tags",
] * 5


@cache
def byte_level() -> str:
    """A byte-level BPE with ChatML tokens and non-special markup tokens, as a tokenizer.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return with_tokens(tokenizer, MARKUP, special=False)


def with_tokens(tokenizer: Tokenizer, texts: tuple[str, ...], *, special: bool) -> str:
    tree: dict[str, Any] = json.loads(tokenizer.to_str())
    fresh = count(tokenizer.get_vocab_size())
    for text in texts:
        known = tokenizer.token_to_id(text)
        id_ = next(fresh) if known is None else known
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tree["added_tokens"].append({"id": id_, "content": text, "special": special, **flags})
    return json.dumps(tree)


@cache
def prefixed() -> str:
    """A BPE that marks word starts, the first word included, in the manner of SentencePiece."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    specials = ["<unk>", *SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=450, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tree: dict[str, Any] = json.loads(tokenizer.to_str())
    tree["added_tokens"] = [token for token in tree["added_tokens"] if not token["content"].startswith("<0x")]
    return json.dumps(tree)


@cache
def word_level() -> str:
    """Words and signs of a toy language; a control token is a word like any other in its vocabulary."""
    words = ["<unk>", *SPECIALS, "user", "assistant", "system", "tool", "hello", "world", "\n", "a", "b"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    return with_tokens(tokenizer, ("<unk>", *SPECIALS), special=True)


def write_folder(
    path: Path,
    template: str | None = CHATML,
    tokenizer: str | None = None,
    config: Mapping[str, object] | None = None,
    eos: str = "<|im_end|>",
) -> Path:
    """A model folder without weights."""
    path.mkdir(parents=True, exist_ok=True)
    text = tokenizer or byte_level()
    size = Tokenizer.from_str(text).get_vocab_size()
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": eos,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
    }
    values = {"model_type": "llama", "vocab_size": size, "max_position_embeddings": 2048, **(config or {})}
    (path / "tokenizer.json").write_text(text, encoding="utf-8")
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "config.json").write_text(json.dumps(values))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": []}))
    if template is not None:
        (path / "chat_template.jinja").write_text(template, encoding="utf-8")
    return path


def reply(
    token_ids: list[int], finish: FinishReason = FinishReason.STOP, version: str = "0.1"
) -> GenerateReply:
    """What an engine would return for these tokens."""
    return GenerateReply(
        token_ids=token_ids,
        logprobs=[-0.5] * len(token_ids),
        versions=[WireVersionSpan(version=version, start=0, end=len(token_ids))] if token_ids else [],
        finish_reason=finish,
        cached_tokens=0,
        prefilled_tokens=0,
        queue_s=0.0,
        prefill_s=0.0,
        decode_s=0.0,
    )
