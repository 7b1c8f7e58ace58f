"""Inside a fake SGLang server: a toy model, a queue, a radix cache that remembers versions, and weights.

The next token's distribution depends on the weights and on the last tokens, so that stale weights and
stale KV are visible in what comes out.
"""

import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

VOCABULARY = 80
CONTEXT = 512
EOS = 79
"""The model's own end of text."""
SEEN = 4
"""How many tokens the toy model looks back."""


def logits(weights: int, context: list[int], size: int = VOCABULARY) -> NDArray[np.float64]:
    key = zlib.crc32(np.asarray(context[-SEEN:], dtype=np.int32).tobytes(), weights & 0xFFFFFFFF)
    values = np.random.default_rng(key).normal(size=size) * 2
    values[EOS] = -20.0
    return values


def log_softmax(values: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = values - values.max()
    return shifted - np.log(np.exp(shifted).sum())


def vocabulary_of(folder: Path) -> int:
    return json.loads((folder / "config.json").read_text())["vocab_size"]


def weights_of(folder: Path) -> int:
    return zlib.crc32((folder / "model.safetensors").read_bytes())


@dataclass(eq=False)
class Req:
    """One request in the scheduler."""

    body: dict[str, Any]
    arrival: int
    output: list[int] = field(default_factory=list[int])
    entries: list[list[Any]] = field(default_factory=list[list[Any]])
    tops: list[list[list[Any]]] = field(default_factory=list[list[list[Any]]])
    masks: list[list[int]] = field(default_factory=list[list[int]])
    kept: list[Any] = field(default_factory=list[Any])
    changes: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    """(version before, tokens at the change)."""
    kv_versions: list[str] = field(default_factory=list[str])
    """The version under which each position's KV was computed."""
    cached: int = 0
    is_prefilled: bool = False
    retractions: int = 0
    finish: dict[str, Any] | None = None

    @property
    def rid(self) -> str:
        return self.body["rid"]

    @property
    def params(self) -> dict[str, Any]:
        return self.body["sampling_params"]

    @property
    def context(self) -> list[int]:
        return [*self.body["input_ids"], *self.output]

    def spans(self, version: str) -> list[dict[str, Any]]:
        spans: list[dict[str, Any]] = []
        for name, end in [*self.changes, (version, len(self.output))]:
            start = spans[-1]["end"] if spans else 0
            if spans and end <= start:
                continue
            if spans and spans[-1]["version"] == name:
                spans[-1]["end"] = end
            else:
                spans.append({"version": name, "start": start, "end": end})
        return spans


@dataclass
class Cached:
    """A sequence in the radix cache."""

    tokens: list[int]
    versions: list[str]
    used_at: int
    sessions: set[str] = field(default_factory=set[str])


@dataclass
class Core:
    """The scheduler process."""

    weights: int
    version: str
    vocabulary: int = VOCABULARY
    concurrency: int = 4
    pool: int = 4096
    eos_stops: bool = True
    original_logprobs: bool = False
    lower_first: bool = False
    waiting: list[Req] = field(default_factory=list[Req])
    running: list[Req] = field(default_factory=list[Req])
    is_paused: bool = False
    cache: dict[str, list[Cached]] = field(default_factory=dict[str, list[Cached]])
    closed: set[str] = field(default_factory=set[str])
    clock: int = 0
    stale_hits: int = 0
    """Cached tokens that a request found and that an older version had computed."""

    def step(self) -> list[Req]:
        """One step; who ended."""
        self.clock += 1
        if self.is_paused:
            return []
        sign = 1 if self.lower_first else -1
        self.waiting.sort(key=lambda req: (sign * (req.body.get("priority") or 0), req.arrival))
        while self.waiting and len(self.running) < self.concurrency:
            self.running.append(self.waiting.pop(0))
        for req in self.running:
            if not req.is_prefilled:
                self._prefill(req)
            self._decode(req)
        ended = [req for req in self.running if req.finish]
        self.running = [req for req in self.running if not req.finish]
        for req in ended:
            self._insert(req)
        return ended

    def abort(self, rid: str, *, everything: bool) -> list[Req]:
        """By prefix, as the real one; who was taken out of the queue."""
        hit = [req for req in self.waiting if everything or req.rid.startswith(rid)]
        self.waiting = [req for req in self.waiting if req not in hit]
        for req in self.running:
            if everything or req.rid.startswith(rid):
                req.finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        return hit

    def pause(self, mode: str) -> None:
        self.is_paused = True
        if mode == "retract":
            for req in self.running:
                req.is_prefilled, req.kv_versions = False, []
                req.retractions += 1
            self.waiting = [*self.running, *self.waiting]
            self.running = []

    def flush(self) -> bool:
        if self.running or (self.waiting and not self.is_paused):
            return False
        self.cache.clear()
        self.closed.clear()
        return True

    def set_version(self, version: str | None) -> None:
        if version is None or version == self.version:
            return
        for req in (*self.running, *self.waiting):
            if req.output:
                req.changes.append((self.version, len(req.output)))
        self.version = version

    def close_session(self, session: str) -> None:
        self.closed.add(session)
        for entry in self._entries():
            entry.sessions.discard(session)

    def scored(self, req: Req, first: int) -> dict[str, Any]:
        """Log-probabilities of the prompt; its first token has none."""
        tokens = req.body["input_ids"]
        entries: list[list[Any]] = [[None, tokens[first], None]]
        tops: list[Any] = [None]
        for i in range(first + 1, len(tokens)):
            row = log_softmax(logits(self.weights, tokens[:i], self.vocabulary))
            entries.append([float(row[tokens[i]]), tokens[i], None])
            best = np.argsort(-row)[: req.body.get("top_logprobs_num") or 0]
            tops.append([[float(row[j]), int(j), None] for j in best])
        return {"input_token_logprobs": entries, "input_top_logprobs": tops}

    def used(self) -> int:
        return sum(len(req.context) for req in self.running)

    def _entries(self) -> list[Cached]:
        return [entry for entries in self.cache.values() for entry in entries]

    def _prefill(self, req: Req) -> None:
        context = req.context
        limit = len(context) - 1
        if (start := req.body.get("logprob_start_len", -1)) >= 0:
            limit = min(limit, start)
        best: Cached | None = None
        length = 0
        for entry in self.cache.get(req.body.get("extra_key") or "", []):
            same = next(
                (i for i, (a, b) in enumerate(zip(entry.tokens, context, strict=False)) if a != b), None
            )
            common = min(len(entry.tokens), len(context)) if same is None else same
            if common > length:
                best, length = entry, common
        length = min(length, limit)
        old = best.versions[:length] if best else []
        self.stale_hits += sum(version != self.version for version in old)
        if best:
            best.used_at = self.clock
        if not req.retractions:
            req.cached = length
        req.kv_versions = [*old, *[self.version] * (len(context) - length)]
        req.is_prefilled = True

    def _decode(self, req: Req) -> None:
        params = req.params
        if req.finish or len(req.output) >= params["max_new_tokens"]:
            req.finish = req.finish or {"type": "length", "length": len(req.output)}
            return
        temperature = params.get("temperature", 1.0)
        values = self._penalised(req, logits(self.weights, req.context, self.vocabulary))
        greedy, temperature = temperature == 0, temperature or 1.0
        logprobs = log_softmax(values / (1.0 if self.original_logprobs else temperature))
        drawn_from = log_softmax(values / temperature)
        support = self._support(params, drawn_from, greedy=greedy)
        kept = drawn_from[support] - np.log(np.exp(drawn_from[support]).sum())
        noise = np.random.default_rng([abs(params.get("sampling_seed") or 0), len(req.context)])
        chosen = 0 if greedy else int(noise.choice(len(support), p=np.exp(kept) / np.exp(kept).sum()))
        token = int(support[chosen])
        req.output.append(token)
        req.entries.append([float(logprobs[token]), token, None])
        order = np.argsort(-logprobs)[: req.body.get("top_logprobs_num") or 0]
        req.tops.append([[float(logprobs[i]), int(i), None] for i in order])
        req.masks.append([int(i) for i in support])
        every = req.body.get("sampling_logprobs_mode") == "support"
        req.kept.append([float(value) for value in kept] if every else float(kept[chosen]))
        req.kv_versions.append(self.version)
        req.finish = self._finished(req, token)

    def _penalised(self, req: Req, values: NDArray[np.float64]) -> NDArray[np.float64]:
        counts = np.bincount(req.output, minlength=self.vocabulary)
        values = values - req.params.get("presence_penalty", 0.0) * (counts > 0)
        values = values - req.params.get("frequency_penalty", 0.0) * counts
        if (req.params.get("regex") or "").startswith("[ab]"):
            values[2:] = -np.inf
        return values

    def _support(
        self, params: dict[str, Any], logprobs: NDArray[np.float64], *, greedy: bool
    ) -> NDArray[np.int64]:
        order = np.argsort(-logprobs)
        top_k = 1 if greedy else params.get("top_k", -1)
        top_k = self.vocabulary if top_k == -1 else top_k
        before = np.cumsum(np.exp(logprobs[order])) - np.exp(logprobs[order])
        kept = (np.arange(self.vocabulary) < top_k) & (before <= params.get("top_p", 1.0))
        likely = logprobs[order] >= logprobs.max() + np.log(max(params.get("min_p", 0.0), 1e-30))
        return order[kept & likely & np.isfinite(logprobs[order])]

    def _finished(self, req: Req, token: int) -> dict[str, Any] | None:
        params = req.params
        stops = [*params.get("stop_token_ids", []), *([EOS] if self.eos_stops else [])]
        # As in the real one: this also switches off the caller's own stop tokens.
        if not params.get("ignore_eos") and token in stops:
            return {"type": "stop", "matched": token}
        text = "".join(chr(33 + token) for token in req.output)
        for stop in params.get("stop", []):
            if stop in text:
                return {"type": "stop", "matched": stop}
        if len(req.output) >= params["max_new_tokens"] or len(req.context) >= CONTEXT:
            return {"type": "length", "length": len(req.output)}
        return None

    def _insert(self, req: Req) -> None:
        if not req.is_prefilled:
            return
        session = req.body.get("session_id")
        entries = self.cache.setdefault(req.body.get("extra_key") or "", [])
        tokens = req.context[:-1]
        entry = Cached(tokens, req.kv_versions[: len(tokens)], self.clock)
        for old in [old for old in entries if old.tokens == tokens[: len(old.tokens)]]:
            entry.sessions |= old.sessions
            entries.remove(old)
        entries.append(entry)
        if session is not None and session not in self.closed:
            entry.sessions.add(session)
        # Without a reference first, then by age.
        while sum(len(entry.tokens) for entry in self._entries()) > self.pool:
            worst = min(self._entries(), key=lambda entry: (bool(entry.sessions), entry.used_at))
            for entries in self.cache.values():
                entries[:] = [entry for entry in entries if entry is not worst]
