"""KV that has grown too old, made visible: a model whose next token tells what KV it was computed from.

The embedded engine's own core, pool, trie and lower tier serve it.  KV of a token is its id and the number of
the version that computed it.  The next token has two parts: how many versions the oldest KV of its context
lies behind the weights, and a hash of the weights and of the token ids that lie in its KV.  Whoever knows a
context and the version that a token is stamped with can say what that token has to be.
"""

import random
import tempfile
import zlib
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from tokenizers import Tokenizer, models

from sostenuto.runtime.engines.embedded.attention import Chunk, Decode, Step
from sostenuto.runtime.engines.embedded.core import Core
from sostenuto.runtime.engines.embedded.lanes import KvShape
from sostenuto.runtime.engines.embedded.lower import LowerTier
from sostenuto.runtime.engines.embedded.model import Model
from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.runtime.engines.embedded.tensors import as_list
from sostenuto.runtime.engines.wire import (
    CommitRequest,
    FinishReason,
    GenerateReply,
    GenerateRequest,
    Sampling,
)
from sostenuto.trainer.publication.manifest import Manifest, TensorEntry
from sostenuto.types import Version

AGES, HASHES = 32, 61
VOCABULARY = AGES * HASHES
_PRIME, _FACTOR = 1_000_003, 31
_POWERS = np.array([pow(_FACTOR, place, _PRIME) for place in range(4096)], dtype=np.int64)
_PROGRAMS, _TURNS = 24, 6
_TOGETHER = 8


class _Weights(torch.nn.Module):
    """One number: that of the version."""

    def __init__(self) -> None:
        super().__init__()
        self.number = torch.nn.Parameter(torch.zeros(1), requires_grad=False)


@dataclass(frozen=True, slots=True, eq=False)
class HashModel(Model):
    """Reads and writes KV where the engine says, as attention does."""

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, step: Step
    ) -> torch.Tensor:
        number = int(cast("Any", self.module).number.item())
        told: dict[int, int] = {}
        asked = set(as_list(wanted))
        for part in (*step.decodes, *step.chunks):
            for keys, values, position, place, count in _rows(part):
                keys[0, 0, position : position + count, 0] = number
                values[0, 0, position : position + count, 0] = token_ids[place : place + count].float()
                for each in asked.intersection(range(place, place + count)):
                    told[each] = _next(keys, values, position + each - place + 1, number)
        logits = torch.zeros(len(wanted), VOCABULARY)
        for row, place in enumerate(as_list(wanted)):
            logits[row, told[place]] = 50.0
        return logits


_Row = tuple[torch.Tensor, torch.Tensor, int, int, int]
"""Keys and values, where its new tokens lie in them and among the packed ones, and how many there are."""


def _rows(part: Decode | Chunk) -> list[_Row]:
    if isinstance(part, Chunk):
        return [(part.keys, part.values, part.start, part.first, part.count)]
    rows: list[_Row] = []
    packed = 0
    for row, count in enumerate(part.counts):
        start = int(part.positions[packed])
        rows.append((part.keys[:, row], part.values[:, row], start, part.first + packed, count))
        packed += count
    return rows


def _next(keys: torch.Tensor, values: torch.Tensor, length: int, number: int) -> int:
    age = number - int(keys[0, 0, :length, 0].min().item())
    ids = values[0, 0, :length, 0].numpy().astype(np.int64)
    return min(max(age, 0), AGES - 1) * HASHES + hashed(ids, number)


def hashed(ids: "np.ndarray[Any, np.dtype[np.int64]]", number: int) -> int:
    return int((int((ids * _POWERS[: len(ids)] % _PRIME).sum()) + number * 7919) % HASHES)


def hash_model() -> HashModel:
    shape = KvShape(1, 1, 1, 1, torch.float32, torch.device("cpu"))
    return HashModel(
        name="hash",
        module=cast("Any", _Weights()),
        tokenizer=Tokenizer(models.BPE({"a": 0}, [])),
        tokenizer_size=VOCABULARY,
        vocabulary_size=VOCABULARY,
        context_tokens=4096,
        shape=shape,
    )


def publication(folder: Path, number: int) -> Manifest:
    """The weights of a version, as an engine maps them."""
    content = torch.tensor([float(number)]).numpy().tobytes()
    path = folder / "weights"
    path.write_bytes(content)
    entry = TensorEntry(
        name="number", dtype="float32", shape=(1,), offset=0, nbytes=4, checksum=zlib.crc32(content)
    )
    return Manifest(version=f"0.{number}", path=str(path), nbytes=4, tensors=(entry,))


@dataclass(slots=True)
class Found:
    """What the tokens of a run told."""

    turns: int = 0
    tokens: int = 0
    too_old: int = 0
    """Sampled from KV that was older than the policy in force allowed."""
    wrong: int = 0
    """Not what its context and the version it is stamped with say."""
    oldest: int = 0
    """The greatest age that was seen, in versions."""
    cached_tokens: int = 0
    updates: int = 0


