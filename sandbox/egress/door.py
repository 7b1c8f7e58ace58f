"""Run as a program: opens a listening socket in the network of another process, and hands it over.

    python -I -S door.py PID DESCRIPTOR

A socket belongs to the network namespace that it was made in, whoever holds it.  The namespace of a sandbox
has nothing but its own loopback; who listens there from outside is the only way out of it.

Needs root's rights over the namespace: root has them, and so has the user who made the user namespace that
it belongs to, which this process then enters as well.  The standard library is all that is imported.
"""

import ctypes
import fcntl
import os
import socket
import sys

PORT = 3128
BACKLOG = 128
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_NS_GET_USERNS = 0xB701


def enter(pid: int) -> None:
    """Be in the network of process `pid`; OSError where that is refused."""
    libc = ctypes.CDLL(None, use_errno=True)
    network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    if libc.setns(network, _CLONE_NEWNET) == 0:
        return
    user = fcntl.ioctl(network, _NS_GET_USERNS)
    for namespace, kind in ((user, _CLONE_NEWUSER), (network, _CLONE_NEWNET)):
        if libc.setns(namespace, kind) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def main(pid: int, descriptor: int) -> None:
    """Send a listening socket, with the name of its namespace; or nothing but what was in the way."""
    with socket.socket(fileno=descriptor) as answers:
        try:
            enter(pid)
            with socket.socket() as door:
                door.bind(("127.0.0.1", PORT))
                door.listen(BACKLOG)
                name = os.readlink("/proc/self/ns/net")  # noqa: PTH115 - no path
                socket.send_fds(answers, [name.encode()], [door.fileno()])
        except OSError as error:
            answers.send(str(error).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
