"""A language model as the judge of an episode.

- It answers within the deadline, after retries if need be, or the program is failed(infrastructure): a judge
  that does not work is never a reward of zero.
- The same question is asked once, also by programs that ask it at the same time.
- Its queue is its own: at most `concurrency` questions of one worker process are under way.
"""

import hashlib
import json
import math
import re
from collections import OrderedDict
from dataclasses import KW_ONLY, dataclass, field
from string import Template
from typing import Any, cast

import aiohttp
import anyio

from sostenuto.errors import ConfigError, JudgeError
from sostenuto.tools.remote.waiting import retry_after_s

_PAUSE_S = 0.5
_SHOWN = 300
_PASSING = frozenset({408, 409, 425, 429})
_ANSWER_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class _Failure:
    """One attempt that came to nothing, and may come to something next time."""

    why: str
    after_s: float | None = None


@dataclass(slots=True)
class Judge:
    """Asks a chat endpoint as OpenAI, vLLM, SGLang or `sostenuto serve` have it for a score.

    Keep one for a class of environments, as an attribute of the class or of its module.
    """

    url: str
    """Of the API, such as "http://127.0.0.1:8000/v1"."""
    model: str
    prompt: str
    """What it is asked; `$name` stands for what `score(name=...)` is given, `$$` for a dollar sign."""
    _: KW_ONLY
    pattern: str = r"(?i)score\s*[:=]?\s*\**\s*(-?\d+(?:\.\d+)?)"
    """Its last match in the answer has the score as its first group."""
    lowest: float = 0.0
    highest: float = 1.0
    """Beside them no score is believed."""
    deadline_s: float = 60.0
    """For one score, waiting and all attempts included."""
    attempts: int = 3
    concurrency: int = 8
    cached: int = 4096
    """Scores that are kept, the longest unused are forgotten; 0: none."""
    parameters: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.0, "max_tokens": 1024})
    """Of the request, beside model and messages."""
    _scores: "OrderedDict[bytes, float]" = field(default_factory=OrderedDict[bytes, float], init=False)
    _asked: dict[bytes, anyio.Lock] = field(default_factory=dict[bytes, anyio.Lock], init=False)
    _places: anyio.Semaphore | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """ConfigError names the field that cannot be used."""
        if not re.match(r"https?://[^/]+", self.url):
            raise ConfigError(f"judge: url is {self.url!r}; give one that begins with http:// or https://")
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ConfigError(f"judge: pattern {self.pattern!r}: {error}") from None
        if groups < 1:
            raise ConfigError(f"judge: pattern {self.pattern!r} has no group; put the score in brackets")
        for name in ("attempts", "concurrency"):
            if getattr(self, name) < 1:
                raise ConfigError(f"judge: {name} is {getattr(self, name)}; give at least 1")
        if not self.lowest < self.highest:
            raise ConfigError(f"judge: lowest {self.lowest} is not below highest {self.highest}")
        if not 0 < self.deadline_s < math.inf:
            raise ConfigError(f"judge: deadline_s is {self.deadline_s}; give seconds above 0")

    async def score(self, *, key: str = "", **given: str) -> float:
        """The judge's score.  `key`: of the API, best from `self.secrets`.

        JudgeError when it gives none in time; ConfigError for a prompt that names what is not given.
        """
        try:
            question = Template(self.prompt).substitute(given)
        except (KeyError, ValueError) as error:
            raise ConfigError(f"judge: prompt: {error} is not given; give it to `score`") from None
        name = hashlib.sha256(f"{self.model}\0{self.parameters!r}\0{question}".encode()).digest()
        with anyio.move_on_after(self.deadline_s):
            return await self._once(name, question, key)
        raise JudgeError(f"judge {self.model}: no score within {self.deadline_s:g} s")

    async def _once(self, name: bytes, question: str, key: str) -> float:
        lock = self._asked.setdefault(name, anyio.Lock())
        try:
            async with lock:
                if name not in self._scores:
                    score = await self._ask(question, key)
                    self._keep(name, score)
                    return score
                self._scores.move_to_end(name)
                return self._scores[name]
        finally:
            if not lock.statistics().tasks_waiting and not lock.locked():
                self._asked.pop(name, None)

    def _keep(self, name: bytes, score: float) -> None:
        if not self.cached:
            return
        self._scores[name] = score
        while len(self._scores) > self.cached:
            self._scores.popitem(last=False)

    async def _ask(self, question: str, key: str) -> float:
        if self._places is None:
            self._places = anyio.Semaphore(self.concurrency)
        why = ""
        async with self._places, aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as http:
            for attempt in range(self.attempts):
                outcome = await self._attempt(http, question, key)
                if not isinstance(outcome, _Failure):
                    return outcome
                why = outcome.why
                if attempt + 1 < self.attempts:
                    await anyio.sleep(_PAUSE_S * 2**attempt if outcome.after_s is None else outcome.after_s)
        raise JudgeError(f"judge {self.model}: {why} ({self.attempts} attempts)")

    async def _attempt(self, http: aiohttp.ClientSession, question: str, key: str) -> float | _Failure:
        body = {**self.parameters, "model": self.model, "messages": [{"role": "user", "content": question}]}
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        url = f"{self.url.rstrip('/')}/chat/completions"
        try:
            async with http.post(url, json=body, headers=headers, allow_redirects=False) as response:
                if response.status != 200:
                    return self._refused(response, await _begin_of(response))
                answer: object = await _json_of(response)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return _Failure(f"{type(error).__name__}: {error}")
        return self._read(answer)

    def _refused(self, response: aiohttp.ClientResponse, said: str) -> _Failure:
        why = f"status {response.status} of {response.url.with_query(None)}: {said}"
        if response.status < 500 and response.status not in _PASSING:
            # Asking again would not change it.
            raise JudgeError(f"judge {self.model}: {why}")
        return _Failure(why, retry_after_s(response.headers.get("Retry-After")))

    def _read(self, answer: object) -> float | _Failure:
        try:
            text: object = cast("Any", answer)["choices"][0]["message"]["content"]
        except (LookupError, TypeError):
            return _Failure(f"an answer that is no chat completion: {str(answer)[:_SHOWN]}")
        found = re.findall(self.pattern, text) if isinstance(text, str) else []
        if not found:
            return _Failure(f"an answer without a score: {str(text)[-_SHOWN:]!r}")
        last = found[-1] if isinstance(found[-1], str) else found[-1][0]
        try:
            score = float(last)
        except ValueError:
            return _Failure(f"a score that is no number: {last!r}")
        if not self.lowest <= score <= self.highest:
            return _Failure(f"a score of {score:g}, beside [{self.lowest:g}, {self.highest:g}]")
        return score


async def _begin_of(response: aiohttp.ClientResponse) -> str:
    return (await response.content.read(_SHOWN)).decode(errors="replace")


async def _json_of(response: aiohttp.ClientResponse) -> object:
    """ValueError for what is no JSON, or too much."""
    data = bytearray()
    async for chunk in response.content.iter_chunked(65536):
        data += chunk
        if len(data) > _ANSWER_BYTES:
            raise ValueError(f"an answer of more than {_ANSWER_BYTES >> 20} MiB")
    return json.loads(bytes(data))
