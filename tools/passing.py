"""What a sandbox in front of another one passes on as it is."""

from sostenuto.sandbox.protocol import Sandbox


class Passing:
    """See `sostenuto.sandbox.protocol.Sandbox`; a subclass adds `stop` and whatever else it looks at."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.shell = sandbox.shell
        self.exec = sandbox.exec
        self.read = sandbox.read
        self.write = sandbox.write
        self.upload = sandbox.upload
        self.download = sandbox.download
        self.download_to = sandbox.download_to
        self.pause = sandbox.pause
        self.reclaim = sandbox.reclaim
        self.resume = sandbox.resume
        self.snapshot = sandbox.snapshot
        self.usage = sandbox.usage
        self.is_quiet = sandbox.is_quiet
