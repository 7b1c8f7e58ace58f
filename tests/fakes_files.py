"""An environment that moves whole folders and runs programs; workers import this module by name."""

import io
import tarfile

import anyio
from pydantic import BaseModel

from sostenuto.envs.environment import Environment
from sostenuto.envs.workspace import SandboxSpec
from sostenuto.errors import ToolError
from sostenuto.tools.decorator import tool
from sostenuto.types import Episode


class Job(BaseModel):
    number: int = 7


def tar_of(name: str, content: bytes, kind: bytes = tarfile.REGTYPE, link: str = "") -> bytes:
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w") as tar:
        member = tarfile.TarInfo(name)
        member.type, member.linkname, member.size = kind, link, len(content)
        tar.addfile(member, io.BytesIO(content))
    return memory.getvalue()


HOSTILE = {
    "outside": tar_of("../x", b""),
    "absolute": tar_of("/tmp/x", b""),
    "device": tar_of("null", b"", tarfile.CHRTYPE),
    "hard": tar_of("h", b"", tarfile.LNKTYPE, "/etc/passwd"),
    "large": tar_of("big", bytes(3 << 20)),
    "noise": b"no archive at all",
}


class Builder(Environment[Job]):
    """Build something and take it home."""

    sandbox = SandboxSpec(file_bytes=2 << 20, memory_bytes=256 << 20)

    async def reset(self, task: Job) -> str:
        await self.sandbox.upload({"src/number": str(task.number), "src/deep/raw": bytes(range(256)) * 4096})
        return "go"

    @tool
    async def double(self) -> str:
        """Add the number to itself, and say what is in the tar of the folder."""
        done = await self.sandbox.exec(
            [
                "sh",
                "-c",
                'read n <src/number; read more; echo $((n + more)) >src/out; echo "$0 ran"',
                "it's $x",
            ],
            stdin=str(self.task.number),
        )
        archive = await self.sandbox.download("src")
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            out, raw = (tar.extractfile(name) for name in ("out", "deep/raw"))
            assert out is not None
            assert raw is not None
            same = raw.read() == bytes(range(256)) * 4096
            return f"{done.exit_code} {done.output.strip()} {out.read().decode().strip()} {same}"

    @tool
    async def send(self, what: str) -> str:
        """Upload something hostile."""
        await self.sandbox.upload(HOSTILE[what], "into")
        return "sent"

    @tool
    async def fetch(self, path: str, max_bytes: int) -> str:
        """Download."""
        return str(len(await self.sandbox.download(path, max_bytes=max_bytes)))

    @tool
    async def sleep(self, limit_s: float) -> str:
        """Run a tree of processes until it is ended."""
        tree = ["sh", "-c", "setsid sleep 1000 & echo begun; echo x >begun; wait"]
        done = await self.sandbox.exec(tree, timeout_s=limit_s)
        return f"{done.timed_out} {done.output.strip()}"

    @tool(timeout_s=0.8)
    async def hasty(self) -> str:
        """Run longer than the tool may."""
        return str((await self.sandbox.exec(["sleep", "1000"], timeout_s=600)).timed_out)

    @tool
    async def together(self) -> str:
        """Run two programs that wait for each other."""
        async with anyio.create_task_group() as group:
            for one, other in ("ab", "ba"):
                script = f"touch {one}; until [ -e {other} ]; do sleep 0.01; done"
                group.start_soon(lambda script=script: self.sandbox.exec(["sh", "-c", script]))
        return "both"

    @tool
    async def hog(self) -> str:
        """Take more memory than there is."""
        done = await self.sandbox.exec(["sh", "-c", "head -c 400000000 /dev/zero | tail"])
        return f"{done.exit_code != 0}"

    @tool
    async def shout(self) -> str:
        """Name a program as one would a shell command."""
        try:
            await self.sandbox.exec("ls -l")
        except TypeError as error:
            raise ToolError(str(error)) from error
        return "ran"

    async def reward(self, episode: Episode) -> float:
        return 1.0
