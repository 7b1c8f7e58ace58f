"""One run of a remote agent: begun, asked after, and given up.

- What the service says about the run (4xx, a failure, no reward) is its author's; that it does not work
  (no connection, 408, 429, 5xx) is infrastructure.
- A service may have lost an answer, not a run: it is asked to begin again under the same id, and only while
  the program has made no model call.
- However it ends without a reward, the service is told, once and for a short time.
- A redirect is not followed, as the key of the program goes along.
"""

import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, cast
from uuid import uuid4

import aiohttp
import anyio
from pydantic_core import to_json
from yarl import URL

from sostenuto.envs.environment import Score
from sostenuto.errors import ConfigError, EnvironmentFailure, ToolServerError
from sostenuto.tools.remote.waiting import retry_after_s

Json = dict[str, Any]

_ANSWER_BYTES = 16 << 20
_SHOWN = 200
_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 60.0
_TOLD_WITHIN_S = 3.0
_BROKEN = {408, 429}
_LOST = {404, 410}
_RUNNING = {"running", "queued", "pending", "in_progress"}
_DONE = {"done", "completed", "succeeded"}
_FAILED = {"failed", "error", "cancelled"}


@dataclass(frozen=True, slots=True)
class Service:
    """Where runs are posted to, and how patiently."""

    url: str
    key_env: str
    retries: int
    poll_s: float

    def headers(self) -> dict[str, str]:
        """ConfigError where the key is not there."""
        if not self.key_env:
            return {}
        key = os.environ.get(self.key_env, "").strip()
        if not key:
            raise ConfigError(
                f"remote_agent: environment variable {self.key_env} is not set for the tool server"
            )
        return {"Authorization": f"Bearer {key}"}


@dataclass(frozen=True, slots=True)
class _Answer:
    call: str
    """Method and address, for errors."""
    status: int
    reason: str
    text: str
    headers: Any

    @property
    def is_broken(self) -> bool:
        """The service does not work, whatever was asked."""
        return self.status in _BROKEN or self.status >= 500

    @property
    def shown(self) -> str:
        return f"{self.call}: {self.status} {self.reason}: {self.text[:_SHOWN]!r}"

    def pause_s(self, otherwise: float) -> float:
        """What it says until the next question."""
        said = retry_after_s(self.headers.get("Retry-After"))
        return otherwise if said is None else min(said, _LONGEST_PAUSE_S)

    def read(self) -> Json:
        """The object of an answer that was no refusal."""
        if self.is_broken:
            raise ToolServerError(self.shown)
        if self.status not in {200, 201, 202}:
            hint = "; redirects are not followed" if 300 <= self.status < 400 else ""
            raise EnvironmentFailure(f"{self.shown}{hint}")
        try:
            value: object = json.loads(self.text)
        except (ValueError, RecursionError) as error:
            kind = self.headers.get("Content-Type", "no content type")
            raise EnvironmentFailure(
                f"{self.call}: no JSON but {kind}: {self.text[:_SHOWN]!r} ({error})"
            ) from None
        if not isinstance(value, dict):
            raise EnvironmentFailure(f"{self.call}: answered {self.text[:_SHOWN]!r}; answer with an object")
        return cast("Json", value)


