"""The tool server's door: TLS, open hosts, and requests made to break it."""

import gzip
import json
import socket
import subprocess
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from shutil import which
from urllib.parse import urlsplit

import aiohttp
import anyio
import anyio.to_thread
import pytest

from fakes_tools import FORM, TOKEN, FakeBackend, FakeHosts, config
from sandboxes import sandbox_root
from sostenuto.errors import ConfigError, ToolServerError
from sostenuto.sandbox.plain import ProcessBackend
from sostenuto.sandbox.protocol import Backend
from sostenuto.tools.client import ToolServerClient
from sostenuto.tools.secrets import Secrets
from sostenuto.tools.server import listen
from sostenuto.types import ProgramId

A = ProgramId("a")


@asynccontextmanager
async def server(backend: Backend | None = None, **changes: object) -> AsyncGenerator[str]:
    async with listen(config(**changes), backend or FakeBackend(), FakeHosts(), Secrets({})) as url:
        yield url


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "tools.example.org", "10.0.0.1"])
async def test_a_host_beyond_this_machine_needs_tls_or_a_word(host: str):
    with pytest.raises(ConfigError, match=r"can be reached from other machines.*insecure=True"):
        async with server(host=host):
            pass


async def test_an_open_host_is_served_when_it_was_asked_for():
    async with (
        server(host="0.0.0.0", insecure=True) as url,
        ToolServerClient(url.replace("0.0.0.0", "127.0.0.1"), TOKEN, "me") as client,
    ):
        assert (await client.state()).programs == ()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if which("openssl") is None:
        pytest.skip("no openssl here, which makes the certificate of this test")
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
         "-keyout", key, "-out", certificate, "-days", "1", "-subj", "/CN=tests",
         "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return certificate, key


async def test_a_server_speaks_tls_to_clients_that_know_its_authority(certificate: tuple[Path, Path]):
    async with server(tls_certificate=certificate[0], tls_key=certificate[1]) as url:
        assert url.startswith("https://")
        async with ToolServerClient(url, TOKEN, "me", ca_file=certificate[0]) as client:
            assert (await client.prepare(A, FORM, {})).tools
            await client.release(A)
        async with ToolServerClient(url, TOKEN, "me", repeat_s=0) as stranger:
            with pytest.raises(ToolServerError, match="certificate verify failed"):
                await stranger.state()
        async with ToolServerClient(url.replace("https", "http"), TOKEN, "me", repeat_s=0) as plain:
            with pytest.raises(ToolServerError):
                await plain.state()


@pytest.mark.parametrize("given", ["tls_certificate", "tls_key"])
async def test_half_a_certificate_is_refused(given: str, tmp_path: Path):
    with pytest.raises(ConfigError, match="give both or none"):
        async with listen(config(**{given: tmp_path}), FakeBackend(), FakeHosts(), Secrets({})):
            pass


async def test_files_that_are_no_certificate_are_refused(tmp_path: Path):
    nothing = tmp_path / "nothing.pem"
    nothing.write_text("hello")
    with pytest.raises(ConfigError, match=r"tls_certificate: .*cannot be used"):
        async with server(tls_certificate=nothing, tls_key=nothing):
            pass
    with pytest.raises(ConfigError, match=r"ca_file: .*cannot be used"):
        ToolServerClient("https://127.0.0.1:1", TOKEN, "me", ca_file=nothing)


def exchange(url: str, request: bytes) -> int:
    """The status of the answer to these very bytes."""
    with socket.create_connection(("127.0.0.1", urlsplit(url).port or 0), 20) as connection:
        try:
            connection.sendall(request)
            answer = connection.makefile("rb").readline()
        except (ConnectionResetError, BrokenPipeError):
            return 0
    return int(answer.split()[1]) if answer else 0


async def ask(url: str, method: str, target: str, body: bytes = b"", headers: str = "") -> int:
    head = (
        f"{method} {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer {TOKEN}\r\n"
        f"Content-Length: {len(body)}\r\n{headers}\r\n"
    )
    return await anyio.to_thread.run_sync(exchange, url, head.encode("latin-1") + body)


