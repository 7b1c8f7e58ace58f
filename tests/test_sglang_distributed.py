"""New weights through a process group: the sender and the server begin and end together."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import anyio
import pytest

from fakes_sglang import FakeSGLang
from sglang_faked import HASTY, PROMPT
from sglang_servers import NAME, SOON, Served, faking, request
from sostenuto.errors import EngineError
from sostenuto.runtime.engines.sglang.engine import Deadlines, SGLangEngine
from sostenuto.runtime.engines.sglang.transports import Distributed, Group, Sender
from sostenuto.runtime.engines.wire import CommitRequest
from sostenuto.trainer.publication.manifest import TensorEntry

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with faking(tmp_path, step_s=0.002) as served:
        yield served


@pytest.fixture
def fake(served: Served) -> FakeSGLang:
    assert served.fake is not None
    return served.fake


class _Sends:
    """The trainer's side: the number that it broadcasts stands for the bytes."""

    def __init__(self, fake: FakeSGLang) -> None:
        self.fake = fake
        self.joined: list[Group] = []
        self.sent: list[list[str]] = []
        self.is_stuck = False

    async def join(self, group: Group) -> None:
        await anyio.lowlevel.checkpoint()
        self.joined.append(group)

    async def send(self, version: str, bucket: Sequence[TensorEntry]) -> None:
        if self.is_stuck:
            await anyio.sleep_forever()
        self.sent.append([entry.name for entry in bucket])
        await self.fake.group.put(hash((version, len(self.sent))) & 0xFFFF)


GROUP = Group(master_address="127.0.0.1", master_port=1, world_size=2, backend="gloo")


@pytest.fixture
def sends(fake: FakeSGLang) -> _Sends:
    return _Sends(fake)


def joining(served: Served, sends: _Sends, deadlines: Deadlines) -> SGLangEngine:
    sender: Sender = sends
    transport = Distributed(GROUP, sender, bucket_bytes=64)
    return SGLangEngine(NAME, served.url, model=served.folder, transport=transport, deadlines=deadlines)


@pytest.fixture
async def joined(served: Served, sends: _Sends) -> AsyncIterator[SGLangEngine]:
    async with joining(served, sends, SOON) as engine:
        yield engine


async def test_a_distributed_update_goes_in_buckets_between_begin_and_end(
    served: Served, fake: FakeSGLang, sends: _Sends, joined: SGLangEngine
):
    for number in (1, 2):
        await joined.prepare_update(served.publish(f"0.{number}", number))
        await joined.commit_update(CommitRequest(version=f"0.{number}"))
    assert sends.sent == [["t0"], ["t1"]] * 2
    assert sends.joined == [GROUP]
    assert (await joined.capabilities()).version == "0.2"
    order = [route for route in fake.routes if "weight" in route and "checker" not in route]
    middle = ["/update_weights_from_distributed"] * 2
    once = ["/begin_weight_update", *middle, "/end_weight_update", "/update_weight_version"]
    assert order == ["/init_weights_update_group", *once, *once]


async def test_a_bucket_that_fails_ends_the_senders_wait_and_the_session(
    served: Served, fake: FakeSGLang, sends: _Sends, joined: SGLangEngine
):
    await joined.prepare_update(served.publish("0.1", 1))
    fake.torn_update, sends.is_stuck = "Failed to receive weights: x", True
    with pytest.raises(EngineError, match="Failed to receive weights"):
        await joined.commit_update(CommitRequest(version="0.1"))
    with pytest.raises(EngineError, match="nothing it samples is believed"):
        await joined.generate(request("a", PROMPT))
    fake.torn_update, sends.is_stuck = "", False
    await joined.prepare_update(served.publish("0.2", 2))
    await joined.commit_update(CommitRequest(version="0.2"))
    assert (await joined.generate(request("b", PROMPT))).versions[0].version == "0.2"


async def test_a_sender_that_sends_nothing_ends_at_the_deadline(
    served: Served, sends: _Sends, fake: FakeSGLang
):
    async with joining(served, sends, HASTY) as engine:
        await engine.prepare_update(served.publish("0.1", 1))
        sends.is_stuck = True
        with pytest.raises(EngineError, match="within 2 s"):
            await engine.commit_update(CommitRequest(version="0.1"))
    assert not fake.core.is_paused


async def test_a_restarted_engine_joins_the_group_again(
    served: Served, fake: FakeSGLang, sends: _Sends, joined: SGLangEngine
):
    await joined.prepare_update(served.publish("0.1", 1))
    await joined.commit_update(CommitRequest(version="0.1"))
    fake.start_again()
    await joined.capabilities()
    await joined.prepare_update(served.publish("0.2", 2))
    await joined.commit_update(CommitRequest(version="0.2"))
    assert len(sends.joined) == 2
