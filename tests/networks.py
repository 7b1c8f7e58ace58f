"""What the network tests share: a server on this machine, and a look at the proxies of this process."""

import os
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import anyio

from sostenuto.sandbox import processes


class _Hello(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        said = f"hello {self.path} {self.headers['Host']} {self.headers.get('Proxy-Authorization')}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[::-1])

    def log_message(self, format: str, *args: object):  # noqa: A002 - the library's name
        pass


@contextmanager
def local_server(host: str = "127.0.0.1") -> Generator[int]:
    """The port of an HTTP server on this machine."""
    with ThreadingHTTPServer((host, 0), _Hello) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def own_address() -> str:
    """Of this machine, as others see it; one that no packet is sent to finds the way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        try:
            way.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.2"
        return way.getsockname()[0]


async def died(child: int):
    """Return when a child has ended, which nobody has asked about yet."""
    handle = os.pidfd_open(child)
    await anyio.wait_readable(handle)
    os.close(handle)


async def proxies_now() -> list[int]:
    """`proxies`, when there is one: a process that has just begun has no command line yet."""
    with anyio.move_on_after(10):
        while not proxies():  # noqa: ASYNC110 - processes set no event
            await anyio.sleep(0.01)
    return proxies()


def proxies() -> list[int]:
    """Processes that this one has started to let sandboxes out."""
    return [
        pid
        for pid in processes.children(os.getpid())
        if b"sostenuto.sandbox.egress.process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