TRAVERSALS = (
    "../../../etc/passwd",
    "..%2f..%2f..%2fetc%2fpasswd",
    "%2e%2e/%2e%2e/etc/passwd",
    "/etc/passwd",
    "%2Fetc%2Fpasswd",
    "a/../../../etc/passwd",
    "x%00y",
    "%00",
    "%ff%fe",
    "\xff",
    ".",
    "..",
    "./",
    "a" * 5000,
    "a/" * 2000 + "b",
    "%0d%0aX-Injected:%201",
)


async def test_paths_that_leave_the_workspace_are_refused_and_never_an_error_of_the_server():
    with sandbox_root() as root:
        async with (
            server(ProcessBackend(root, unsafe=True)) as url,
            ToolServerClient(url, TOKEN, "me") as client,
        ):
            await client.prepare(A, FORM, {})
            for path in TRAVERSALS:
                for method in ("GET", "PUT"):
                    status = await ask(url, method, f"/v1/programs/a/files/{path}", b"x")
                    assert 400 <= status < 500 or (method, status) == ("PUT", 200), (method, path, status)
            assert (await client.shell(A, "ls -a / | head -3; test -e ../../x; echo $?")).output
            await client.release(A)


NAMES = ("..", "%2e%2e", "a%00b", "%0a", "x" * 501, "%ed%a0%80", "\xff", "a%2f..%2fb", "%", "%zz", "{}")


async def test_names_made_to_break_the_server_are_refused():
    async with server() as url:
        for name in NAMES:
            for method, rest in (
                ("POST", "release"),
                ("POST", "call"),
                ("POST", "prepare"),
                ("GET", "files/x"),
            ):
                status = await ask(url, method, f"/v1/programs/{name}/{rest}")
                assert 200 <= status < 500, (name, rest, status)
            status = await ask(url, "POST", f"/v1/owners/{name}/heartbeat", b'{"lease_s": 1}')
            assert 200 <= status < 500, (name, status)


PREPARE: dict[str, object] = {"owner": "o", "environment": {"name": "Form"}, "task": {}}
CALL: dict[str, object] = {"call_id": "c", "name": "echo", "arguments": "1"}
EPISODE: dict[str, object] = {"messages": [], "stop_reason": "answered"}


def bodies() -> list[tuple[str, bytes]]:
    """Bodies for each route, all of them wrong."""
    numbers = ("NaN", "-NaN", "Infinity", "-Infinity", "-1", "0", "1e400", '"x"', "null", "[]", "1" * 5000)
    timed: list[tuple[str, dict[str, object], str]] = [
        ("prepare", PREPARE, "timeout_s"),
        ("prepare", PREPARE, "idle_s"),
        ("prepare", PREPARE, "max_s"),
        ("call", CALL, "timeout_s"),
        ("reward", {"call_id": "r", "episode": EPISODE}, "timeout_s"),
        ("shell", {"command": "true"}, "timeout_s"),
        ("shell", {"command": "true"}, "output_bytes"),
    ]
    wrong = [
        (route, (json.dumps(body)[:-1] + f', "{field}": {number}}}').encode())
        for route, body, field in timed
        for number in numbers
        if (field, number) not in {("idle_s", "null"), ("max_s", "null")}
    ]
    texts = (b"", b"{", b"[]", b"null", b"\xff\xfe", b'"x"', b"[" * 100_000, b'{"a":' * 50_000, b"{}" * 3)
    wrong += [(route, text) for route in ("prepare", "call", "reward", "shell") for text in texts]
    wrong.append(("call", b'{"call_id": "\\ud800", "name": "echo", "arguments": "1"}'))
    wrong.append(("call", b'{"call_id": "", "name": "echo", "arguments": "1"}'))
    wrong.append(("call", json.dumps(CALL | {"call_id": "x" * 201}).encode()))
    return wrong


