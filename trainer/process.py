"""The trainer process: `python -m sostenuto.trainer.process FD [--processes N]`, started by TrainerClient.

It answers one request after the other on the inherited socket and ends when the other side goes away,
also in the middle of a step.  Whatever way it ends but kill -9, nothing published stays behind.
With several processes it starts the others, `--rank R --port P`, and hands each request on to them; they end
with it, and it with them.
An error that is not this project's ends the process: the client reports the last lines of stderr.
"""

import argparse
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import FrameType

import msgspec

from sostenuto.errors import ConfigError, RecordError, SostenutoError, TrainerError, Unsupported
from sostenuto.trainer.ranks import Meeting, Ranks
from sostenuto.trainer.session import Session
from sostenuto.trainer.wire import HEADER, Close, Done, Refused, Reply, Request, pack, unpack

_REPORTED = (ConfigError, RecordError, Unsupported, TrainerError)


def serve(connection: socket.socket, session: Session, others: Sequence[socket.socket] = ()) -> None:
    """Answer until Close or the end of the connection.  `others`: ranks that carry out the same."""
    while body := _receive(connection):
        request = unpack(body, Request)
        # The others end with this process.
        alike = () if isinstance(request.command, Close) else others
        for other in alike:
            other.sendall(HEADER.pack(len(body)) + body)
        answer = _answer(session, request)
        for rank, other in enumerate(alike, 1):
            _check_alike(rank, answer, _receive(other))
        connection.sendall(pack(Reply(request.id, answer)))
        if isinstance(request.command, Close):
            return


def _check_alike(rank: int, answer: Done | Refused, body: bytes | None) -> None:
    """All ranks refuse a command, or none; anything else leaves them in different states."""
    theirs = body and unpack(body, Reply).answer
    if type(theirs) is not type(answer):
        raise RuntimeError(f"rank 0 says {answer}, rank {rank} says {theirs}")


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


def _end_with(connections: Sequence[socket.socket], session: Session) -> None:
    """Leave at once when another side hangs up, even while torch computes."""
    poll = select.poll()
    for connection in connections:
        poll.register(connection, select.POLLHUP)
    ((gone, _), *_) = poll.poll()
    session.close()
    os._exit(0 if gone == connections[0].fileno() else 1)


def _leave(_signal: int, _frame: FrameType | None) -> None:
    sys.exit(0)


def _start_others(count: int, port: int) -> list[socket.socket]:
    """The connections to ranks 1 to count - 1."""
    connections: list[socket.socket] = []
    for rank in range(1, count):
        ours, theirs = socket.socketpair()
        with theirs:
            place = ("--processes", str(count), "--rank", str(rank), "--port", str(port))
            subprocess.Popen(
                [sys.executable, "-m", "sostenuto.trainer.process", str(theirs.fileno()), *place],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        connections.append(ours)
    return connections


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("descriptor", type=int)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--port", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    signal.signal(signal.SIGTERM, _leave)
    asked = _arguments()
    connection = socket.socket(fileno=asked.descriptor)
    others: list[socket.socket] = []
    meeting = None
    if asked.processes > 1:
        meeting = Meeting(asked.processes, port=asked.port, index=asked.rank)
        others = [] if asked.rank else _start_others(asked.processes, meeting.port)
    session = Session(Ranks(asked.rank, asked.processes))
    # The one thread here: the main one is inside torch for seconds and cannot watch the sockets.
    watched = ((connection, *others), session)
    threading.Thread(target=_end_with, args=watched, daemon=True).start()
    if meeting is not None:
        meeting.join()
    try:
        serve(connection, session, others)
    finally:
        session.close()


if __name__ == "__main__":
    main()
