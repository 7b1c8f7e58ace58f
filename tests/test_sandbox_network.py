"""A sandbox reaches the servers on its list and nothing else, and what lets it out ends with it."""

import os
from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from networks import died, local_server, own_address, proxies, proxies_now
from sandboxes import backend_of, nothing_left, output_of, running, sandbox_root
from sostenuto.envs.workspace import SandboxSpec
from sostenuto.errors import ConfigError, SandboxError, Unsupported
from sostenuto.sandbox.egress.allowed import AllowList, canonical, is_guarded, split_port
from sostenuto.sandbox.egress.egress import listen_inside
from sostenuto.sandbox.protocol import Blueprint


def asked(url: str, *, connect: bool = False, body: str = "") -> str:
    """A command that asks the proxy for `url` and prints status, reason and body of the answer."""
    host, _, path = url.removeprefix("http://").partition("/")
    name, _, port = host.rpartition(":")
    make = 't = "http://HOST/PATH"'
    if connect:
        make = f'c.set_tunnel("{name}", {port}); t = "/PATH"'
    return (
        "python3 -c '\n"
        "import http.client, os, urllib.parse\n"
        'p = urllib.parse.urlsplit(os.environ["http_proxy"])\n'
        "c = http.client.HTTPConnection(p.hostname, p.port, timeout=30)\n"
        "try:\n"
        f"  {make.replace('HOST', host).replace('PATH', path)}\n"
        f'  c.request("{"POST" if body else "GET"}", t, "{body}" or None)\n'
        "  r = c.getresponse(); print(r.status, r.reason, r.read().decode())\n"
        "except OSError as e: print(type(e).__name__, e)\n"
        "' 2>&1"
    )


def connecting(host: str, port: int) -> str:
    """A command that opens a socket without a proxy and prints what it raises."""
    return (
        f'python3 -c \'\nimport socket\ntry:\n  socket.create_connection(("{host}", {port}), 5)\n'
        '  print("connected")\nexcept OSError as e: print(type(e).__name__, e)\n\' 2>&1'
    )


async def test_a_listed_server_answers_plain_and_through_a_tunnel_and_others_are_refused_by_name():
    with local_server() as port, local_server() as other:
        blueprint = Blueprint(network=(f"127.0.0.1:{port}", "*.example.org"))
        async with running("bubblewrap", blueprint) as (sandbox, _):
            server = f"http://127.0.0.1:{port}"
            assert await output_of(sandbox, asked(f"{server}/a?b=c")) == (
                f"200 OK hello /a?b=c 127.0.0.1:{port} None"
            )
            assert await output_of(sandbox, asked(f"{server}/a", connect=True)) == (
                f"200 OK hello /a 127.0.0.1:{port} None"
            )
            assert await output_of(sandbox, asked(f"{server}/", body="abc")) == "200 OK cba"
            for connect in (False, True):
                said = await output_of(sandbox, asked(f"http://127.0.0.1:{other}/", connect=connect))
                assert "403" in said
                assert f"127.0.0.1:{other} is not in this sandbox's network list" in said
                assert f"127.0.0.1:{port}, *.example.org" in said


async def test_nothing_goes_out_beside_the_proxy_and_no_guarded_address_through_it():
    with local_server() as port, local_server("0.0.0.0") as everywhere:
        async with running("bubblewrap", Blueprint(network=("*", "localhost:1"))) as (sandbox, _):
            for host in ("192.0.2.1", "169.254.169.254", "127.0.0.1"):
                said = await output_of(sandbox, connecting(host, everywhere))
                assert "unreachable" in said or "refused" in said, (host, said)
            own = own_address()
            for host in ("127.0.0.1", "127.1", "2130706433", "0.0.0.0", own):
                said = await output_of(sandbox, asked(f"http://{host}:80/"))
                assert "403" in said, (host, said)
                assert "guarded" in said
            for host in ("169.254.169.254", "100.100.100.200", "[fd00:ec2::254]", "[::ffff:127.0.0.1]"):
                said = await output_of(sandbox, asked(f"http://{host}:{443}/", connect=True))
                assert "403" in said, (host, said)
            assert "guarded" in await output_of(sandbox, asked("http://localhost:1/"))
            said = await output_of(sandbox, asked(f"http://127.0.0.1:{port}/"))
            assert "is not in this sandbox's network list" in said


_NONSENSE = ("NONSENSE", "GET / HTTP/1.1", "GET ftp://x/ HTTP/1.1", "CONNECT x HTTP/1.1")


async def test_what_is_no_request_is_told_so_and_the_proxy_goes_on():
    with local_server() as port:
        async with running("bubblewrap", Blueprint(network=(f"127.0.0.1:{port}",))) as (sandbox, _):
            for request in (
                "NONSENSE",
                "GET / HTTP/1.1",
                "GET ftp://x/ HTTP/1.1",
                "CONNECT x HTTP/1.1",
                "GET http://[/ HTTP/1.1",
            ):
                raw = (
                    'python3 -c \'\nimport socket\ns = socket.create_connection(("127.0.0.1", 3128), 30)\n'
                    f's.sendall(b"{request}\\r\\n\\r\\n"); print(s.makefile().readline())\' 2>&1'
                )
                assert (await output_of(sandbox, raw)).startswith("HTTP/1.1 400"), request
            assert "hello" in await output_of(sandbox, asked(f"http://127.0.0.1:{port}/"))