@dataclass(slots=True)
class _Program:
    name: str
    context: list[int]
    turns: int = 0
    budget: int = 0
    """Of the turn under way."""


@dataclass(slots=True)
class Run:
    """Programs of several turns on one core while its weights change.

    `bounded`: whether the engine is told how old KV may be; without, it keeps what it has.
    """

    folder: Path
    seed: int = 0
    bounded: bool = True
    found: Found = field(default_factory=Found)
    _core: Core = field(init=False)
    _random: random.Random = field(init=False)
    _ages: dict[int, int] = field(default_factory=lambda: {0: 0})
    """The age that is allowed, by the number of the version."""
    _waiting: deque[_Program] = field(default_factory=deque["_Program"])
    _running: dict[str, tuple[_Program, list[int]]] = field(
        default_factory=dict[str, tuple["_Program", list[int]]]
    )
    _made: int = 0
    _asked: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        model = hash_model()
        lower = LowerTier(model.shape, 1024, self.folder)
        self._core = Core(
            model, version=Version(0, 0), kv_tokens=1500, concurrency=_TOGETHER, threads=1, lower=lower
        )
        self._waiting.extend(self._made_anew() for _ in range(_PROGRAMS))

    def play(self, turns: int, versions: int) -> Found:
        """So many turns, spread evenly over so many versions after the first."""
        for number in range(1, versions + 1):
            while self.found.turns < turns * number // versions:
                self._fill()
                self._core.step()
            self._update(number)
        while self._core.busy:
            self._core.step()
        return self.found

    def _fill(self) -> None:
        while len(self._running) < _TOGETHER + 2:
            program = self._waiting.popleft()
            self._turn(program)

    def _turn(self, program: _Program) -> None:
        self._asked += 1
        name, sent = f"r{self._asked}", list(program.context)
        request = GenerateRequest(
            request_id=name, program_id=program.name, token_ids=sent, max_new_tokens=program.budget,
            sampling=Sampling(temperature=0.0), hold=self._random.random() < 0.9,
        )  # fmt: skip
        self._running[name] = (program, sent)
        self._core.submit(request, lambda reply: self._answered(name, reply))

    def _answered(self, name: str, reply: GenerateReply | Refusal) -> None:
        program, sent = self._running.pop(name)
        assert isinstance(reply, GenerateReply), reply
        self._check(sent, reply)
        program.context = sent + reply.token_ids
        if reply.finish_reason is FinishReason.ABORT and len(reply.token_ids) < program.budget:
            # The turn goes on by its tokens, with what is left of its budget.
            program.budget -= len(reply.token_ids)
            self._waiting.appendleft(program)
            return
        self.found.turns += 1
        self.found.cached_tokens += reply.cached_tokens
        program.turns += 1
        if program.turns >= _TURNS:
            self._core.release(program.name)
            self._waiting.append(self._made_anew())
            return
        if self._random.random() < 0.2:
            self._core.offload(program.name)
        program.context += [self._random.randrange(VOCABULARY) for _ in range(self._random.randrange(3, 9))]
        program.budget = self._random.randrange(3, 9)
        self._waiting.append(program)

    def _check(self, sent: list[int], reply: GenerateReply) -> None:
        whole = np.array(sent + reply.token_ids, dtype=np.int64)
        for span in reply.versions:
            number = Version.parse(span.version).number
            for place in range(len(sent) + span.start, len(sent) + span.end):
                age, hash_ = divmod(int(whole[place]), HASHES)
                self.found.tokens += 1
                self.found.too_old += age > self._ages[number]
                self.found.wrong += hash_ != hashed(whole[:place], number)
                self.found.oldest = max(self.found.oldest, age)

    def _update(self, number: int) -> None:
        age = self._random.randrange(4)
        self._ages[number] = age
        running: Literal["continue", "recompute"] = self._random.choice(["continue", "continue", "recompute"])
        if self._random.random() < 0.3:
            for name in list(self._running):
                self._core.abort(name)
        oldest = f"0.{max(0, number - age)}" if self.bounded else None
        self._core.weights.stage(publication(self.folder, number))
        self._core.commit(
            CommitRequest(version=f"0.{number}", running=running, held="keep", oldest_kv=oldest)
        )
        self.found.updates += 1

    def _made_anew(self) -> _Program:
        self._made += 1
        own = [self._random.randrange(VOCABULARY) for _ in range(self._random.randrange(4, 20))]
        return _Program(f"p{self._made}", [*range(40), *own], budget=self._random.randrange(3, 9))


def played(turns: int, versions: int, *, seed: int = 0, bounded: bool = True) -> Found:
    # Threads of torch that wait for each other starve on a machine that does other things.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="sostenuto-gate-") as folder:
        return Run(Path(folder), seed, bounded).play(turns, versions)
