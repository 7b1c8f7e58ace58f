"""Whether an engine over HTTP serves what it was sent.

- Its label has to be the version that was asked for.
- Where it sums up its weights, the sum has to change exactly when the tensors that are sent do.  The sum
  itself says nothing: engines fuse, shard and convert tensors as they load them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from sostenuto.errors import EngineError
from sostenuto.runtime.engines.http import Answer, EngineHttp, HttpRefusal
from sostenuto.trainer.publication.manifest import Manifest

_NO_CHECKER = (400, 404, 405, 500, 501)


@dataclass(frozen=True, slots=True)
class Surface:
    """Where a kind of engine tells what it serves."""

    label: str
    """Route of a GET."""
    label_of: Callable[[Answer], str]
    checker: str
    """Route of a POST of {"action": "checksum"}."""
    sum_of: Callable[[Answer], str | None]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A version that an engine can load."""

    version: str
    manifest: Manifest | None
    """None: the weights of the model's own folder."""

    @property
    def sent(self) -> int | None:
        """Differs between two publications that differ; None: not comparable with any."""
        if self.manifest is None:
            return None
        return self.manifest.digest


class Verifier:
    """Of one server."""

    def __init__(self, http: EngineHttp, surface: Surface, *, within_s: float, start_is_known: bool) -> None:
        """`within_s`: of a checksum over all weights.  `start_is_known`: what it is started with is."""
        self._http = http
        self._surface = surface
        self._within_s = within_s
        self._start_is_known = start_is_known
        self._last: tuple[int, str] | None = None
        """What was sent last, and what the engine sums it up to; None: not known."""
        self.is_known = start_is_known
        """Whether anybody can say what it serves."""

    def restarted(self) -> None:
        """It serves what it was started with."""
        self.is_known, self._last = self._start_is_known, None

    async def verify(self, prepared: Prepared) -> None:
        """EngineError when it does not serve what was prepared."""
        label = self._surface.label_of(await self._http.get(self._surface.label))
        if label != prepared.version:
            where = self._http.where(self._surface.label)
            raise EngineError(f"{where}: it serves {label} after the update to {prepared.version}")
        sent, loaded = prepared.sent, await self._checksum()
        before = self._last
        self._last = (sent, loaded) if sent is not None and loaded is not None else None
        if before is not None and self._last is not None:
            self._compare(before, self._last)
        self.is_known = True

    def _compare(self, before: tuple[int, str], now: tuple[int, str]) -> None:
        was_sent, was_loaded = (a == b for a, b in zip(before, now, strict=True))
        if was_sent != was_loaded:
            raise EngineError(
                f"{self._http.where(self._surface.checker)}: its weights "
                f"{'did not change' if was_loaded else 'changed'}, and what was sent "
                f"{'did not' if was_sent else 'did'}; start it again"
            )

    async def _checksum(self) -> str | None:
        """Over all tensors of the engine; None where it has no checker."""
        try:
            answer = await self._http.post(
                self._surface.checker, {"action": "checksum"}, within_s=self._within_s
            )
        except HttpRefusal as refusal:
            if refusal.status in _NO_CHECKER:
                return None
            raise
        return self._surface.sum_of(answer)
