"""Agents that are services elsewhere: real ones on 127.0.0.1, well-behaved and not."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest
from aiohttp import web

import sostenuto as so
from agents import hosting
from fakes_agents import Riddle, chat, user
from remote_services import hanging_up, listening
from scripted import says, specs_of, write_tokenizer_folder
from sostenuto.errors import Blame, ConfigError
from sostenuto.records import validate
from sostenuto.types import Limits

Json = dict[str, Any]
Handler = Callable[["Remote", web.Request], Awaitable[web.StreamResponse]]

ASKED = Riddle(question="six times seven", answer="42")


@dataclass
class Remote:
    """A service.  Its answers to POST are `begins`, the last one again and again."""

    begins: list[Handler]
    asked: list[Handler] = field(default_factory=list[Handler])
    url: str = ""
    bodies: list[Json] = field(default_factory=list[Json])
    headers: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    given_up: list[str] = field(default_factory=list[str])

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.method == "DELETE":
            self.given_up.append(request.path)
            return web.Response(status=404)
        answers = self.begins if request.method == "POST" else self.asked
        if request.method == "POST":
            self.bodies.append(await request.json())
            self.headers.append(dict(request.headers))
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        return await answer(self, request)


@asynccontextmanager
async def remote(*begins: Handler, asked: tuple[Handler, ...] = ()) -> AsyncGenerator[Remote]:
    made = Remote(list(begins), list(asked))
    async with listening(made.handle) as url:
        made.url = f"{url}/run"
        yield made


async def runs(service: Remote, _request: web.Request) -> web.StreamResponse:
    return web.json_response({**await played(service), "metrics": {"length": 2}, "trace": "kept nowhere"})


async def played(service: Remote) -> Json:
    """The agent itself."""
    body = service.bodies[-1]
    said = await chat(body["base_url"], body["api_key"], [user(body["task"]["question"])])
    return {"reward": float(said["content"] == body["task"]["answer"])}


def saying(text: str, status: int = 200, kind: str = "application/json", **headers: str) -> Handler:
    async def answer(_service: Remote, _request: web.Request) -> web.StreamResponse:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(text=text, status=status, content_type=kind, headers=named)

    return answer


def calling(then: Handler) -> Handler:
    """Call the model once, and then answer as `then` does."""

    async def answer(service: Remote, request: web.Request) -> web.StreamResponse:
        await played(service)
        return await then(service, request)

    return answer


async def hangs_up(_service: Remote, request: web.Request) -> web.StreamResponse:
    return await hanging_up(request)


async def never(_service: Remote, _request: web.Request) -> web.StreamResponse:
    await anyio.sleep_forever()
    raise AssertionError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer_folder(tmp_path_factory.mktemp("model"))


async def play(
    run: Path, model: Path, environments: dict[str, type], limits: Limits | None = None
) -> dict[str, Any]:
    """Each environment's program, by its name; nothing is held afterwards."""
    specs = [
        spec
        for name, environment in environments.items()
        for spec in specs_of(environment, {name: ASKED}, limits=limits)
    ]
    async with hosting(run, model, lambda _: [says("42")]) as (stage, _):
        done = await stage.play(specs)
        await stage.assert_nothing_is_held()
    return done


