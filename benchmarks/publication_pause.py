"""How long requests stand still when an engine takes over new weights of SmolLM2-135M in bfloat16.

A real engine process that decodes; versions through each transport, prepared while it does.
"""

import tempfile
from contextlib import closing
from functools import partial
from pathlib import Path

import anyio

from benchmarks.figure import Tell
from benchmarks.publication_transfer import broadcasts, smollm2, weights
from sostenuto.runtime.engines.client import EngineClient, launch_embedded
from sostenuto.runtime.engines.embedded.settings import EmbeddedSettings
from sostenuto.runtime.engines.wire import CommitRequest, GenerateRequest
from sostenuto.trainer.publication.disk import DiskSender
from sostenuto.trainer.publication.point_to_point import PointToPointSender
from sostenuto.trainer.publication.sender import Sender
from sostenuto.trainer.publication.shared_memory import SharedMemorySender
from sostenuto.trainer.publication.snapshot import Named
from sostenuto.types import EngineId, Version

_REQUESTS = 4
_VERSIONS = 4


def measure_pause(tell: Tell, *, quick: bool) -> None:
    folder = smollm2()
    if folder is not None and not quick:
        anyio.run(_measure, tell, folder, weights(quick=False))


async def _measure(tell: Tell, folder: Path, named: Named) -> None:
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as place:
        settings = EmbeddedSettings(
            model=folder, socket=Path(place) / "e.sock", kv_tokens=16384, concurrency=8, dtype="bfloat16"
        )
        senders: dict[str, Sender] = {
            "shared_memory": SharedMemorySender(),
            "disk": DiskSender(Path(place), keep=2),
            "broadcast": broadcasts(),
            "point_to_point": PointToPointSender("127.0.0.1", deadline_s=60),
        }
        number = 0
        async with launch_embedded(settings, engine_id=EngineId("e")) as engine:
            for name, sender in senders.items():
                with closing(sender):
                    pauses = [
                        await _pause(engine, sender, named, Version(0, number := number + 1))
                        for _ in range(_VERSIONS)
                    ]
                target = "<= 50" if name == "shared_memory" else None
                tell(f"publication_{name}_activation_pause_ms", 1e3 * max(pauses), "ms", target)


async def _pause(engine: EngineClient, sender: Sender, named: Named, version: Version) -> float:
    """The longest that a request stood still."""
    manifest = sender.publish(version, named)
    pauses: list[float] = []

    async def turn(name: str) -> None:
        request = GenerateRequest(
            request_id=name, program_id=name, token_ids=list(range(100, 200)), max_new_tokens=60
        )
        pauses.append((await engine.generate(request)).pause_s)

    async with anyio.create_task_group() as group:
        for index in range(_REQUESTS):
            group.start_soon(partial(turn, f"{version}-{index}"))
        await engine.prepare_update(manifest)
        pauses.append((await engine.commit_update(CommitRequest(version=str(version)))).pause_s)
    return max(pauses)
