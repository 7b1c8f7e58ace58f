"""Driving hosts in tests: a pool for one test, and programs in a few words."""

import inspect
import json
from collections.abc import Awaitable, Callable

import anyio
import psutil
from pydantic import JsonValue

from fakes_envs import Ledger, Zoo
from sostenuto.envs.pool import WorkerPool
from sostenuto.envs.registry import environment_ref
from sostenuto.sandbox.protocol import Sandbox
from sostenuto.tools.host import Host
from sostenuto.tools.wire import CallRequest, EnvironmentRef, Prepared, PrepareRequest, RewardRequest
from sostenuto.types import Episode, Message, ProgramId, StopReason, ToolResult

ZOO = environment_ref(Zoo)
LEDGER = environment_ref(Ledger)
SUM: dict[str, JsonValue] = {"csv": "a,1", "question": "How much?", "answer": "1"}
SECRET = "open-sesame"


def with_pool(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Give the test a pool of its own, opened and closed in the test's task."""

    async def run(**arguments: object) -> None:
        async with WorkerPool(secrets={"TOKEN": SECRET}, grace_s=0.3) as pool:
            await test(pool, **arguments)

    others = list(inspect.signature(test).parameters.values())[1:]
    run.__name__ = test.__name__
    vars(run)["__signature__"] = inspect.Signature(others)
    return run


async def prepare(host: Host, program: str, how: str = "", ref: EnvironmentRef = ZOO) -> Prepared:
    request = PrepareRequest(owner="o", environment=ref, task={"how": how}, seed=3, timeout_s=0.5)
    return await host.prepare(ProgramId(program), request, None)


async def prepare_ledger(host: Host, program: str, sandbox: Sandbox | None) -> Prepared:
    return await host.prepare(
        ProgramId(program), PrepareRequest(owner="o", environment=LEDGER, task=SUM), sandbox
    )


async def call(host: Host, program: str, name: str, **arguments: JsonValue) -> ToolResult:
    request = CallRequest(call_id=f"{program}-{name}", name=name, arguments=json.dumps(arguments))
    return await host.call(ProgramId(program), request)


async def score(host: Host, program: str, answer: str = "") -> float:
    episode = Episode((Message("assistant", answer),), StopReason.ANSWERED)
    request = RewardRequest(call_id="r", episode=episode, timeout_s=0.5)
    value = (await host.reward(ProgramId(program), request)).value
    assert value is not None
    return value


async def until_gone(pid: int) -> None:
    await until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


async def until(is_so: Callable[[], bool]) -> None:
    with anyio.fail_after(10):
        while not is_so():  # noqa: ASYNC110 - nobody tells
            await anyio.sleep(0.02)