@dataclass(slots=True)
class Run:
    """`reward` once."""

    service: Service
    base_url: str
    api_key: str
    id: str = field(default_factory=lambda: uuid4().hex)
    _place: URL | None = None
    """Where the service can be asked after the run."""
    _may_run: bool = False
    _found: Json = field(default_factory=dict[str, Any])
    """What was answered last, to the call `_call`."""
    _call: str = ""

    async def reward(self, body: Json) -> Score:
        """What the service answers; EnvironmentFailure and ToolServerError name the call that went wrong."""
        headers = {**self.service.headers(), "Idempotency-Key": self.id}
        async with _session(headers) as asking:
            try:
                await self._begin(asking, to_json(body))
                while (value := self._value()) is None:
                    await self._ask_again(asking)
            except BaseException:
                if self._may_run:
                    await self._give_up(asking)
                raise
            return value

    @property
    def _url(self) -> URL:
        return URL(self.service.url)

    async def _begin(self, asking: aiohttp.ClientSession, body: bytes) -> None:
        answer, self._found = await self._repeated(
            partial(self._ask, asking, "POST", self._url, body), until=self._has_called
        )
        self._call = answer.call
        if answer.status == 202:
            self._may_run = True
            self._place = self._status_url(answer, self._found)
            self._found = {"status": "running"}
            await anyio.sleep(answer.pause_s(self.service.poll_s))

    async def _ask_again(self, asking: aiohttp.ClientSession) -> None:
        """How the run stands now; a pause where it still runs."""
        assert self._place is not None
        answer, self._found = await self._repeated(partial(self._ask, asking, "GET", self._place))
        self._call = answer.call
        if self._found.get("status") in _RUNNING:
            await anyio.sleep(answer.pause_s(self.service.poll_s))

    async def _repeated(
        self, ask: Callable[[], Awaitable[_Answer]], until: Callable[[], Awaitable[bool]] | None = None
    ) -> tuple[_Answer, Json]:
        """Asked again while the service does not work, and not once `until` holds."""
        for attempt in count():
            try:
                answer = await ask()
                return answer, answer.read()
            except ToolServerError as error:
                if attempt >= self.service.retries or (until is not None and await until()):
                    raise ToolServerError(f"{error} ({attempt + 1} attempts)") from error
            await anyio.sleep(_PAUSE_S * 2**attempt)
        raise AssertionError("counting has no end")

    def _value(self) -> Score | None:
        """The reward and numbers beside it; None while it runs."""
        status = self._found.get("status", "done")
        if status in _RUNNING and self._place is not None:
            return None
        self._may_run = False
        if status in _FAILED:
            raise self._failure(
                f"the run has failed: {str(self._found.get('error', 'no reason given'))[:_SHOWN]}"
            )
        if status not in _DONE:
            raise self._failure(f"status {status!r:.80}; answer with running (after a 202), done or failed")
        more: object = self._found.get("metrics")
        numbers: Json = {**(cast("Json", more) if isinstance(more, dict) else {}), **self._found}
        metrics = {name: value for name, value in numbers.items() if _is_number(value)}
        if "reward" not in metrics:
            raise self._failure(f"reward is {self._found.get('reward')!r:.80}; answer with a number")
        return metrics

    def _failure(self, what: str) -> EnvironmentFailure:
        return EnvironmentFailure(f"{self._call}: {what}")

    async def _ask(
        self, asking: aiohttp.ClientSession, method: str, url: URL, body: bytes | None = None
    ) -> _Answer:
        call = f"{method} {url}"
        typed = {"Content-Type": "application/json"} if body is not None else {}
        begins = method == "POST"
        self._may_run = True
        try:
            async with asking.request(
                method, url, data=body, headers=typed, allow_redirects=False
            ) as response:
                text = await _text(response, call)
                answer = _Answer(call, response.status, response.reason or "", text, response.headers)
        except aiohttp.ClientConnectorError as error:
            self._may_run = not begins
            raise ToolServerError(f"{call}: no connection: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            why = f"{type(error).__name__}: {error}"
            raise ToolServerError(f"{call}: the connection was lost: {why}") from error
        self._may_run = not begins or answer.is_broken
        if not begins and answer.status in _LOST:
            raise ToolServerError(f"{answer.shown}: the service has lost the run")
        return answer

    async def _has_called(self) -> bool:
        """Whether a run of this program has reached its model; where nobody knows, it has."""
        try:
            async with (
                _session({"Authorization": f"Bearer {self.api_key}"}) as http,
                http.get(f"{self.base_url}/program") as response,
            ):
                return response.status != 200 or bool((await response.json())["has_called"])
        except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError):
            return True

    def _status_url(self, answer: _Answer, found: Json) -> URL:
        said = found.get("status_url") or answer.headers.get("Location")
        try:
            url = self._url.join(URL(said)) if isinstance(said, str) else None
        except ValueError:
            url = None
        if url is None or url.origin() != self._url.origin() or url.user is not None:
            raise EnvironmentFailure(
                f"{answer.call}: 202 with status_url {said!r:.120}; answer with one on {self._url.origin()}"
            )
        return url

    async def _give_up(self, asking: aiohttp.ClientSession) -> None:
        """Tell the service, which may not know of such a thing."""
        with anyio.move_on_after(_TOLD_WITHIN_S, shield=True):
            try:
                async with asking.delete(self._place or self._url / self.id, allow_redirects=False):
                    pass
            except (aiohttp.ClientError, OSError):
                return


async def _text(response: aiohttp.ClientResponse, call: str) -> str:
    data = bytearray()
    async for chunk in response.content.iter_chunked(65536):
        data += chunk
        if len(data) > _ANSWER_BYTES:
            raise EnvironmentFailure(f"{call}: answered more than {_ANSWER_BYTES} bytes")
    return data.decode(errors="replace")


def _session(headers: dict[str, str]) -> aiohttp.ClientSession:
    """The program's deadline is kept elsewhere."""
    return aiohttp.ClientSession(
        headers=headers,
        cookie_jar=aiohttp.DummyCookieJar(),
        connector=aiohttp.TCPConnector(force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=30.0),
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
