"""The way out of sandboxes with a list: one proxy for all of them, and a door to it in the network of each.

    sandbox (loopback alone) ── 127.0.0.1:3128, a socket that we hold ── proxy process ── listed servers

- The proxy is a process of its own, so that what passes through it costs the tool server nothing.  It starts
  with the first door, ends with the last one, and with its owner, however that ends.
- Nothing has to be cleaned up: a door ends with the proxy and with the sandbox's network.
"""

import json
import socket
import subprocess
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path

import anyio.to_thread

from sostenuto.errors import SandboxError, Unsupported
from sostenuto.sandbox.egress import door as door_program
from sostenuto.sandbox.egress.allowed import AllowList
from sostenuto.sandbox.egress.process import MESSAGE_BYTES
from sostenuto.sandbox.protocol import Blueprint

_OPEN_S = 20.0
_NAME_BYTES = 512
_URL = f"http://127.0.0.1:{door_program.PORT}"
_INSIDE = "localhost,127.0.0.1,::1"
_VARIABLES = {
    **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), _URL),
    **dict.fromkeys(("no_proxy", "NO_PROXY"), _INSIDE),
}


def with_proxy(blueprint: Blueprint) -> Blueprint:
    """The blueprint with the variables by which programs find the proxy, if it asks for one; its own win."""
    if not blueprint.network:
        return blueprint
    return replace(blueprint, environment={**_VARIABLES, **blueprint.environment})


class Door:
    """Of one sandbox."""

    def __init__(self, egress: "Egress", number: int, process: "subprocess.Popen[bytes]") -> None:
        self._egress = egress
        self._number = number
        self._process = process

    def check(self) -> None:
        """Raise SandboxError when the proxy behind it has ended."""
        if self._process.poll() is not None:
            raise SandboxError("the proxy of this sandbox's network has ended")

    def close(self) -> None:
        """Connections that are open stay so until the sandbox ends.  Safe to call twice."""
        self._egress.close(self._number)


class Egress:
    """Of one backend, used in its event loop."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
        self._doors: set[int] = set()
        self._serial = count(1)

    async def open(self, pid: int, namespace: str | None, network: tuple[str, ...]) -> Door:
        """A door in the network of process `pid`, to what the list allows.

        `namespace`: what the sandbox itself calls its network, where `pid` was told by somebody who may
        count in another way.  Raises Unsupported where this process has no rights over that network.
        """
        allowed = AllowList(network)
        with await anyio.to_thread.run_sync(listen_inside, pid, namespace) as listening:
            process, orders = self._running()
            number = next(self._serial)
            message = json.dumps({"door": number, "allowed": allowed.entries}).encode()
            if len(message) > MESSAGE_BYTES:
                raise SandboxError(f"network: the list is longer than {MESSAGE_BYTES >> 10} KiB")
            try:
                socket.send_fds(orders, [message], [listening.fileno()])
            except OSError as error:
                self._end()
                raise SandboxError(f"the proxy of sandboxes cannot be reached: {error}") from error
            self._doors.add(number)
        return Door(self, number, process)

    def _running(self) -> "tuple[subprocess.Popen[bytes], socket.socket]":
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None or self._orders is None:
            self._orders, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._orders.settimeout(_OPEN_S)
            with far:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "sostenuto.sandbox.egress.process", str(far.fileno())],
                    pass_fds=[far.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )  # fmt: skip
        return self._process, self._orders

    def close(self, number: int) -> None:
        if number not in self._doors:
            return
        self._doors.discard(number)
        if not self._doors:
            self._end()
        elif self._orders is not None:
            try:
                self._orders.send(json.dumps({"close": number}).encode())
            except OSError:
                self._end()  # it is gone, and every door with it

    def _end(self) -> None:
        self._doors.clear()
        if self._orders is not None:
            self._orders.close()
            self._orders = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


async def describe_network(pid: int, namespace: str | None = None) -> str:
    """For `sostenuto doctor`: what a sandbox like the one of process `pid` can be let to reach."""
    try:
        (await anyio.to_thread.run_sync(listen_inside, pid, namespace)).close()
    except (SandboxError, Unsupported) as error:
        return f"none; {error}"
    return "none, or the servers of a list"


def listen_inside(pid: int, namespace: str | None = None) -> socket.socket:
    """A socket that listens in the network of process `pid`; see `Egress.open`.  Blocks."""
    near, far = socket.socketpair()
    with near, far:
        command = [sys.executable, "-I", "-S", str(Path(door_program.__file__)), str(pid), str(far.fileno())]
        helper = subprocess.Popen(command, pass_fds=[far.fileno()], stdin=subprocess.DEVNULL)
        try:
            far.close()
            near.settimeout(_OPEN_S)
            said, descriptors, _, _ = socket.recv_fds(near, _NAME_BYTES, 1)
        except OSError as error:
            raise SandboxError(f"no way into the network of process {pid}: {error}") from error
        finally:
            helper.kill()
            helper.wait()
    return _checked(said.decode(), descriptors, namespace)


def _checked(said: str, descriptors: list[int], namespace: str | None) -> socket.socket:
    if not descriptors:
        raise Unsupported(
            f"network: a list needs rights over the sandbox's network namespace ({said or 'no answer'}); run "
            "the tool server as root or with a rootless daemon, or use bubblewrap"
        )
    listening = socket.socket(fileno=descriptors[0])
    if namespace is not None and namespace != said:
        listening.close()
        raise Unsupported(
            "network: a list needs a daemon whose processes can be seen from here, and a runtime that uses "
            "the kernel's network: not one in a virtual machine, from within a container, or with gVisor"
        )
    return listening
