"""What a simulated engine and tool server are like.  Read from TOML; see `profiles/`."""

from bisect import bisect_left
from enum import StrEnum
from functools import cached_property
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Profile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class OnRelease(StrEnum):
    """What an engine does with the KV of a program that it is told to let go."""

    FREE = "free"
    DEMOTE = "demote"
    """It stays in the cache and is the first to be overwritten."""
    IGNORE = "ignore"
    """The engine cannot be told: its own least-recently-used order decides."""


class EngineProfile(Profile):
    """One engine replica.

    A step decodes one token of every running request and prefills up to `chunk_tokens` of those that
    wait, first come first served.  It takes `chunk/prefill_tokens_s + itl_s(n) - overlap * (the lesser)`.
    """

    name: str
    kv_tokens: int = Field(gt=0)
    """The pool, in tokens."""
    block_tokens: int = Field(default=16, gt=0)
    concurrency: int = Field(default=256, gt=0)
    """Requests that run together."""
    prefill_tokens_s: float = Field(gt=0)
    prefill_s_per_token_squared: float = Field(default=0.0, ge=0)
    """Attention of prefill: seconds for each pair of a new token and a token before it."""
    chunk_tokens: int = Field(default=2048, gt=0)
    overlap: float = Field(default=1.0, ge=0, le=1)
    """1: prefill and decode in one step run fully beside each other; 0: one after the other."""
    itl_s: tuple[tuple[int, float], ...] = Field(min_length=1)
    """(requests that decode, seconds between two tokens of each), in ascending order."""
    request_s: float = Field(default=0.0, ge=0)
    """Overhead of one request before its prefill starts."""
    host_tokens: int = Field(default=0, ge=0)
    """Tokens that the lower tier holds; 0: there is none."""
    host_tokens_s: float = Field(default=0.0, ge=0)
    """Tokens a second that come back from there."""
    on_release: OnRelease = OnRelease.DEMOTE
    stage_s: float = Field(default=5.0, ge=0)
    """A new version beside the old weights, while decoding goes on."""
    swap_s: float = Field(default=0.5, ge=0)
    """Decoding stands still."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        sizes = [n for n, _ in self.itl_s]
        if sizes != sorted(set(sizes)) or sizes[0] < 1:
            raise ValueError("itl_s: give the batch sizes once each, ascending, from 1 on")
        if any(seconds <= 0 for _, seconds in self.itl_s):
            raise ValueError("itl_s: every time between tokens has to be more than 0 seconds")
        if self.host_tokens and not self.host_tokens_s:
            raise ValueError("host_tokens_s: a lower tier needs a bandwidth above 0")
        return self

    @cached_property
    def _itl(self) -> tuple[float, ...]:
        return (self.itl_s[0][1], *(self._interpolated(n) for n in range(1, self.itl_s[-1][0] + 1)))

    def itl(self, decoding: int) -> float:
        """Seconds between two tokens of each of `decoding` requests; linear between and beyond the table."""
        if decoding < len(self._itl):
            return self._itl[decoding]
        return self._interpolated(decoding)

    def prefill_s(self, new_tokens: int, context_tokens: int) -> float:
        """Prefill of the last `new_tokens` of a context, with nothing beside it."""
        pairs = new_tokens * (context_tokens - new_tokens / 2)
        return new_tokens / self.prefill_tokens_s + self.prefill_s_per_token_squared * pairs

    def _interpolated(self, decoding: int) -> float:
        table = self.itl_s
        index = bisect_left(table, decoding, key=lambda entry: entry[0])
        if index == 0 or len(table) == 1:
            return table[0][1]
        (n0, s0), (n1, s1) = table[index - 1 : index + 1] if index < len(table) else table[-2:]
        return s0 + (s1 - s0) * (decoding - n0) / (n1 - n0)


class ToolServerProfile(Profile):
    """The tool server: what it can give to sandboxes, and what moving one along its ladder takes."""

    memory_bytes: int | None = Field(default=None, gt=0)
    disk_bytes: int | None = Field(default=None, gt=0)
    cpus: float | None = Field(default=None, gt=0)
    prepare_concurrency: int = Field(default=64, gt=0)
    """Environments that are made at the same time."""
    pause_s: float = Field(default=0.005, ge=0)
    resume_s: float = Field(default=0.005, ge=0)
    reclaim_s: float = Field(default=1.0, ge=0)
    """Also the time to page it in again."""
    snapshot_s: float = Field(default=3.0, ge=0)
    restore_s: float = Field(default=5.0, ge=0)


class FleetProfile(Profile):
    """What a simulation runs on."""

    engines: int = Field(default=1, gt=0)
    engine: EngineProfile
    tools: ToolServerProfile = ToolServerProfile()
