"""`transport = "auto"`: the one that should be the fastest here, and why."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

from sostenuto.errors import ConfigError
from sostenuto.trainer.publication.bandwidths import measure
from sostenuto.trainer.publication.costs import Bandwidths, Fleet, estimates
from sostenuto.trainer.publication.files import free_bytes
from sostenuto.trainer.publication.manifest import Transport
from sostenuto.trainer.publication.shared_memory import SHARED_MEMORY
from sostenuto.trainer.ranks import ALONE, Ranks
from sostenuto.trainer.settings import PublicationSettings

Measure = Callable[[Path | None, str], Bandwidths]

_log = logging.getLogger(__name__)


def resolved(
    settings: PublicationSettings, nbytes: int, ranks: Ranks = ALONE, measure: Measure = measure
) -> PublicationSettings:
    """With a transport that is one, the same for all ranks; `nbytes` of weights are published.

    ConfigError when none is possible.
    """
    if settings.transport != "auto":
        return settings
    said = _chosen(settings, nbytes, ranks.count, measure) if not ranks.index else None
    transport = ranks.gather(said)[0]
    if transport is None:
        raise ConfigError(
            "learner.publication: no transport is possible: an engine takes files alone, shared memory has "
            "no room or is not within its reach, and there is no directory; name one that trainer and "
            "engines share"
        )
    return settings.model_copy(update={"transport": transport})


def _chosen(settings: PublicationSettings, nbytes: int, ranks: int, measure: Measure) -> Transport | None:
    """None: there is none."""
    fleet = fleet_of(settings, nbytes, ranks)
    speed = measure(None if settings.directory is None else Path(settings.directory), settings.host)
    found = estimates(fleet, speed)
    if not found:
        return None
    _log.warning(
        "publication: %s is chosen for %.1f MB, %d rank(s), %d engine(s), as conversion + transfer + apply: "
        "%s; measured in GB/s: %s",
        found[0].transport, nbytes / 1e6, ranks, fleet.engines, ", ".join(map(str, found)), _told(speed),
    )  # fmt: skip
    return found[0].transport


def fleet_of(settings: PublicationSettings, nbytes: int, ranks: int) -> Fleet:
    """What is known of who publishes to whom."""
    engines = settings.engines
    return Fleet(
        nbytes=nbytes,
        ranks=ranks,
        engines=engines.count,
        processors=len(os.sched_getaffinity(0)),
        is_local=engines.local,
        has_room=free_bytes(SHARED_MEMORY) > 2 * nbytes,
        reads_files=engines.files_alone,
        quantized=engines.quantized,
        changed=settings.expected_change,
        deltas=settings.deltas,
    )


def _told(speed: Bandwidths) -> str:
    rates = {
        "copy": speed.copy, "checksum": speed.checksum, "shared memory": speed.memory,
        "disk write": speed.write, "disk read": speed.read, "network": speed.network,
    }  # fmt: skip
    return ", ".join(f"{name} {rate / 1e9:.2f}" for name, rate in rates.items() if rate is not None)
