"""Remote tools that are HTTP requests, against a real server on 127.0.0.1."""

import json
from contextlib import AsyncExitStack

import anyio
import pytest
from aiohttp import web
from pydantic import BaseModel, JsonValue, TypeAdapter

from remote_services import KEY, Handler, Service, hanging_up, remote_tools, saying, service
from sostenuto.errors import ConfigError, ToolServerError
from sostenuto.tools.remote.arguments import read_arguments
from sostenuto.tools.remote.declared import HttpTool, McpServer, Remote
from sostenuto.tools.schema import InvalidArguments
from sostenuto.types import ToolResult, ToolStatus

QUERY = '{"q": "a b"}'


class Query(BaseModel):
    q: str
    limit: int = 5


def search(there: str, **changes: object) -> HttpTool:
    given = {"name": "search", "url": there, "description": "Search.", "parameters": Query, **changes}
    return HttpTool(**given)  # pyright: ignore[reportArgumentType]


async def ask(there: Service, arguments: str = QUERY, **changes: object) -> ToolResult:
    async with remote_tools(search(f"{there.url}/find", **changes)) as tools:
        return await tools["search"].call(arguments)


async def asked(*answers: Handler, **changes: object) -> tuple[ToolResult, int]:
    async with service(*answers) as there:
        return await ask(there, QUERY, **changes), len(there.requests)


async def test_arguments_go_as_a_json_body_and_the_answer_is_the_observation():
    async with service(saying('{"hits": 3}', Content_Type="application/json")) as there:
        result = await ask(there, headers={"X-Key": "Bearer ${KEY}"})
        assert (result.status, result.content) == (ToolStatus.OK, '{"hits": 3}')
        assert result.elapsed_s > 0
        [(method, path, body, key)] = there.requests
        assert (method, path, json.loads(body), key) == ("POST", "/find", {"q": "a b"}, f"Bearer {KEY}")


async def test_a_get_has_them_in_its_query():
    async with service(saying("ok")) as there:
        await ask(there, '{"q": "a&b=c", "limit": 3}', method="GET")
        assert there.requests[0][:3] == ("GET", "/find?q=a%26b%3Dc&limit=3", "")


async def test_a_request_that_is_at_fault_is_an_observation():
    result, requests = await asked(saying("no such index", 404), method="GET")
    assert result.status is ToolStatus.TOOL_ERROR
    assert result.content == "HTTP 404 Not Found\nno such index"
    assert requests == 1


@pytest.mark.parametrize("status", [408, 429, 500, 503])
async def test_a_service_that_does_not_work_is_asked_again_and_then_infrastructure(status: int):
    async with service(saying("busy", status, Retry_After="0")) as there:
        with pytest.raises(ToolServerError, match=rf"search: status {status} .*busy \(3 attempts\)"):
            await ask(there, method="GET")
        assert len(there.requests) == 3


async def test_one_that_comes_back_is_heard():
    busy = saying("", 503, Retry_After="0")
    result, requests = await asked(busy, hanging_up, saying("at last"), method="GET")
    assert (result.content, requests) == ("at last", 3)


@pytest.mark.parametrize("trouble", [saying("", 500, Retry_After="0"), hanging_up])
@pytest.mark.parametrize(
    "declared", [{"method": "POST"}, {"method": "PUT"}, {"method": "GET", "idempotent": False}]
)
async def test_what_may_not_be_repeated_is_sent_once(trouble: Handler, declared: dict[str, object]):
    async with service(trouble) as there:
        with pytest.raises(ToolServerError, match=r"\(1 attempts\)"):
            await ask(there, QUERY, **declared)
        assert len(there.requests) == 1


async def test_what_is_declared_idempotent_is_repeated_whatever_its_method():
    result, requests = await asked(hanging_up, saying("done"), method="POST", idempotent=True)
    assert (result.content, requests) == ("done", 2)


async def test_a_service_that_is_not_there_is_tried_again_and_infrastructure():
    async with service(saying("")) as there:
        url = there.url
    async with remote_tools(search(url, retries=1)) as tools:
        with pytest.raises(ToolServerError, match=r"search: no connection to 127.0.0.1: .* \(2 attempts\)"):
            await tools["search"].call('{"q": "x"}')


