"""The trainer process: `python -m sostenuto.trainer.process FD`, started by TrainerClient.

It answers one request after the other on the inherited socket and ends when the other side goes away,
also in the middle of a step.  Whatever way it ends but kill -9, nothing published stays behind.
An error that is not this project's ends the process: the client reports the last lines of stderr.
"""

import logging
import os
import select
import signal
import socket
import sys
import threading
from types import FrameType

import msgspec

from sostenuto.errors import ConfigError, RecordError, SostenutoError, TrainerError, Unsupported
from sostenuto.trainer.session import Session
from sostenuto.trainer.wire import HEADER, Close, Done, Refused, Reply, Request, pack, unpack

_REPORTED = (ConfigError, RecordError, Unsupported, TrainerError)


def serve(connection: socket.socket, session: Session) -> None:
    """Answer until Close or the end of the connection."""
    while body := _receive(connection):
        request = unpack(body, Request)
        connection.sendall(pack(Reply(request.id, _answer(session, request))))
        if isinstance(request.command, Close):
            return


def _answer(session: Session, request: Request) -> Done | Refused:
    try:
        result = session.carry_out(request.command)
    except SostenutoError as error:
        name = next((kind.__name__ for kind in _REPORTED if isinstance(error, kind)), TrainerError.__name__)
        return Refused(name, str(error))
    return Done(msgspec.Raw(msgspec.msgpack.encode(result)))


def _receive(connection: socket.socket) -> bytes | None:
    """The body of the next frame; None when the other side is gone."""
    header = _exactly(connection, HEADER.size)
    return header and _exactly(connection, HEADER.unpack(header)[0])


def _exactly(connection: socket.socket, nbytes: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < nbytes:
        part = connection.recv(min(nbytes - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)


def _end_with(connection: socket.socket, session: Session) -> None:
    """Leave at once when the other side hangs up, even while torch computes."""
    poll = select.poll()
    poll.register(connection, select.POLLHUP)
    poll.poll()
    session.close()
    os._exit(0)


def _leave(_signal: int, _frame: FrameType | None) -> None:
    sys.exit(0)


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    signal.signal(signal.SIGTERM, _leave)
    connection = socket.socket(fileno=int(sys.argv[1]))
    session = Session()
    # The one thread here: the main one is inside torch for seconds and cannot watch the socket.
    threading.Thread(target=_end_with, args=(connection, session), daemon=True).start()
    try:
        serve(connection, session)
    finally:
        session.close()


if __name__ == "__main__":
    main()
