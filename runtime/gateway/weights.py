"""What weight-control routes can do: let the engines stand still, and publish a folder of weights.

Invariants:
- One thing at a time.  A pause that not every engine can take leaves none standing still.
- Whatever is published goes through the gate: requests of the new version start only on engines that have
  verified it, and KV of the old one is dropped with the scheduler's knowledge.
- The file of the deployed version stays, for engines that join later; the one before it goes.
"""

import shutil
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from anyio import to_thread

from sostenuto.errors import EngineError
from sostenuto.runtime.dispatcher import Dispatcher
from sostenuto.runtime.engines.wire import Feature, PauseMode
from sostenuto.runtime.gateway.turn import Refused
from sostenuto.runtime.publishing import Publication
from sostenuto.runtime.weight_folder import publication_of
from sostenuto.types import Version


class Weights:
    """Use `open_weights`."""

    def __init__(self, dispatcher: Dispatcher, new_version: Callable[[], Version], place: Path) -> None:
        self._dispatcher = dispatcher
        self._new_version = new_version
        self._place = place
        self._turn = anyio.Lock()
        self.is_paused = False
        self._begun = False
        self._folder: Path | None = None
        """Of the update that was begun and is to be finished."""

    @property
    def version(self) -> Version:
        return self._dispatcher.version

    @property
    def engines(self) -> int:
        return len(self._dispatcher.fleet)

    async def pause(self, mode: PauseMode) -> None:
        """Let every engine stand still; EngineError, and none does, when one of them cannot."""
        async with self._turn:
            self._check_pausing()
            try:
                async with anyio.create_task_group() as group:
                    for engine in self._dispatcher.fleet.alive().values():
                        group.start_soon(engine.pause, mode)
            except* EngineError as errors:
                with anyio.CancelScope(shield=True):
                    await self._resume()
                raise EngineError("; ".join(map(str, errors.exceptions))) from errors
            self.is_paused = True

    async def resume(self) -> None:
        """Idempotent."""
        async with self._turn:
            await self._resume()

    async def begin(self) -> None:
        """An update of several calls; one that was begun before is forgotten."""
        self._begun, self._folder = True, None

    async def take(self, folder: Path, label: str | None) -> Publication | None:
        """Publish the folder at once, or at `finish` where an update was begun: None."""
        if not self._begun:
            return await self.publish(folder, label)
        self._folder = folder
        return None

    async def finish(self, label: str | None) -> Publication:
        folder, self._begun, self._folder = self._folder, False, None
        if folder is None:
            raise Refused(
                "no weights were given; send start_weight_update, update_weights with weight_dir, then this",
                status=409,
                code="no_update",
            )
        return await self.publish(folder, label)

    async def publish(self, folder: Path, label: str | None) -> Publication:
        """Bring the folder's weights to every engine.

        `label`: EPOCH.NUMBER or a number, above the deployed one; None: the next.  ConfigError and Refused
        for what cannot be published, EngineError when no engine took it.
        """
        async with self._turn:
            version = self._version(label)
            manifest = await to_thread.run_sync(publication_of, folder, self._place, version)
            try:
                publication = await self._dispatcher.publish(manifest)
            except EngineError:
                await to_thread.run_sync(Path(manifest.path).unlink)
                raise
            await to_thread.run_sync(_keep_only, Path(manifest.path))
            return publication

    def _version(self, label: str | None) -> Version:
        deployed = self.version
        if label is None:
            return max(self._new_version(), deployed.next())
        try:
            version = Version(deployed.epoch, int(label)) if label.isdecimal() else Version.parse(label)
        except ValueError:
            version = None
        if version is None or version <= deployed:
            raise Refused(
                f"weight_version: {label[:80]!r} is no version above {deployed}; give EPOCH.NUMBER or a "
                "number above it, or leave it out",
                field="weight_version",
            )
        return version

    def _check_pausing(self) -> None:
        if Feature.PAUSE not in self._dispatcher.fleet.features:
            raise Refused(
                "not every engine here can be paused; publish without a pause, as the swap needs none",
                status=501,
                code="unsupported",
            )

    async def _resume(self) -> None:
        self.is_paused = False
        async with anyio.create_task_group() as group:
            for engine in self._dispatcher.fleet.alive().values():
                group.start_soon(engine.resume)


@asynccontextmanager
async def open_weights(
    dispatcher: Dispatcher, new_version: Callable[[], Version], place: Path
) -> AsyncGenerator[Weights]:
    """Weights that are published by folder while the block runs; `place` is theirs, and empty afterwards."""
    await _clear(place)
    try:
        yield Weights(dispatcher, new_version, place)
    finally:
        with anyio.CancelScope(shield=True):
            await _clear(place)


def _keep_only(file: Path) -> None:
    for other in file.parent.iterdir():
        if other != file:
            other.unlink()


async def _clear(place: Path) -> None:
    await to_thread.run_sync(lambda: shutil.rmtree(place, ignore_errors=True))
