"""The tier of memory below the pool: KV of programs that are not expected back soon.

- Pinned host memory beside a GPU; on a CPU a file that is mapped.  The file has no name from the moment
  it is there, so whatever ends this process, also kill -9, gives its space back.
- All of it is taken at the start: a full disk is a refusal then, and not the end of an engine later.
- A program's KV lies in blocks, wherever some are free.  When they run out, what has lain here longest
  goes.  Blocks that are being copied are given back when the copy has ended.
"""

import mmap
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from sostenuto.runtime.engines.embedded.lanes import KvShape
from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.runtime.engines.embedded.tensors import copy, from_buffer
from sostenuto.runtime.engines.embedded.trie import Segment
from sostenuto.runtime.engines.embedded.turn import Ids
from sostenuto.types import Version

BLOCK_TOKENS = 16
_TRIAL_TOKENS = 1024


@dataclass(slots=True, eq=False)
class Parked:
    """The KV of one program."""

    program: str
    salt: str
    tokens: Ids
    oldest: Version
    """As in `trie`."""
    blocks: list[int]
    is_copying: bool = True
    """On its way here, or back."""
    is_dropped: bool = False
    """Nobody may use it any more."""


class LowerTier:
    """The engine thread alone calls it; `write` and `read` run on the thread that copies."""

    def __init__(self, shape: KvShape, tokens: int, folder: Path) -> None:
        """Take room for `tokens`, rounded down to blocks; Refusal when there is not that much."""
        count = tokens // BLOCK_TOKENS
        if count < 1:
            message = f"lower_tokens: {tokens} is less than a block of {BLOCK_TOKENS}"
            raise Refusal(400, "lower_tokens", message, "0 is for none")
        self.tokens = count * BLOCK_TOKENS
        self.entries: dict[str, Parked] = {}
        """By program, longest here first."""
        self._free = list(range(count))
        self._keys, self._values = _blocks(shape, count, folder)
        self._read_tokens, self._read_s = _TRIAL_TOKENS, self._trial_s(shape)

    def __repr__(self) -> str:
        return f"<LowerTier programs={len(self.entries)} used={self.used_tokens}/{self.tokens}>"

    @property
    def used_tokens(self) -> int:
        """With what is left of last blocks."""
        return self.tokens - len(self._free) * BLOCK_TOKENS

    @property
    def tokens_s(self) -> float:
        """Tokens a second that came back so far."""
        return self._read_tokens / self._read_s

    def reserve(self, program: str, salt: str, tokens: Ids, oldest: Version) -> Parked | None:
        """Room for a program's KV, in place of what it had here; None when there is not enough.

        `landed` is due when the copy to it has ended.
        """
        self.drop(program)
        count = -(-len(tokens) // BLOCK_TOKENS)
        if count * BLOCK_TOKENS > self.tokens:
            return None
        while len(self._free) < count:
            longest = next((entry for entry in self.entries.values() if not entry.is_copying), None)
            if longest is None:
                return None
            self.drop(longest.program)
        blocks = [self._free.pop() for _ in range(count)]
        self.entries[program] = Parked(program, salt, tokens, oldest, blocks)
        return self.entries[program]

    def drop(self, program: str) -> None:
        """Forget what lies here of a program; idempotent."""
        entry = self.entries.pop(program, None)
        if entry is not None:
            entry.is_dropped = True
            if not entry.is_copying:
                self._free += entry.blocks

    def landed(self, entry: Parked) -> bool:
        """The copy of an entry has ended; whether it may still be used."""
        entry.is_copying = False
        if entry.is_dropped:
            self._free += entry.blocks
        return not entry.is_dropped

    def clear(self) -> int:
        """Forget everything; returns how many programs that were."""
        count = len(self.entries)
        for program in list(self.entries):
            self.drop(program)
        return count

    def forget_older(self, version: Version) -> list[str]:
        """Forget what an older version has computed; the programs that lost some."""
        older = [program for program, entry in self.entries.items() if entry.oldest < version]
        for program in older:
            self.drop(program)
        return older

    def write(self, entry: Parked, segments: list[Segment]) -> None:
        """Copy consecutive segments of KV into the entry's blocks."""
        at = 0
        for keys, values in segments:
            self._each(entry, at, (keys, values), inwards=True)
            at += keys.shape[2]

    def read(self, entry: Parked, kv: Segment) -> None:
        """Copy the entry's KV to tensors (layers, K, tokens, D)."""
        began_s = time.perf_counter()
        self._each(entry, 0, kv, inwards=False)
        self._read_tokens += len(entry.tokens)
        self._read_s += time.perf_counter() - began_s

    def _each(self, entry: Parked, at: int, kv: Segment, *, inwards: bool) -> None:
        done, count = 0, kv[0].shape[2]
        while done < count:
            block, inside = divmod(at + done, BLOCK_TOKENS)
            some = min(BLOCK_TOKENS - inside, count - done)
            for here, there in zip((self._keys, self._values), kv, strict=True):
                lower = here[entry.blocks[block], :, :, inside : inside + some]
                upper = there[:, :, done : done + some]
                copy(*((lower, upper) if inwards else (upper, lower)))
            done += some
        if kv[0].device.type == "cuda":
            torch.cuda.current_stream(kv[0].device).synchronize()

    def _trial_s(self, shape: KvShape) -> float:
        """Seconds for reading some tokens, after they were written."""
        blocks = [i % len(self._free) for i in range(_TRIAL_TOKENS // BLOCK_TOKENS)]
        entry = Parked("", "", torch.zeros(_TRIAL_TOKENS, dtype=torch.int32).numpy(), Version(0, 0), blocks)
        keys, values = shape.empty(_TRIAL_TOKENS)
        kv = (keys.zero_(), values.zero_())
        self.write(entry, [kv])
        began_s = time.perf_counter()
        self._each(entry, 0, shape.empty(_TRIAL_TOKENS), inwards=False)
        return time.perf_counter() - began_s


def _blocks(shape: KvShape, count: int, folder: Path) -> Segment:
    """Keys and values, (blocks, layers, K, tokens, D) each."""
    like = [part[None].expand(count, *part.shape) for part in shape.empty(BLOCK_TOKENS)]
    if shape.device.type != "cpu":
        return _pinned(like[0]), _pinned(like[1])
    memory = _mapped(sum(part.numel() for part in like) * shape.dtype.itemsize, folder)
    flat, cut = from_buffer(memory, shape.dtype), like[0].numel()
    return flat[:cut].view(like[0].shape), flat[cut:].view(like[1].shape)


def _pinned(like: torch.Tensor) -> torch.Tensor:
    try:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
    except RuntimeError as exc:
        message = f"lower_tokens: the host does not give {like.numel() * like.itemsize >> 20} MiB: {exc}"
        raise Refusal(400, "lower_tokens", message, "start the engine with fewer lower tokens") from exc


def _mapped(size: int, folder: Path) -> mmap.mmap:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            return mmap.mmap(file.fileno(), size)
    except OSError as exc:
        message = f"lower_tokens: no file of {size >> 20} MiB in {folder}: {exc.strerror}"
        remedy = "start the engine with fewer lower tokens, or with a folder on another disk"
        raise Refusal(400, "lower_tokens", message, remedy) from exc
