"""The tool server seen from outside: metrics, state, logs, request ids."""

import io
import json
import logging
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
import anyio
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fakes_tools import FORM, SECRET, TOKEN, FakeBackend, FakeHosts, config
from sostenuto.errors import EnvironmentFailure
from sostenuto.tools.client import ToolServerClient
from sostenuto.tools.logs import CALL, PROGRAM, json_logs
from sostenuto.tools.metrics import MOST_TOOLS, Metrics
from sostenuto.tools.secrets import Secrets, redacted_logs
from sostenuto.tools.server import listen
from sostenuto.tools.wire import State
from sostenuto.types import CallId, ProgramId, ToolCall

A = ProgramId("a")
METRICS_TOKEN = "for-the-scraper-only"


@dataclass
class Served:
    url: str
    client: ToolServerClient
    session: aiohttp.ClientSession

    async def get(self, path: str, token: str = TOKEN, **headers: str) -> tuple[int, str, str]:
        sent = {"Authorization": f"Bearer {token}", **headers}
        async with self.session.get(self.url + path, headers=sent) as response:
            return response.status, await response.text(), response.headers.get("X-Request-Id", "")

    async def samples(self) -> dict[str, float]:
        """By name and labels, as in the text format."""
        _, text, _ = await self.get("/metrics")
        return samples(text)


def samples(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}[{labels}]".removeprefix("sostenuto_tools_")] = sample.value
    return found


@asynccontextmanager
async def serving(**changes: object) -> AsyncGenerator[Served]:
    async with (
        listen(config(**changes), FakeBackend(), FakeHosts(), Secrets({"KEY": SECRET})) as url,
        ToolServerClient(url, TOKEN, "owner") as client,
        aiohttp.ClientSession() as session,
    ):
        yield Served(url, client, session)


async def test_metrics_count_what_happened_and_show_what_is_here():
    async with serving() as served:
        await served.client.prepare(A, FORM, {})
        with pytest.raises(EnvironmentFailure):
            await served.client.prepare(ProgramId("b"), FORM, {"fail": "x"})
        await served.client.call(A, CallId("1"), ToolCall("echo", "1"))
        with pytest.raises(EnvironmentFailure):
            await served.client.call(A, CallId("2"), ToolCall("crash", "1"))
        seen = await served.samples()
        assert seen["programs[phase=ready]"] == 1
        assert seen["sandboxes[backend=fake]"] == 1
        assert seen["leaked[]"] == seen["queued[]"] == 0
        assert seen["owners[]"] == seen["hosts[]"] == 1
        assert seen["events_total[event=prepared]"] == 1
        assert seen["events_total[event=prepare_failures]"] == 1
        assert seen["start_seconds_count[]"] == 2
        assert seen["prepare_seconds_count[outcome=prepared]"] == 1
        assert seen["prepare_seconds_count[outcome=environment]"] == 1
        assert seen["call_seconds_count[outcome=ok,tool=echo]"] == 1
        assert seen["call_seconds_bucket[le=+Inf,outcome=ok,tool=echo]"] == 1
        assert seen["call_seconds_count[outcome=environment,tool=other]"] == 1
        assert seen["memory_bytes[of=server]"] > 1 << 20
        assert seen["disk_bytes[what=free]"] > 0


async def test_metrics_open_with_their_own_token_which_opens_nothing_else():
    async with serving(metrics_token=METRICS_TOKEN) as served:
        assert (await served.get("/metrics", METRICS_TOKEN))[0] == 200
        assert (await served.get("/metrics"))[0] == 200
        assert (await served.get("/metrics", "wrong"))[0] == 401
        assert (await served.get("/v1/state", METRICS_TOKEN))[0] == 401
        assert (await served.get("/nowhere", METRICS_TOKEN))[0] == 401


async def test_no_policy_can_invent_labels():
    metrics = Metrics(None)
    metrics.declare(f"t{n}" for n in range(MOST_TOOLS + 50))
    for n in range(MOST_TOOLS + 50):
        metrics.called(f"t{n}", "ok", 0.1)
        metrics.called(f"invented{n}", "invalid_arguments", 0.1)
    state = State(programs=(), hosts=0, owners={}, counters={}, queued=0, leaked=0)
    seen = samples((await metrics.text(state)).decode())
    tools = {name for name in seen if name.startswith("call_seconds_count[outcome=ok")}
    assert len(tools) == MOST_TOOLS + 1
    assert seen["call_seconds_count[outcome=ok,tool=other]"] == 50
    assert seen["call_seconds_count[outcome=invalid_arguments,tool=other]"] == MOST_TOOLS + 50


async def test_state_says_of_each_program_how_old_it_is_and_why_it_is_here():
    async with serving(idle_s=500) as served:
        await served.client.prepare(A, FORM, {})
        (program,) = (await served.client.state()).programs
        assert re.fullmatch(r"ready for \d+\.\d s", program.reason)
        assert 490 < program.left_s <= 500
        async with anyio.create_task_group() as group:
            for n in range(2):
                group.start_soon(served.client.call, A, CallId(str(n)), ToolCall("sleep", "1000"))
            with anyio.fail_after(20):
                while not program.reason.endswith(", and 1 more"):
                    await anyio.sleep(0.01)
                    (program,) = (await served.client.state()).programs
            group.cancel_scope.cancel()
        assert program.phase == "calling"
        assert re.fullmatch(r"calling sleep for \d+\.\d s, and 1 more", program.reason)


@asynccontextmanager
async def logging_to(level: str = "debug") -> AsyncGenerator[io.StringIO]:
    stream, secrets = io.StringIO(), Secrets({"KEY": SECRET})
    with redacted_logs(secrets), json_logs(stream, level, secrets.redact):
        yield stream


def lines(stream: io.StringIO) -> list[dict[str, str]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


async def test_logs_are_json_lines_that_name_program_call_and_request():
    async with logging_to() as stream, serving() as served:
        await served.client.prepare(A, FORM, {})
        await served.client.call(A, CallId("3.0"), ToolCall("echo", "1"))
        await served.get("/v1/state", **{"X-Request-Id": "my-id"})
        await served.client.release(A)
    found = {line["message"].split()[0]: line for line in lines(stream) if line["logger"].startswith("sost")}
    assert found["prepared"]["program"] == found["released"]["program"] == "a"
    call = found["echo:"]
    assert (call["program"], call["call"], call["level"]) == ("a", "3.0", "debug")
    assert call["request"]
    assert call["time"].endswith("+00:00")


async def test_logs_keep_to_their_level_and_hold_no_secret():
    async with logging_to("warning") as stream:
        PROGRAM.set(SECRET)
        CALL.set("\ud800")
        log = logging.getLogger("sostenuto.tests")
        log.info("not this")
        try:
            raise ValueError(SECRET)
        except ValueError:
            log.exception("with %s\n%s", SECRET, "a second line")
    (line,) = lines(stream)
    assert line["message"] == "with [secret KEY]\na second line"
    assert line["program"] == "[secret KEY]"
    assert "ValueError: [secret KEY]" in line["exception"]
    assert "sk-" not in stream.getvalue()


async def test_a_request_id_comes_back_as_it_was_sent_or_new():
    async with serving() as served:
        assert (await served.get("/v1/state", **{"X-Request-Id": "run-7.42"}))[2] == "run-7.42"
        assert (await served.get("/v1/state", "wrong", **{"X-Request-Id": "x"}))[2] == "x"
        first = (await served.get("/v1/state"))[2]
        second = (await served.get("/v1/state", **{"X-Request-Id": "has spaces {}"}))[2]
        assert len(first) == len(second) == 16
        assert first != second