async def test_a_service_runs_its_agent_and_says_the_reward_at_once_or_when_asked(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("REMOTE_KEY", "s3cret")
    later = saying('{"status_url": "/runs/7"}', 202)
    moved = saying("{}", 202, Location="/runs/8", Retry_After="0")
    running = saying('{"status": "running"}', Retry_After="0")

    async def finished(service: Remote, _request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "done", **await played(service)})

    async with (
        remote(runs) as once,
        remote(later, asked=(running, saying("", 503), running, finished)) as asked,
        remote(moved, asked=(saying("", 404), finished)) as elsewhere,
    ):
        made = {
            "p": so.remote_agent(once.url, task=Riddle, key_env="REMOTE_KEY"),
            "q": so.remote_agent(asked.url, task=Riddle, poll_s=0.01),
            "r": so.remote_agent(elsewhere.url, task=Riddle, body=as_gym, poll_s=0.01),
        }
        done = await play(tmp_path / "run", model, made)
        for name in made:
            assert done[name].outcome is None, done[name].outcome
            assert done[name].reward == 1.0
            validate(done[name])
        assert done["p"].metrics["length"] == 2.0
        (body,) = once.bodies
        assert body["task"] == ASKED.model_dump(mode="json")
        assert (body["deadline_s"], body["base_url"][-3:]) == (60, "/v1")
        assert once.headers[0]["Authorization"] == "Bearer s3cret"
        assert once.headers[0]["Idempotency-Key"] == body["run_id"]
        assert "Authorization" not in asked.headers[0]
        assert elsewhere.bodies[0]["responses_create_params"] == {"input": "six times seven"}
        assert once.given_up == asked.given_up == elsewhere.given_up == []


def as_gym(task: Riddle, body: Json) -> Json:
    """A form of another service."""
    return {**body, "responses_create_params": {"input": task.question}}


HOSTILE: dict[str, tuple[Handler, str]] = {
    "a page": (saying("<html>busy</html>", kind="text/html"), "no JSON but text/html"),
    "half a JSON": (saying('{"reward": 1'), "no JSON but application/json"),
    "nothing": (saying(""), "no JSON but application/json"),
    "a list": (saying("[1]"), "answer with an object"),
    "no reward": (saying("{}"), "reward is None; answer with a number"),
    "a reward that is a text": (saying('{"reward": "1"}'), "reward is '1'; answer with a number"),
    "a reward that is a truth": (saying('{"reward": true}'), "reward is True; answer with a number"),
    "a reward that is none": (saying('{"reward": NaN}'), "a reward must be finite"),
    "a failure": (saying('{"status": "failed", "error": "no disk"}'), "the run has failed: no disk"),
    "a status of its own": (saying('{"status": "maybe"}'), "status 'maybe'; answer with"),
    "running, but nowhere": (saying('{"status": "running"}'), "status 'running'; answer with"),
    "a refusal": (saying("no such task", 404), "404 Not Found: 'no such task'"),
    "a redirect": (saying("", 307, Location="http://127.0.0.1:9/"), "redirects are not followed"),
    "a status elsewhere": (
        saying('{"status_url": "http://127.0.0.1:9/s"}', 202),
        "answer with one on http://",
    ),
    "no status": (saying("{}", 202), "202 with status_url None"),
    "far too much": (saying('{"a": "' + "x" * (17 << 20) + '"}'), "answered more than 16777216 bytes"),
    "deep JSON": (saying("[" * 100_000), "no JSON but application/json"),
}


async def test_an_answer_that_is_none_fails_with_the_call_that_gave_it(tmp_path: Path, model: Path):
    async with AsyncExitStack() as stack:
        services = {
            name: await stack.enter_async_context(remote(calling(answer)))
            for name, (answer, _) in HOSTILE.items()
        }
        made: dict[str, type] = {
            name: so.remote_agent(one.url, task=Riddle) for name, one in services.items()
        }
        done = await play(tmp_path / "run", model, made)
    for name, (_, message) in HOSTILE.items():
        outcome = done[name].outcome
        assert outcome is not None, name
        assert (name, outcome.blame) == (name, Blame.ENVIRONMENT)
        assert message in str(outcome)
        if "finite" not in message:
            assert f"POST {services[name].url}: " in str(outcome)
        assert len(services[name].bodies) == 1