async def test_a_pause_beyond_the_deadline_is_not_waited_for():
    busy = saying("", 503, Retry_After="3600")
    with anyio.fail_after(5), pytest.raises(ToolServerError, match=r"status 503 .*\(1 attempts\)"):
        await asked(busy, method="GET")


async def test_a_date_says_when_to_come_back_too():
    busy = saying("", 429, Retry_After="Wed, 21 Oct 2015 07:28:00 GMT")
    result, requests = await asked(busy, saying("now"), method="GET")
    assert (result.content, requests) == ("now", 2)


@pytest.mark.parametrize("status", [401, 407])
async def test_refused_credentials_are_no_fault_of_the_policy(status: int):
    with pytest.raises(
        ToolServerError, match=f"status {status}: the service does not accept the credentials"
    ):
        await asked(saying("who are you?", status), method="GET")


async def _sleeping(request: web.Request) -> web.StreamResponse:
    await anyio.sleep(60)
    return web.Response()


async def test_a_slow_service_is_a_timeout():
    result, _ = await asked(_sleeping, timeout_s=0.2)
    assert (result.status, result.content) == (ToolStatus.TIMEOUT, "[search timed out after 0.2 s]")


async def test_a_redirect_to_another_host_is_not_followed_and_gets_no_secret():
    async with service(saying("trap")) as trap, service(saying("", 302, Location=f"{trap.url}/x")) as there:
        result = await ask(there, method="GET", headers={"X-Key": "${KEY}"})
        assert result.status is ToolStatus.TOOL_ERROR
        assert "is not the host of the tool: not followed" in result.content
        assert not trap.requests
        assert KEY not in result.content


async def test_a_redirect_with_a_user_is_not_followed():
    async with AsyncExitStack() as stack:
        there = await stack.enter_async_context(service(saying("")))
        host = there.url.removeprefix("http://")
        there.answers = [saying("", 307, Location=f"http://user:word@{host}/x"), saying("followed")]
        result = await ask(there, method="GET")
    assert result.status is ToolStatus.TOOL_ERROR


@pytest.mark.parametrize(
    ("method", "status", "then"),
    [("GET", 301, "GET"), ("POST", 307, "POST"), ("POST", 303, "GET"), ("GET", 308, "GET")],
)
async def test_redirects_on_the_same_origin_are_followed(method: str, status: int, then: str):
    moved = saying("", status, Location="/there?x=1")
    async with service(moved, saying("found")) as there:
        assert (await ask(there, method=method)).content == "found"
        assert there.requests[1][:2] == (then, "/there?x=1")
        assert bool(there.requests[1][2]) == (then == "POST")


async def test_redirects_do_not_go_on_for_ever():
    result, requests = await asked(saying("", 302, Location="/again"), method="GET")
    assert (result.status, requests) == (ToolStatus.TOOL_ERROR, 6)
    assert "more than 5 redirects" in result.content or "too many redirects" in result.content


async def _flooding(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/plain"})
    await response.prepare(request)
    try:
        while True:
            await response.write(b"x" * 65536)
    except ConnectionError:
        return response


async def test_an_answer_without_end_is_read_to_the_cap():
    with anyio.fail_after(10):
        result, _ = await asked(_flooding, response_bytes=100_000)
    assert len(result.content) < 100_100
    assert result.content.endswith("[... what came after 100000 bytes cut ...]")


async def test_what_is_no_text_is_named():
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=b"\x89PNG\x00\x00", content_type="image/png")

    assert (await asked(answer))[0].content == "[6 bytes of image/png]"


async def test_an_unknown_charset_is_read_as_utf_8():
    answer = saying("grün", Content_Type="text/plain; charset=utf-8")

    async def renamed(request: web.Request) -> web.StreamResponse:
        response = await answer(request)
        response.headers["Content-Type"] = "text/plain; charset=klingon"
        return response

    assert (await asked(renamed))[0].content == "grün"