async def test_a_sandbox_without_a_list_has_no_proxy():
    async with running("bubblewrap") as (sandbox, _):
        assert await output_of(sandbox, 'echo "$http_proxy"') == ""
        assert "refused" in await output_of(sandbox, connecting("127.0.0.1", 3128))


async def test_sandboxes_have_lists_of_their_own_and_one_proxy_that_ends_with_the_last():
    with sandbox_root() as root, local_server() as port, local_server() as other:
        backend = backend_of("bubblewrap", root)
        first = await backend.start("first", Blueprint(network=(f"127.0.0.1:{port}",)))
        second = await backend.start("second", Blueprint(network=(f"127.0.0.1:{other}",)))
        assert len(await proxies_now()) == 1
        assert "200" in await output_of(first, asked(f"http://127.0.0.1:{port}/"))
        assert "403" in await output_of(second, asked(f"http://127.0.0.1:{port}/"))
        await first.stop()
        assert "200" in await output_of(second, asked(f"http://127.0.0.1:{other}/"))
        await second.stop()
        assert proxies() == []
        assert await nothing_left(root)


async def test_a_proxy_that_died_is_infrastructure_and_the_next_sandbox_has_a_new_one():
    with sandbox_root() as root, local_server() as port:
        backend = backend_of("bubblewrap", root)
        blueprint = Blueprint(network=(f"127.0.0.1:{port}",))
        lost = await backend.start("lost", blueprint)
        (proxy,) = await proxies_now()
        os.kill(proxy, 9)
        await died(proxy)
        with pytest.raises(SandboxError, match="proxy of this sandbox's network has ended"):
            await output_of(lost, "true")
        fresh = await backend.start("fresh", blueprint)
        assert "200" in await output_of(fresh, asked(f"http://127.0.0.1:{port}/"))
        await lost.stop()
        assert "200" in await output_of(fresh, asked(f"http://127.0.0.1:{port}/"))
        await fresh.stop()
        assert proxies() == []


@pytest.mark.parametrize("kind", ["landlock", "process"])
async def test_a_backend_that_cannot_keep_a_list_refuses_it(kind: str):
    with sandbox_root() as root, pytest.raises(ConfigError, match="network"):
        await backend_of(kind, root).start("x", Blueprint(network=("example.org",)))


@pytest.mark.parametrize(
    ("entries", "host", "port", "allowed"),
    [
        (["example.org"], "example.org", 443, True),
        (["example.org"], "EXAMPLE.org.", 80, True),
        (["example.org"], "example.org", 22, False),
        (["example.org"], "www.example.org", 443, False),
        (["*.example.org"], "www.example.org", 443, True),
        (["*.example.org"], "example.org", 443, False),
        (["*.example.org"], "badexample.org", 443, False),
        (["example.org:8443"], "example.org", 8443, True),
        (["example.org:8443"], "example.org", 443, False),
        (["10.0.0.1:5432"], "10.0.0.1", 5432, True),
        (["[2001:DB8::1]:80"], "2001:db8:0::1", 80, True),
        (["2001:db8::1"], "2001:db8::1", 443, True),
        (["10.0.0.1:80"], "::ffff:10.0.0.1", 80, True),
        (["*:443"], "anything", 443, True),
        (["*:443"], "anything", 80, False),
    ],
)
def test_a_list_allows_what_it_says(entries: list[str], host: str, port: int, allowed: bool):
    assert AllowList(entries).allows(canonical(host), port) is allowed


@pytest.mark.parametrize(
    "entry",
    ["", "https://example.org", "example.org/path", "a.*.org", "*x.org", "a b", "host:0", "host:99999",
     "host:x", "-a.org", "ü.org", "[::1", "1:2:3", "a@b"],
)  # fmt: skip
def test_an_entry_that_means_nothing_names_itself_and_what_to_write(entry: str):
    with pytest.raises(ConfigError, match=r"network:.* is no host"):
        SandboxSpec(network=(entry,))
    with pytest.raises(ConfigError, match="give a tuple of hosts"):
        SandboxSpec(network="example.org")


@given(st.text())
def test_no_authority_is_a_crash(text: str):
    host, port = split_port(text)
    assert port is None or (host is not None and 0 <= port <= 65535)


def test_a_listed_address_is_reached_although_it_is_guarded():
    private = AllowList(["a.example", "169.254.169.254:80"])
    assert private.allows_address(ip_address("169.254.169.254"), 80)
    assert not private.allows_address(ip_address("169.254.169.254"), 443)
    assert not private.allows_address(ip_address("127.0.0.1"), 80)
    assert private.allows_address(ip_address("192.0.2.7"), 80)
    assert is_guarded(ip_address("::ffff:169.254.169.254"))


async def test_a_probe_says_whether_a_list_can_be_kept():
    with sandbox_root() as root:
        probe = await backend_of("bubblewrap", root).probe()
    assert probe.details["network"] == "none, or the servers of a list"


def test_a_network_that_nobody_may_enter_or_that_is_another_s_is_unsupported():
    with pytest.raises(Unsupported, match=r"rights over the sandbox's network namespace.*run the tool"):
        listen_inside(2**22 + 1)
    # Without root's rights not even this process's own network is entered again.
    why = "processes can be seen from here" if os.geteuid() == 0 else "rights over"
    with pytest.raises(Unsupported, match=why):
        listen_inside(os.getpid(), "net:[1]")
