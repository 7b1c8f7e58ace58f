"""The process of the proxy.  `python -m sostenuto.sandbox.egress.process DESCRIPTOR`

Its owner sends, over a socket that keeps messages apart:

    {"door": N, "allowed": [...]} with a listening socket      serve what comes through it
    {"close": N}                                               no longer

It ends when its owner closes the other end, or dies.
"""

import asyncio
import json
import socket
import sys
from typing import Any

import anyio

from sostenuto.sandbox.egress.allowed import AllowList
from sostenuto.sandbox.egress.proxy import Proxy

MESSAGE_BYTES = 1 << 17


async def serve(orders: socket.socket) -> None:
    """Until the other end of `orders` is closed."""
    orders.setblocking(False)
    doors: dict[int, asyncio.Server] = {}
    while True:
        await anyio.wait_readable(orders)
        data, descriptors, _, _ = socket.recv_fds(orders, MESSAGE_BYTES, 1)
        if not data:
            return
        order: dict[str, Any] = json.loads(data)
        if "door" in order:
            proxy = Proxy(AllowList(order["allowed"]))
            door = socket.socket(fileno=descriptors[0])
            doors[order["door"]] = await asyncio.start_server(proxy.serve, sock=door)
        else:
            doors.pop(order["close"]).close()


def main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as orders:
        anyio.run(serve, orders)


if __name__ == "__main__":
    main()
