"""Programs, metrics and workers of a gateway, as those who run it see and change them, over HTTP."""

from pathlib import Path

import anyio
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateways import HELLO, Front, Json, always, fronted
from hosts import until
from scripted import write_tokenizer_folder
from sostenuto.runtime.config import GatewaySettings, RuntimeConfig
from sostenuto.runtime.engine_pool import EnginePool
from sostenuto.runtime.gateway.terms import Terms
from sostenuto.runtime.gateway.workers import PoolWorkers

A, B = {"X-Program-Id": "a"}, {"X-Program-Id": "b"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer_folder(tmp_path_factory.mktemp("model"))


async def programs(front: Front) -> dict[str, Json]:
    reply = await front.get("/programs")
    assert reply.status == 200
    return reply.json


async def standing(front: Front, name: str) -> tuple[str, str]:
    one = (await programs(front)).get(name, {"status": "", "state": ""})
    return one["status"], one["state"]


async def until_stands(front: Front, name: str, expected: tuple[str, str]) -> None:
    with anyio.fail_after(20):
        while await standing(front, name) != expected:  # noqa: ASYNC110 - it is asked over HTTP
            await anyio.sleep(0.01)


async def test_a_program_acts_between_its_calls_with_its_kv_held(model: Path):
    async with fronted(model, always("yes")) as front:
        first = await front.chat(HELLO, headers=A)
        one = (await programs(front))["a"]
        assert (one["status"], one["state"], one["backend"]) == ("acting", "active", "scripted")
        assert one["id"] == first.headers["X-Sostenuto-Program"]
        assert one["step_count"] == 1
        assert one["context_len"] == one["total_tokens"] == first.json["usage"]["total_tokens"]


async def test_a_program_that_has_lost_its_place_is_paused(model: Path):
    settings = GatewaySettings(hold_s=0.05)
    async with fronted(model, always("yes"), settings=settings, engine={"may_rewrite": True}) as front:
        await front.chat(HELLO, headers=A)
        await until_stands(front, "a", ("acting", "paused"))
        assert (await front.chat(HELLO, headers=A)).status == 200


async def test_a_program_that_waits_says_for_what(model: Path):
    slow = {"decode_s": 30.0, "concurrency": 1}
    async with fronted(model, always("yes"), engine=slow) as front, anyio.create_task_group() as group:
        group.start_soon(lambda: front.chat(HELLO, headers=A))
        await until_stands(front, "a", ("reasoning", "active"))
        group.start_soon(lambda: front.chat(HELLO, headers=B))
        await until_stands(front, "b", ("reasoning", "paused"))
        assert (await programs(front))["b"]["waits_for"] == "slots"
        group.cancel_scope.cancel()


async def test_a_released_program_holds_nothing_and_is_in_the_books(model: Path):
    async with fronted(model, always("yes")) as front:
        await front.chat(HELLO, headers=A)
        reply = await front.post("/programs/release", {"program_id": "a"})
        assert reply.json == {"program_id": "a", "released": True}
        assert (front.resident, len(front.ended.records), await programs(front)) == (0, 1, {})
        again = await front.post("/programs/release", {"program_id": "a"})
        assert (again.status, again.json["error"]["code"]) == (404, "unknown_program")


@pytest.mark.parametrize(("body", "field"), [({}, "program_id"), ({"program_id": 7}, "program_id")])
async def test_a_release_without_a_name_is_400(model: Path, body: Json, field: str):
    async with fronted(model, always("yes")) as front:
        reply = await front.post("/programs/release", body)
        assert (reply.status, reply.json["error"]["param"]) == (400, field)


async def test_a_program_with_an_owner_is_reached_and_ended_by_that_alone(model: Path):
    async with fronted(model, always("yes")) as front:
        sessions, keys = front.gateway.sessions, front.gateway.keys
        resident = sessions.open("task-1", Terms())
        key = {"Authorization": f"Bearer {keys.mint('task-1')}"}
        assert (await front.chat(HELLO, headers=key)).status == 200
        guessed = await front.chat(HELLO, headers={"X-Program-Id": "task-1"})
        assert (guessed.status, guessed.json["error"]["code"]) == (403, "owned")
        sub_agent = {"X-Session-ID": "sub", "X-Parent-Session-ID": "task-1"}
        assert (await front.chat(HELLO, headers=sub_agent)).status == 403
        released = await front.post("/programs/release", {"program_id": "task-1"})
        assert (released.status, released.json["error"]["code"]) == (409, "owned")
        assert resident.session.calls == 1
        sessions.end(resident)
        # Its key is not told yet, and begins no program of nobody.
        assert (await front.chat(HELLO, headers=key)).status == 401
        assert len(sessions) == 0


async def test_a_profile_says_where_the_time_of_a_program_went(model: Path):
    async with fronted(model, always("yes"), engine={"decode_s": 0.02}) as front:
        first = await front.chat(HELLO, headers=A)
        await anyio.sleep(0.05)
        told = [*HELLO, first.json["choices"][0]["message"], {"role": "user", "content": "Why?"}]
        second = await front.chat(told, headers=A)
        profile = (await front.get("/profiles/a")).json
        assert profile == (await front.get("/profiles")).json["a"]
        assert profile["step_count"] == 2
        assert profile["avg_decode_s"] == pytest.approx(0.02)
        assert profile["avg_tool_call_s"] >= 0.025
        usages = [reply.json["usage"] for reply in (first, second)]
        cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
        prompted = sum(usage["prompt_tokens"] for usage in usages)
        assert profile["avg_kv_hit_rate"] == pytest.approx(cached / prompted)
        assert (await front.get("/profiles/b")).status == 404
    (record,) = front.ended.records
    assert record.usage.tool_s >= 0.05


async def test_metrics_count_calls_tokens_and_waits(model: Path):
    async with fronted(model, always("yes")) as front:
        replies = [
            await front.chat(HELLO, headers=A),
            await front.post("/p/b/v1/completions", {"prompt": "x"}),
        ]
        await front.post("/v1/completions", {"prompt": ""})
        await front.get("/nowhere")
        told = await front.get("/metrics")
        assert told.headers["Content-Type"].startswith("text/plain")
        samples = {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(told.body.decode())
            for sample in family.samples
        }
        calls, seconds = "sostenuto_gateway_calls_total", "sostenuto_gateway_call_seconds_count"
        assert samples[calls, "/v1/chat/completions", "200"] == 1
        assert samples[calls, "/v1/completions", "200"] == 1
        assert samples[calls, "/v1/completions", "400"] == 1
        assert samples[calls, "none", "404"] == 1
        assert samples[seconds, "/v1/completions"] == 2
        generated = sum(reply.json["usage"]["completion_tokens"] for reply in replies)
        assert samples["sostenuto_gateway_tokens_total", "generated"] == generated
        assert samples["sostenuto_gateway_programs", "active", "acting"] == 2
        assert samples["sostenuto_gateway_decoding", "scripted"] == 0
        assert samples["sostenuto_gateway_reserved_tokens", "scripted"] > 0


async def test_a_client_that_went_away_and_a_repeated_call_are_told_apart(model: Path):
    async with fronted(model, always("yes"), engine={"decode_s": 30.0}) as front:
        with anyio.move_on_after(0.1):
            await front.chat(HELLO, headers=A)
        await until(lambda: not front.engine.decoding)
        front.engine.decode_s = 0.0
        once = {**A, "Idempotency-Key": "k"}
        first = await front.chat(HELLO, headers=once)
        await front.chat(HELLO, headers=once)
        text = (await front.get("/metrics")).body.decode()
        assert 'calls_total{route="/v1/chat/completions",status="499"} 1.0' in text
        assert 'calls_total{route="/v1/chat/completions",status="200"} 2.0' in text
        tokens = first.json["usage"]["completion_tokens"]
        assert f'tokens_total{{kind="generated"}} {float(tokens)}' in text


async def test_each_scope_opens_what_it_is_for(model: Path):
    keys = {f"SOSTENUTO_{name}_KEY": name[0].lower() * 24 for name in ("AGENT", "METRICS")}
    keys["SOSTENUTO_ADMIN_KEY"] = "b" * 24
    async with fronted(model, always("yes"), environment=keys) as front:
        for path, opened in (
            ("/programs", "b"),
            ("/profiles", "b"),
            ("/profiles/a", "b"),
            ("/list_workers", "b"),
            ("/metrics", "bm"),
        ):
            for letter in "abm":
                reply = await front.get(path, {"Authorization": "Bearer " + letter * 24})
                assert (reply.status == 403) is (letter not in opened), (path, letter)
            assert (await front.get(path)).status == 401


async def test_workers_come_and_go_by_their_address(model: Path, tmp_path: Path):
    pool = EnginePool(RuntimeConfig(directory=tmp_path))
    async with fronted(model, always("yes"), workers=PoolWorkers(pool)) as front:
        assert (await front.get("/list_workers")).json == {"urls": []}
        for path in ("/add_worker?url=http://gpu-1:8000/", "/add_worker?url=http://gpu-2:8000&kind=vllm"):
            assert (await front.post(path, None)).json["status"] == "success"
        assert (await front.get("/list_workers")).json == {"urls": ["http://gpu-1:8000", "http://gpu-2:8000"]}
        assert [entry.kind for entry in pool.entries] == ["embedded", "sglang", "vllm"]
        twice = await front.post("/add_worker?url=http://gpu-1:8000", None)
        assert (twice.status, "there already" in twice.json["error"]["message"]) == (400, True)
        assert (await front.post("/remove_worker?url=http://gpu-1:8000", None)).status == 200
        assert (await front.get("/list_workers")).json == {"urls": ["http://gpu-2:8000"]}


@pytest.mark.parametrize(
    "path",
    [
        "/add_worker",
        "/add_worker?url=gpu-1",
        "/add_worker?url=http://gpu-1:8000/v1",
        "/add_worker?url=http://gpu-1:8000&kind=other",
        "/remove_worker?url=http://nobody:1",
    ],
)
async def test_an_address_that_is_none_is_400(model: Path, tmp_path: Path, path: str):
    pool = EnginePool(RuntimeConfig(directory=tmp_path))
    async with fronted(model, always("yes"), workers=PoolWorkers(pool)) as front:
        assert (await front.post(path, None)).status == 400
        assert len(pool.entries) == 1


async def test_the_engines_of_a_job_are_not_changed_from_outside(model: Path):
    async with fronted(model, always("yes")) as front:
        reply = await front.post("/add_worker?url=http://gpu-1:8000", None)
        assert (reply.status, "Runtime.add_engine" in reply.json["error"]["message"]) == (501, True)


async def test_a_program_may_ask_whether_it_has_called_its_model(model: Path):
    async with fronted(model, always("yes"), environment={"SOSTENUTO_AGENT_KEY": "k" * 20}) as front:
        resident = front.gateway.sessions.open("task-1", Terms())
        own = {"Authorization": f"Bearer {front.gateway.keys.mint('task-1')}"}
        before = (await front.get("/v1/program", own)).json
        assert before == {"program": "task-1", "calls": 0, "has_called": False}
        await front.chat(HELLO, headers=own)
        after = (await front.get("/v1/program", own)).json
        assert after == {"program": "task-1", "calls": 1, "has_called": True}
        assert (await front.get("/v1/program", {"Authorization": f"Bearer {'k' * 20}"})).status == 404
        assert (await front.get("/v1/program")).status == 401
        front.gateway.sessions.end(resident)