async def test_a_run_is_begun_again_only_while_the_program_has_made_no_call(tmp_path: Path, model: Path):
    broken = saying("try later", 503)
    async with (
        remote(broken, hangs_up, runs) as waking,
        remote(calling(broken), runs) as late,
        remote(calling(hangs_up), runs) as lost,
        remote(broken) as dead,
    ):
        made = {
            "waking": so.remote_agent(waking.url, task=Riddle),
            "late": so.remote_agent(late.url, task=Riddle),
            "lost": so.remote_agent(lost.url, task=Riddle),
            "dead": so.remote_agent(dead.url, task=Riddle, retries=1),
            "nowhere": so.remote_agent("http://127.0.0.1:9/run", task=Riddle, retries=0),
        }
        done = await play(tmp_path / "run", model, made)
        assert (done["waking"].outcome, done["waking"].reward) == (None, 1.0)
        assert len({body["run_id"] for body in waking.bodies}) == 1
        assert [len(one.bodies) for one in (waking, late, lost, dead)] == [3, 1, 1, 2]
        for name, said in (
            ("late", "503 Service Unavailable: 'try later' (1 attempts)"),
            ("lost", "the connection was lost"),
            ("dead", "503 Service Unavailable: 'try later' (2 attempts)"),
            ("nowhere", "POST http://127.0.0.1:9/run: no connection"),
        ):
            outcome = done[name].outcome
            assert outcome is not None
            assert (outcome.blame, said in str(outcome)) == (Blame.INFRASTRUCTURE, True), str(outcome)
        for one in (late, lost, dead):
            assert one.given_up == [f"/run/{one.bodies[0]['run_id']}"]
        assert waking.given_up == []


async def test_a_deadline_ends_the_run_and_the_service_is_told(tmp_path: Path, model: Path):
    async with (
        remote(calling(never)) as silent,
        remote(saying('{"status_url": "/runs/7"}', 202), asked=(saying('{"status": "running"}'),)) as slow,
    ):
        made = {
            "silent": so.remote_agent(silent.url, task=Riddle),
            "slow": so.remote_agent(slow.url, task=Riddle, poll_s=0.01),
        }
        limits = Limits(turn_tokens=200, wall_s=4)
        done = await play(tmp_path / "run", model, made, limits)
        for name in made:
            outcome = done[name].outcome
            assert outcome is not None
            assert outcome.blame is Blame.ENVIRONMENT
            assert "took longer than 4 s" in str(outcome)
        assert silent.given_up == [f"/run/{silent.bodies[0]['run_id']}"]
        assert slow.given_up == ["/runs/7"]
        assert silent.bodies[0]["deadline_s"] == 4


async def test_a_cancelled_program_is_told_to_the_service(tmp_path: Path, model: Path):
    async with remote(calling(never)) as silent:
        specs = specs_of(so.remote_agent(silent.url, task=Riddle), {"p": ASKED})
        async with hosting(tmp_path / "run", model, lambda _: [says("42")]) as (stage, _):
            async with anyio.create_task_group() as group:
                group.start_soon(stage.play, specs)
                with anyio.fail_after(60):
                    while not stage.engine.requests:  # noqa: ASYNC110 - nobody tells
                        await anyio.sleep(0.02)
                group.cancel_scope.cancel()
            with anyio.fail_after(60):
                while not silent.given_up:  # noqa: ASYNC110 - nobody tells
                    await anyio.sleep(0.02)
        assert silent.given_up == [f"/run/{silent.bodies[0]['run_id']}"]


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("agents:9000", {}, "url is 'agents:9000'; give the http"),
        ("http://", {}, "url is 'http://'"),
        ("http://me:secret@agents/run", {}, "without credentials"),
        (7, {}, "url is 7"),
        ("http://agents/run", {"task": dict}, "task is <class 'dict'>; give the pydantic model"),
        ("http://agents/run", {"body": "x"}, "body is 'x'; give a function"),
        ("http://agents/run", {"retries": -1}, "retries is -1"),
        ("http://agents/run", {"poll_s": 0}, "poll_s 0"),
    ],
)
def test_a_service_that_cannot_be_asked_is_refused_with_the_remedy(url: Any, options: Json, message: str):  # noqa: ANN401
    given: Json = {"task": Riddle}
    with pytest.raises(ConfigError) as told:
        so.remote_agent(url, **(given | options))
    assert message in str(told.value)
