"""From a delta: the served weights with what has changed, or the last full version with all deltas since."""

from collections.abc import Collection, Generator
from pathlib import Path

from sostenuto.errors import EngineError
from sostenuto.runtime.engines.embedded.receiving.receiver import PUBLISH_AGAIN, Bytes, Incoming
from sostenuto.runtime.engines.embedded.receiving.room import Base
from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.trainer.publication.chain import DeltaFile, Start, full_version, tensors
from sostenuto.trainer.publication.manifest import Delta, Manifest


class PatchedReceiver:
    """Reads one file where the engine serves the delta's base, and else all that lead to the version."""

    def __init__(self, base: Base) -> None:
        self._base = base

    def receive(self, manifest: Manifest, wanted: Collection[str]) -> Generator[Incoming]:
        if manifest.delta is None:
            raise Refusal(422, "manifest", "delta: is missing", "send the manifest as the sender made it")
        try:
            files = manifest.delta.deltas
            start = self._from_served(manifest.delta, wanted)
            if start is None:
                start = self._from_full(manifest)
            else:
                files = files[-1:]
            deltas = [DeltaFile(Path(file)) for file in files]
            for entry, content in tensors(manifest, start, deltas, wanted):
                yield Incoming(entry, content)
        except EngineError as error:
            raise Refusal(409, "base", f"delta: {error}", PUBLISH_AGAIN) from error

    def _from_full(self, manifest: Manifest) -> Start:
        """EngineError says also why it is needed."""
        assert manifest.delta is not None
        try:
            return full_version(Path(manifest.delta.full))
        except EngineError as error:
            base, serves = manifest.delta, self._base
            digest = "unknown" if serves.digest is None else f"{serves.digest:08x}"
            raise EngineError(
                f"version {manifest.version} is a delta on {base.base} (digest {base.base_digest:08x}), this "
                f"engine serves {serves.version} ({digest}) and could not catch up: {error}"
            ) from error

    def _from_served(self, delta: Delta, wanted: Collection[str]) -> Start | None:
        """None: this engine has other weights, or keeps them in another form."""
        base = self._base
        if (str(base.version), base.digest) != (delta.base, delta.base_digest):
            return None
        contents: dict[str, Bytes] = {}
        for name in wanted:
            served = base.served(name)
            if served is None:
                return None
            contents[name] = served
        return Start(delta.base, delta.base_digest, contents)