async def test_cookies_of_one_call_are_not_there_in_the_next():
    seen: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers.get("Cookie", ""))
        response = web.Response(text="ok")
        response.set_cookie("session", "of-somebody-else")
        return response

    async with service(answer) as there, remote_tools(search(there.url)) as tools:
        for _ in range(2):
            await tools["search"].call('{"q": "x"}')
    assert seen == ["", ""]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "search: the arguments are not JSON"),
        ("[1]", "the arguments are not a JSON object but [1]"),
        ("{}", "argument 'q' is missing"),
        ('{"q": 1}', "argument 'q': not string but 1"),
        ('{"q": "x", "limit": 1.5}', "argument 'limit': not integer but 1.5"),
        ('{"q": "x", "limit": true}', "argument 'limit': not integer but true"),
        ('{"q": "x", "n": NaN}', "NaN is no JSON"),
        ("[" * 100_000, "the arguments are not JSON"),
    ],
)
async def test_arguments_that_break_the_schema_are_not_sent(text: str, words: str):
    async with service(saying("")) as there:
        result = await ask(there, text)
        assert result.status is ToolStatus.INVALID_ARGUMENTS
        assert words in result.content
        assert not there.requests


def test_a_schema_that_was_written_by_hand_is_kept_to():
    schema: dict[str, JsonValue] = {
        "type": "object",
        "properties": {"kind": {"enum": ["a", "b"]}, "n": {"type": ["number", "null"]}, "any": True},
        "additionalProperties": False,
    }
    assert read_arguments("t", '{"kind": "a", "n": null, "any": [1]}', schema) == {
        "kind": "a", "n": None, "any": [1],
    }  # fmt: skip
    wrong = read_arguments("t", '{"kind": "c", "n": "1", "kin": 1}', schema)
    assert isinstance(wrong, InvalidArguments)
    assert "there is no argument \"kin\": did you mean 'kind'?" in wrong.message
    assert 'argument \'kind\': not one of ["a", "b"] but "c"' in wrong.message
    assert "argument 'n': not number or null but \"1\"" in wrong.message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "a b"}, "name 'a b' is not made of letters"),
        ({"url": "ftp://x/"}, "is no http or https URL"),
        ({"url": "http://user:word@x/"}, "url has a user; send it as a header"),
        ({"method": "get"}, "method is 'get'; give one of GET, POST"),
        ({"description": " "}, "no description"),
        ({"parameters": {"type": "string"}}, "parameters is no pydantic model"),
        ({"parameters": int}, "parameters is no pydantic model"),
        ({"headers": {"X": "a\nb"}}, "header 'X' cannot be sent"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"retries": -1}, "retries is -1"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"burst": 2}, "burst is 2 without a rate"),
    ],
)
def test_a_declaration_that_is_wrong_names_the_field(changes: dict[str, object], words: str):
    with pytest.raises(ConfigError) as refused:
        search("http://127.0.0.1/", **changes)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "give url or command, one of them"),
        ({"url": "http://x/", "command": ("a",)}, "give url or command, one of them"),
        ({"command": ("a",), "headers": {"X": "y"}}, "headers go with a url"),
        ({"url": "http://x/", "environment": {"X": "y"}}, "environment goes with a command"),
        ({"url": "http://x/", "start_s": 0}, "start_s is 0"),
    ],
)
def test_a_server_that_is_wrongly_declared_names_the_field(given: dict[str, object], words: str):
    with pytest.raises(ConfigError) as refused:
        McpServer("m", **given)  # pyright: ignore[reportArgumentType]
    assert words in str(refused.value)


def test_declarations_travel():
    declared: tuple[Remote, ...] = (
        search("http://127.0.0.1/", headers={"X": "${KEY}"}, concurrency=3, rate_per_s=2.0),
        McpServer("m", command=["python", "-m", "x"], allow=("a",)),
    )
    adapter = TypeAdapter(tuple[Remote, ...])
    assert adapter.validate_json(adapter.dump_json(declared)) == declared


async def test_a_secret_that_was_not_given_is_named():
    tool = search("http://127.0.0.1/", headers={"X-Key": "${KEYS}"})
    with pytest.raises(ConfigError, match=r"header X-Key: secret 'KEYS' was not given .* did you mean 'KEY'"):
        async with remote_tools(tool):
            pass


async def test_two_tools_of_one_name_are_refused():
    tool = search("http://127.0.0.1/")
    for declared, taken in (((tool, tool), ()), ((tool,), ("search",))):
        with pytest.raises(ConfigError, match="two tools are called 'search'"):
            async with remote_tools(*declared, taken=taken):
                pass
