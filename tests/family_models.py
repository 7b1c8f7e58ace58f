"""Renderers of the library's families over a small tokenizer that has their control tokens."""

from pathlib import Path

from tokenizers import Tokenizer

import rendering_models as small
from sostenuto.runtime.rendering.folder import ModelFolder
from sostenuto.runtime.rendering.library import LibraryRenderer, _create, _Tokenizer  # pyright: ignore[reportPrivateUsage]
from sostenuto.runtime.rendering.vocabulary import Vocabulary

_DEEPSEEK = ["begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant", "tool▁sep"] + [
    f"tool▁{what}▁{side}" for what in ("calls", "call", "outputs", "output") for side in ("begin", "end")
]
CONTROLS = {
    "qwen3": (),
    "kimi-k2": (
        "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "[BOS]", "[EOS]",
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    ),
    "llama-3": (
        "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>",
        "<|python_tag|>", "<|end_of_text|>",
    ),
    "deepseek-v3": tuple(f"<\uff5c{name}\uff5c>" for name in _DEEPSEEK),
    "glm-5": (
        "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<arg_key>",
        "</arg_key>", "<arg_value>", "</arg_value>",
    ),
    "minimax-m2": ("<minimax:tool_call>", "</minimax:tool_call>", "]~!b[", "]~b]", "[e~["),
    "glm-4.5": (
        "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<arg_key>",
        "</arg_key>", "<arg_value>", "</arg_value>",
    ),
    "qwen3.5": ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
}  # fmt: skip


def renderer_of(family: str, place: Path) -> LibraryRenderer:
    """As the library has it, over a small tokenizer that has its control tokens."""
    tokenizer = Tokenizer.from_str(small.byte_level())
    text = small.with_tokens(tokenizer, (*small.MARKUP, *CONTROLS[family]), special=False)
    folder = ModelFolder.open(small.write_folder(place, tokenizer=text))
    vocabulary = Vocabulary(folder.tokenizer_json)
    return LibraryRenderer(_create(family, _Tokenizer(folder, vocabulary)), vocabulary, wrapped_tools=True)
