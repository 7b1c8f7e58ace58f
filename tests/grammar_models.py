"""Tokenizers of the kinds that models have, and requests that follow a grammar."""

from pathlib import Path
from typing import Any, cast

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine_models import Desk, make_folder
from sostenuto.runtime.engines.wire import GenerateReply, Sampling

END = "<|im_end|>"


def byte_level() -> Tokenizer:
    """Every byte, some pieces that cross the marks of JSON, special tokens and one that is text."""
    vocabulary = {name: i for i, name in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [
        ("{", '"'),
        ('"', ":"),
        ('"', ","),
        ('"', "}"),
        ("t", "r"),
        ("u", "e"),
        ("tr", "ue"),
        ("Ġ", "Ġ"),
    ]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    cast("Any", tokenizer).add_special_tokens([END, "<|im_start|>"])
    cast("Any", tokenizer).add_tokens([AddedToken("<tool_call>", special=False)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As SentencePiece makes them: blanks are marked, and what has no piece is written byte by byte."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *'abcdetruflsni{}[]":,0123', "▁a", "▁{", '{"', "▁▁", "é", "true"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    cast("Any", tokenizer).add_special_tokens(["<s>", "</s>"])
    return tokenizer


def folder_with(folder: Path, tokenizer: Tokenizer) -> Path:
    """A model over the tokenizer's vocabulary and some padding."""
    make_folder(folder, vocab_size=tokenizer.get_vocab_size() + 9)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


async def guided(desk: Desk, name: str, sampling: Sampling, *, top_logprobs: int = 0) -> GenerateReply:
    """One turn that follows the grammar of `sampling`."""
    assert sampling.grammar is not None
    guide = await desk.core.grammars.guide(sampling.grammar, frozenset(sampling.stop_token_ids))
    asked = {"sampling": sampling, "max_new_tokens": 480, "top_logprobs": top_logprobs}
    desk.submit_guided(name, [1, 2, 3], guide, **asked)
    desk.run()
    return desk.reply(name)
