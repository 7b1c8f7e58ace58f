"""Which of an engine's weights a publication changes: the model's, the drafter's, or both.

The drafter is what guesses with weights of its own: a draft model, or the model's multi-token-prediction
head.  Its tensors have names that begin with "draft.".  It has a version of its own, which may be older
than the model's: old guesses are worse, and nothing else.
"""

from contextlib import closing
from dataclasses import dataclass

import torch

from sostenuto.runtime.engines.embedded.model import Model
from sostenuto.runtime.engines.embedded.receiving.receiver import Bytes, wrong
from sostenuto.runtime.engines.embedded.receiving.receivers import Receivers
from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.runtime.engines.embedded.weights import Weights, not_prepared, parsed
from sostenuto.trainer.publication.manifest import DRAFT_PREFIX, Manifest
from sostenuto.types import Version


@dataclass(frozen=True, slots=True)
class Committed:
    """What a version changed."""

    version: Version
    target: bool
    drafter: bool


class Publications:
    """The weights of one engine."""

    def __init__(self, target: Weights, drafter: Weights | None) -> None:
        self.target = target
        self.drafter = drafter
        self.digest: int | None = None
        """Of the publication that is served; None: not known."""
        self._staged_digest = 0
        self._receivers = Receivers(self, target.device)

    @property
    def version(self) -> Version:
        """Of the model: what is sampled is of this version, whatever guesses."""
        return self.target.version

    @property
    def broken(self) -> str | None:
        drafter = self.drafter.broken if self.drafter else None
        return self.target.broken or drafter

    def stage(self, manifest: Manifest) -> None:
        """Copy and verify what the manifest has for this engine; Refusal names the first wrong tensor.

        An engine without a drafter takes the model's part of a publication of both.
        """
        target, draft = _split(manifest)
        if manifest.selector == "draft" and self.drafter is None:
            message = f"selector: 'draft', but version {manifest.version} finds no drafter in this engine"
            raise Refusal(
                409, "no_drafter", message, "start it with --speculation draft or mtp, or send 'all'"
            )
        for weights in (self.target, self.drafter):
            if weights is not None:
                weights.staged = None
        parts = [(self.target, target)] if manifest.selector != "draft" else []
        if manifest.selector != "target" and self.drafter is not None:
            parts.append((self.drafter, draft))
        self._receive(manifest, parts)
        self._staged_digest = manifest.digest
        for weights, part in parts:
            weights.staged_whole(part)

    def _receive(self, manifest: Manifest, parts: list[tuple[Weights, Manifest]]) -> None:
        """Fetch the publication once; each part takes what is its own."""
        places: dict[str, tuple[Weights, str]] = {}
        for weights, part in parts:
            prefix = DRAFT_PREFIX if weights is self.drafter else ""
            for sent, name in weights.expect(part).items():
                places[prefix + sent] = (weights, name)
        missing = set(places)
        with closing(self._receivers.of(manifest).receive(manifest, frozenset(places))) as arriving:
            for incoming in arriving:
                if (place := places.get(incoming.entry.name)) is not None:
                    weights, name = place
                    weights.take(name, incoming)
                    missing.discard(incoming.entry.name)
        if missing:
            raise wrong(min(missing), f"did not arrive ({len(missing)} in all)")

    def commit(self, text: str) -> Committed:
        """Serve what was staged as version `text`; between two steps, on the engine's thread."""
        version = parsed(text)
        target = self.target.staged == version
        drafter = self.drafter if self.drafter and self.drafter.staged == version else None
        if not target and drafter is None:
            raise not_prepared(text, self.target.staged)
        self.digest = None
        if target:
            self.target.commit(text)
        if drafter:
            drafter.commit(text)
        self.digest = self._staged_digest
        return Committed(version, target, drafter is not None)

    def served(self, name: str) -> Bytes | None:
        """The bytes of a tensor as it was published; None where they are not kept so."""
        if name.startswith(DRAFT_PREFIX) and self.drafter is not None:
            return self.drafter.served(name.removeprefix(DRAFT_PREFIX))
        return self.target.served(name)

    def abandon(self, text: str) -> None:
        """Forget what was staged as version `text`; idempotent."""
        self.target.abandon(text)
        if self.drafter:
            self.drafter.abandon(text)


def publications_of(model: Model, drafter: torch.nn.Module | None, version: Version) -> Publications:
    """All are of `version` at the start."""
    target = Weights(model.module, version, model.quantized)
    return Publications(target, None if drafter is None else Weights(drafter, version))


def _split(manifest: Manifest) -> tuple[Manifest, Manifest]:
    """The tensors of the model and those of the drafter, under the names that these have for them."""
    if manifest.selector == "target":
        return manifest, manifest.model_copy(update={"tensors": ()})
    drafts = [entry for entry in manifest.tensors if entry.name.startswith(DRAFT_PREFIX)]
    own = [entry.model_copy(update={"name": entry.name.removeprefix(DRAFT_PREFIX)}) for entry in drafts]
    rest = tuple(entry for entry in manifest.tensors if not entry.name.startswith(DRAFT_PREFIX))
    return manifest.model_copy(update={"tensors": rest}), manifest.model_copy(update={"tensors": tuple(own)})