async def test_numbers_and_bodies_that_are_none_are_bad_requests():
    async with server() as url, ToolServerClient(url, TOKEN, "me") as client:
        await client.prepare(A, FORM, {})
        for route, body in bodies():
            status = await ask(url, "POST", f"/v1/programs/a/{route}", body)
            assert status == 400, (route, body[:200], status)
        for lease in (b"NaN", b"Infinity", b"-1", b"0", b"1e400"):
            status = await ask(url, "POST", "/v1/owners/me/heartbeat", b'{"lease_s": %b}' % lease)
            assert status == 400, lease
        assert (await client.state()).owners["me"] > 0
        await client.release(A)


HEADERS = (
    "X-Huge: " + "x" * 100_000 + "\r\n",
    "".join(f"X-{n}: y\r\n" for n in range(2000)),
    "Content-Type: application/x-www-form-urlencoded\r\n",
    "Content-Type: multipart/form-data; boundary=\r\n",
    "Content-Type: text/plain; charset=no-such-charset\r\n",
    "Content-Encoding: gzip\r\n",
    "Content-Encoding: br, gzip\r\n",
    "Transfer-Encoding: chunked\r\n",
    "Transfer-Encoding: gzip, chunked\r\n",
    "Expect: 100-continue\r\n",
    "Expect: something-else\r\n",
    "Authorization: Bearer another\r\n",
    "X-Request-Id: \xff\xfe\r\n",
    "X-Sostenuto-Owner: %ff\xff\r\n",
    "X-Sostenuto-Owner: " + "o/" * 3000 + "1\r\n",
    "Upgrade: websocket\r\nConnection: Upgrade\r\n",
    "Range: bytes=0-1\r\n",
    "X-Broken\r\n",
    "X-Null: a\0b\r\n",
)


async def test_headers_made_to_break_the_server_never_make_it_fail():
    async with server() as url, ToolServerClient(url, TOKEN, "me") as client:
        for headers in HEADERS:
            for method, target, body in (
                ("POST", "/v1/programs/a/call", json.dumps(CALL).encode()),
                ("GET", "/v1/state", b""),
                ("GET", "/metrics", b""),
            ):
                status = await ask(url, method, target, body, headers)
                assert status < 500, (headers[:60], target, status)
        assert (await client.state()).programs == ()


async def test_a_body_beyond_the_limit_is_refused_however_it_is_sent():
    async with server(body_bytes=1000) as url, ToolServerClient(url, TOKEN, "me") as client:
        await client.prepare(A, FORM, {})
        for target, method in (("call", "POST"), ("files/x", "PUT")):
            whole = await ask(url, method, f"/v1/programs/a/{target}", b"x" * 2000)
            assert whole == 413

            async def chunks() -> AsyncGenerator[bytes]:
                for _ in range(20):
                    yield b"x" * 100

            async with (
                aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session,
                session.request(method, f"{url}/v1/programs/a/{target}", data=chunks()) as response,
            ):
                assert response.status == 413
        await client.release(A)


async def test_bytes_that_are_no_http_are_refused():
    async with server() as url, ToolServerClient(url, TOKEN, "me") as client:
        for garbage in (
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 200,
            b"GET / HTTP/9.9\r\n\r\n",
            b"GET /\r\n\r\n",
            b"GET " + b"/" * 100_000 + b" HTTP/1.1\r\n\r\n",
            b"POST /v1/state HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
            b"POST /v1/state HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n",
        ):
            assert await anyio.to_thread.run_sync(exchange, url, garbage) < 500
        assert (await client.state()).programs == ()


async def test_a_body_that_grows_beyond_the_limit_when_it_is_unpacked_is_refused():
    bomb = gzip.compress(b"\0" * (64 << 20))
    async with server(body_bytes=1 << 20) as url, ToolServerClient(url, TOKEN, "me") as client:
        await client.prepare(A, FORM, {})
        status = await ask(url, "PUT", "/v1/programs/a/files/x", bomb, "Content-Encoding: gzip\r\n")
        assert status in {400, 413}
        await client.release(A)
