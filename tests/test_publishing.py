"""A publication ends with whoever would carry it out, whatever it waits for at that moment."""

from typing import Any, cast

import anyio
import pytest

from sostenuto.errors import EngineError
from sostenuto.runtime.publishing import Publishing, UpdatePolicy
from sostenuto.scheduler.events import Event, PublicationBegun
from sostenuto.scheduler.gate import Gate
from sostenuto.trainer.publication.manifest import Manifest

MANIFEST = Manifest(version="0.1", path="/nowhere", nbytes=0, tensors=())


@pytest.mark.parametrize("before_it_waits", [True, False])
async def test_a_publication_that_no_engine_works_on_ends_with_the_dispatcher(before_it_waits: bool):
    """As while a swap waits for requests in flight."""
    fed: list[Event] = []
    errors: list[str] = []
    running = anyio.create_task_group()

    async def publish(publishing: Publishing) -> None:
        if before_it_waits:
            running.cancel_scope.cancel()
        with pytest.raises(EngineError) as caught:
            await publishing.publish(MANIFEST)
        errors.append(str(caught.value))

    publishing = Publishing({}, UpdatePolicy(), fed.append, running, cast("Any", None), Gate())
    with anyio.fail_after(5):
        async with anyio.create_task_group() as callers, running:
            callers.start_soon(publish, publishing)
            await anyio.wait_all_tasks_blocked()
            running.cancel_scope.cancel()
        await publishing.settled()
    assert [type(event) for event in fed] == [PublicationBegun]
    assert errors == ["version 0.1 could not be published: the engines were let go meanwhile"]
