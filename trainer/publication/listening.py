"""Where receivers call a sender: one line of JSON, with the key of the manifest, and what is answered to it.

Each call has a thread of its own, so one that is slow or gone holds up nobody.  `close` ends all calls.
"""

import hmac
import json
import logging
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from sostenuto.errors import TrainerError

Answer = Callable[[socket.socket, dict[str, Any]], None]
"""Answers a call on its connection, which is closed afterwards.  OSError: the caller is gone."""

LINE_BYTES = 16 << 20
_ASK_S = 30.0

_log = logging.getLogger(__name__)


class Listener:
    """Takes calls on a free port of `host` from the beginning.  TrainerError for a host that is not ours."""

    def __init__(self, host: str, answer: Answer) -> None:
        self.host = host
        self.key = secrets.token_hex(16)
        self._answer = answer
        self._socket = listening(host)
        self.port: int = self._socket.getsockname()[1]
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        threading.Thread(target=self._accept, name="publication", daemon=True).start()

    def close(self) -> None:
        """Hang up.  Idempotent."""
        with self._lock:
            self._closed = True
            connections = list(self._connections)
        for open_socket in (self._socket, *connections):
            with suppress(OSError):
                open_socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._closed:
                    return
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with self._lock:
            if self._closed:
                connection.close()
                return
            self._connections.add(connection)
        try:
            connection.settimeout(_ASK_S)
            asked = read_line(connection)
            if hmac.compare_digest(str(asked.get("key", "")), self.key):
                self._answer(connection, asked)
            else:
                send_line(connection, {"refused": "the key is not that of this sender's manifests"})
        except (OSError, ValueError) as error:
            _log.info("publication: a receiver has gone: %s", error)
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()


def listening(host: str) -> socket.socket:
    """A socket that listens on a free port of `host`."""
    try:
        return socket.create_server((host, 0))
    except OSError as error:
        raise TrainerError(
            f"learner.publication.host: {host}: {error.strerror or error}; give an address of the trainer's "
            "machine that the engines reach"
        ) from error


def send_line(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def read_line(connection: socket.socket) -> dict[str, Any]:
    """The next message and nothing behind it.  OSError when the other side hangs up before its end."""
    line = bytearray()
    while not line.endswith(b"\n"):
        ahead = connection.recv(4096, socket.MSG_PEEK)
        if not ahead:
            raise ConnectionError("it hung up")
        end = ahead.find(b"\n")
        line += connection.recv(len(ahead) if end < 0 else end + 1)
        if len(line) > LINE_BYTES:
            raise ValueError(f"a line of more than {LINE_BYTES} bytes")
    message: object = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("a line that is no object")  # noqa: TRY004 - what it holds is wrong
    return message  # pyright: ignore[reportUnknownVariableType]
