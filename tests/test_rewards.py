"""What reward functions are made of."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

import sostenuto as so
from sandboxes import running
from sostenuto.envs.rewards import (
    Case,
    Judge,
    boxed,
    check_code,
    last_number,
    same_math,
    same_number,
    weighted,
)
from sostenuto.envs.workspace import Workspace
from sostenuto.errors import ConfigError, JudgeError
from sostenuto.tools.remote.waiting import retry_after_s

# ---- sums and answers ----


def test_a_weighted_sum_is_told_with_its_parts():
    found = weighted({"right": 1.0, "brief": 0.5}, {"right": 1.0, "brief": 0.1})
    assert found == {"reward": pytest.approx(1.05), "right": 1.0, "brief": 0.5}


@pytest.mark.parametrize(
    ("parts", "weights", "said"),
    [
        ({"a": 1.0}, {}, "for each of a"),
        ({}, {"b": 1.0}, "for each of b"),
        ({"reward": 1.0}, {"reward": 1.0}, "name of the sum"),
        ({"a": float("nan")}, {"a": 1.0}, "'a' is nan"),
    ],
)
def test_a_sum_that_cannot_be_meant_is_refused(parts: dict[str, float], weights: dict[str, float], said: str):
    with pytest.raises(ConfigError, match=said):
        weighted(parts, weights)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"first \boxed{1}, then \boxed{2 + \frac{1}{2}}.", r"2 + \frac{1}{2}"),
        (r"\boxed{open", None),
        ("nothing", None),
    ],
)
def test_the_last_box_of_a_text_is_its_answer(text: str, found: str | None):
    assert boxed(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [("it costs 1,234.50 dollars.", "1,234.50"), ("from 3 to -2e3", "-2e3"), ("x", None), ("2.", "2")],
)
def test_the_last_number_of_a_text_is_its_answer(text: str, found: str | None):
    assert last_number(text) == found


@given(st.text())
def test_no_text_breaks_a_check(text: str):
    boxed(text)
    assert not same_number(text, "no number")


def test_numbers_are_compared_as_they_are_written():
    assert same_number("so it is 0.10", "0.1")
    assert same_number("1,000", "1000.0")
    assert not same_number("0.3000000000000000001", "0.3")
    assert same_number("3.14", "3.14159", tolerance=1e-3)
    assert not same_number("3.1", "3.14159", tolerance=1e-3)


async def test_expressions_are_compared_by_what_they_mean():
    assert await same_math(r"It is $\frac{1}{2}$.", "0.5", timeout_s=60)
    assert await same_math("(x+1)^2", "x^2 + 2x + 1", timeout_s=60)
    assert not await same_math("3x+1", "2x+1", timeout_s=60)


async def test_an_expression_that_would_never_end_is_not_equal():
    with anyio.fail_after(60):
        assert not await same_math("9**9**9**9**9", "1", timeout_s=3)


# ---- code ----


@asynccontextmanager
async def workspace() -> AsyncGenerator[Workspace]:
    async with running("bubblewrap") as (sandbox, _):
        yield Workspace(sandbox)


ADDS = "import sys\nprint(sum(map(int, sys.stdin.read().split())))\n"


async def test_code_is_run_against_each_case_in_the_sandbox():
    async with workspace() as sandbox:
        right = await check_code(sandbox, ADDS, [Case("1 2\n", "3\n"), Case("", "0")], timeout_s=30)
        assert (right.passed, right.cases, right.share, right.first_failure) == (2, 2, 1.0, "")
        wrong = await check_code(
            sandbox, ADDS, [Case("1", "1"), Case("2", "3"), Case("x", "0")], timeout_s=30
        )
        assert (wrong.passed, wrong.share) == (1, pytest.approx(1 / 3))
        assert wrong.first_failure == "case 2: wrote '2\\n', not '3'"


async def test_code_that_hangs_or_fails_is_a_case_that_failed():
    async with workspace() as sandbox:
        hangs = await check_code(sandbox, "while True: pass", [Case()], timeout_s=1)
        assert hangs.first_failure == "case 1: still running after 1 s"
        fails = await check_code(sandbox, "import sys; sys.exit(3)", [Case(), Case()], stop_at_failure=True)
        assert (fails.passed, fails.first_failure) == (0, "case 1: exit code 3")
        assert await sandbox.shell("echo alive") == "alive\n"


async def test_code_without_cases_is_refused():
    async with workspace() as sandbox:
        with pytest.raises(ConfigError, match="no cases"):
            await check_code(sandbox, ADDS, [])


# ---- the judge ----

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
PROMPT = "Is $answer right? It costs $$1. End with: score: N"


class Court:
    """A chat endpoint that answers what it is told to, one after the other."""

    def __init__(self, *answers: Any) -> None:  # noqa: ANN401
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.under_way = self.most = 0
        self.delay_s = 0.0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        self.keys.append(request.headers.get("Authorization"))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await anyio.sleep(self.delay_s)
        self.under_way -= 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, web.Response):
            return answer
        if not isinstance(answer, str):
            return web.json_response(answer)
        return web.json_response({"choices": [{"message": {"content": answer}}]})


@asynccontextmanager
async def court(*answers: Any, **settings: Any) -> AsyncGenerator[tuple[Court, Judge]]:  # noqa: ANN401
    bench = Court(*answers)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", bench.handle)
    async with TestServer(app) as server:
        yield bench, Judge(str(server.make_url("/v1")), "m", PROMPT, **settings)


async def test_the_last_score_of_an_answer_is_believed():
    async with court("score: 0 at first, but then Score: **0.75**") as (bench, judge):
        assert await judge.score(answer="42", key="secret") == 0.75
        (asked,) = bench.asked
        assert asked["messages"] == [
            {"role": "user", "content": "Is 42 right? It costs $1. End with: score: N"}
        ]
        assert (asked["model"], asked["temperature"]) == ("m", 0.0)
        assert bench.keys == ["Bearer secret"]


async def test_the_same_question_is_asked_once_also_at_the_same_time():
    async with court("score: 1") as (bench, judge):
        bench.delay_s = 0.05
        async with anyio.create_task_group() as group:
            for _ in range(10):
                group.start_soon(lambda: judge.score(answer="a"))
        assert await judge.score(answer="a") == 1.0
        assert len(bench.asked) == 1
        await judge.score(answer="b")
        assert len(bench.asked) == 2


async def test_so_many_questions_and_no_more_are_under_way():
    async with court("score: 1", concurrency=2) as (bench, judge):
        bench.delay_s = 0.02
        async with anyio.create_task_group() as group:
            for number in range(8):
                group.start_soon(lambda n=number: judge.score(answer=str(n)))
        assert (len(bench.asked), bench.most) == (8, 2)


async def test_only_as_many_scores_as_wanted_are_kept():
    async with court("score: 1", cached=1) as (bench, judge):
        for answer in ("a", "b", "a"):
            await judge.score(answer=answer)
        assert len(bench.asked) == 3


NOW = {"Retry-After": "0"}


@pytest.mark.parametrize(
    "first",
    [
        web.Response(status=500, text="broken", headers=NOW),
        web.Response(status=429, headers=NOW),
        "I had rather not say.",
        "score: 7",
        {"choices": []},
        web.Response(text="<html>", content_type="text/html"),
    ],
    ids=["500", "429", "no score", "out of bounds", "no completion", "html"],
)
async def test_what_may_pass_is_asked_again(first: Any):  # noqa: ANN401
    async with court(first, "score: 0.5") as (bench, judge):
        assert await judge.score(answer="a") == 0.5
        assert len(bench.asked) == 2


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("3", 3.0),
        ("0.5", 0.5),
        ("-1", 0.0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
        ("nan", None),
        ("soon", None),
        (None, None),
    ],
)
def test_a_service_says_in_either_form_how_long_it_wants_to_be_left_alone(
    header: str | None, seconds: float | None
):
    assert retry_after_s(header) == seconds


async def test_what_is_not_accepted_is_not_asked_again():
    async with court(web.Response(status=401, text="who are you")) as (bench, judge):
        with pytest.raises(JudgeError, match=r"status 401 .*who are you"):
            await judge.score(answer="a")
        assert len(bench.asked) == 1


async def test_a_judge_that_gives_no_score_is_told_with_its_last_words():
    async with court("no", attempts=2) as (_, judge):
        with pytest.raises(JudgeError, match=r"without a score: 'no' \(2 attempts\)"):
            await judge.score(answer="a")


async def test_a_judge_that_is_silent_ends_with_its_deadline():
    async with court("score: 1", deadline_s=0.2) as (bench, judge):
        bench.delay_s = 60
        with anyio.fail_after(30), pytest.raises(JudgeError, match=r"within 0\.2 s"):
            await judge.score(answer="a")


async def test_a_judge_that_nobody_serves_is_told():
    judge = Judge("http://127.0.0.1:9", "m", PROMPT, attempts=1)
    with pytest.raises(JudgeError, match="Connector"):
        await judge.score(answer="a")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"url": "localhost"}, "url"),
        ({"pattern": "score"}, "has no group"),
        ({"pattern": "("}, "pattern"),
        ({"attempts": 0}, "attempts is 0"),
        ({"lowest": 1.0}, "not below highest"),
        ({"deadline_s": 0.0}, "deadline_s"),
    ],
)
def test_a_judge_that_cannot_be_meant_is_refused(settings: dict[str, Any], said: str):
    given: dict[str, Any] = {"url": "http://a/v1", "model": "m", "prompt": PROMPT, **settings}
    with pytest.raises(ConfigError, match=said):
        Judge(**given)


async def test_a_prompt_that_names_what_is_not_given_is_refused():
    with pytest.raises(ConfigError, match="'answer' is not given"):
        await Judge("http://a/v1", "m", PROMPT).score(reply="a")


# ---- in an environment ----


class JudgedTask(BaseModel):
    url: str


class Judged(so.Environment[JudgedTask]):
    async def reset(self, task: JudgedTask) -> str:
        self.judge = Judge(task.url, "m", PROMPT, attempts=1)
        return "say something"

    async def reward(self, episode: so.Episode) -> dict[str, float]:
        return weighted({"judged": await self.judge.score(answer=episode.answer)}, {"judged": 2.0})


async def test_a_judge_that_fails_is_the_fault_of_the_infrastructure():
    async with so.so_test(Judged, JudgedTask(url="http://127.0.0.1:9")) as trial:
        with pytest.raises(JudgeError, match="reward"):
            await trial.reward(answer="a")


async def test_a_judge_scores_an_episode():
    async with court("score: 0.25") as (_, judge), so.so_test(Judged, JudgedTask(url=judge.url)) as trial:
        assert await trial.reward(answer="a") == 0.5
