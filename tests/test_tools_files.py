"""Programs, files and archives of a sandbox over HTTP, with real sandboxes behind a real server."""

import io
import tarfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote

import aiohttp
import anyio
import psutil
import pytest

from fakes_files import HOSTILE, tar_of
from fakes_tools import FORM, SECRET, TOKEN, FakeHosts, config
from sandboxes import backend_of, commands_inside, sandbox_root
from sostenuto.errors import PathError, ToolServerError
from sostenuto.tools.client import ToolServerClient
from sostenuto.tools.secrets import Secrets
from sostenuto.tools.server import listen
from sostenuto.types import ProgramId

A = ProgramId("job/1 ü")
SIZE = Path(__file__).stat().st_size
PATH = f"/v1/programs/{quote(A, safe='')}/archive/"


class Served:
    def __init__(self, url: str, client: ToolServerClient, root: Path) -> None:
        self.url, self.client, self.root = url, client, root

    async def shell(self, command: str) -> str:
        return (await self.client.shell(A, command)).output

    async def put(self, path: str, body: bytes, token: str = TOKEN, **headers: str) -> tuple[int, str]:
        sent = {"Authorization": f"Bearer {token}", **headers}
        async with (
            aiohttp.ClientSession(headers=sent) as session,
            session.put(self.url + PATH + path, data=body) as response,
        ):
            return response.status, (await response.json()).get("message", "")


@asynccontextmanager
async def serving(**changes: object) -> AsyncGenerator[Served]:
    """One program, in a bubblewrap sandbox; all of it is gone afterwards."""
    with sandbox_root() as root:
        settings = config(sandbox_root=str(root), **changes)
        async with (
            listen(settings, backend_of("bubblewrap", root), FakeHosts(), Secrets({"KEY": SECRET})) as url,
            ToolServerClient(url, TOKEN, "owner") as client,
        ):
            await client.prepare(A, FORM, {})
            yield Served(url, client, root)
        assert not list(root.iterdir())


def names_in(archive: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return sorted(tar.getnames())


async def test_a_program_runs_beside_the_shell_and_a_folder_goes_in_and_out(tmp_path: Path):
    async with serving() as served:
        client = served.client
        ran = await client.exec(A, ["sh", "-c", 'cat; echo "$0"; exit 3', "it's $x"], stdin="in ü ")
        assert (ran.exit_code, ran.output) == (3, "in ü it's $x\n")
        assert (await client.exec(A, ["sleep", "1000"], timeout_s=0.2)).exit_code is None
        assert not [line for line in commands_inside(served.root) if "sleep" in line]
        sent = tmp_path / "sent.tar"
        with tarfile.open(sent, "w:gz") as tar:
            tar.add(__file__, "deep/er/file.py")
        await client.upload(A, sent, "some where/ü")
        await client.upload(A, tar_of("x", b"1"))
        assert await served.shell("cat x; cd 'some where/ü'; wc -c <deep/er/file.py; cd ../..") == (
            f"1{SIZE}\n"
        )
        assert names_in(await client.download(A, "some where")) == [
            "ü", "ü/deep", "ü/deep/er", "ü/deep/er/file.py",
        ]  # fmt: skip
        await client.download_to(A, tmp_path / "whole.tar")
        assert names_in((tmp_path / "whole.tar").read_bytes())[0] == "a.txt"


async def test_what_is_hostile_too_large_or_not_allowed_is_refused_and_nothing_is_written(tmp_path: Path):
    async with serving(archive_bytes=1 << 20) as served:
        client = served.client
        await served.shell("ln -s /tmp out; mkfifo pipe; ln -s ../.. up; head -c 2000000 /dev/zero >big")
        before = await served.shell("ls -A . /tmp")
        for what in ("outside", "absolute", "device", "hard", "noise"):
            with pytest.raises(PathError):
                await client.upload(A, HOSTILE[what])
        for path in ("out", "up", "../x", "big"):
            with pytest.raises(PathError):
                await client.upload(A, tar_of("x", b"1"), path)
        with pytest.raises(ToolServerError, match="Request Entity Too Large"):
            await client.upload(A, HOSTILE["large"])
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as tar:
            member = tarfile.TarInfo("bomb")
            member.size = 300 << 20
            tar.addfile(member, io.BytesIO(bytes(member.size)))
        with pytest.raises(PathError, match="larger than allowed"):
            await client.upload(A, packed.getvalue())
        for path in ("out", "pipe", "up", "../..", "none", "big"):
            with pytest.raises(PathError):
                await client.download_to(A, tmp_path / "x.tar", path)
        assert not list(tmp_path.iterdir())  # noqa: ASYNC240
        with pytest.raises(PathError, match="more than 5 bytes"):
            await client.download(A, "a.txt", max_bytes=5)
        with pytest.raises(ToolServerError, match="no program b here"):
            await client.upload(ProgramId("b"), tar_of("x", b"1"))
        with pytest.raises(ToolServerError, match="max_bytes: '-1' is no size"):
            await _get(served, f"{PATH}?max_bytes=-1")
        assert (await served.put("", tar_of("x", b"1"), token="wrong"))[0] == 401
        status, words = await served.put("", b"x" * 100, **{"Content-Encoding": "gzip"})
        assert (status, "cannot be read" in words or "Bad" in words) == (400, True)
        assert await served.shell("ls -A . /tmp") == before


async def _get(served: Served, path: str) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.get(served.url + path) as response,
    ):
        raise ToolServerError((await response.json())["message"])


async def test_no_secret_leaves_in_an_archive_wherever_it_stands():
    async with serving() as served:
        client = served.client
        key = SECRET.encode()
        await client.write(A, "d/plain", b"\xff" + key + b".")
        await client.write(A, "d/cut", b"x" * ((1 << 20) - 5) + key + b"y" * 3000)
        await client.write(A, f"d/{SECRET.replace('/', '')}", b"")
        archive = await client.download(A, "d")
        assert key not in archive
        assert names_in(archive) == ["[secret KEY]", "cut", "plain"]
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            plain, cut = tar.extractfile("plain"), tar.extractfile("cut")
            assert plain is not None
            assert cut is not None
            assert plain.read() == b"\xff" + b"*" * len(key) + b"."
            assert cut.read() == b"x" * ((1 << 20) - 5) + b"*" * len(key) + b"y" * 3000
        assert (await client.exec(A, ["echo", SECRET])).output == "[secret KEY]\n"


async def test_a_large_archive_takes_disk_and_not_memory(tmp_path: Path):
    size = 160 << 20
    sent, back = tmp_path / "sent.tar", tmp_path / "back.tar"
    with tarfile.open(sent, "w") as tar:
        member = tarfile.TarInfo("large")
        member.size = size
        tar.addfile(member, _Endless())  # pyright: ignore[reportArgumentType]
    async with serving() as served:
        before = psutil.Process().memory_info().rss
        peak = before

        async def watch() -> None:
            nonlocal peak
            while True:
                peak = max(peak, psutil.Process().memory_info().rss)
                await anyio.sleep(0.01)

        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            await served.client.upload(A, sent)
            await served.client.download_to(A, back, "large")
            group.cancel_scope.cancel()
        assert back.stat().st_size == pytest.approx(size, abs=20480)
        assert peak - before < 48 << 20  # client and server are both in this process


class _Endless(io.RawIOBase):
    def read(self, size: int = -1) -> bytes:
        return b"x" * size


async def test_a_client_that_hangs_up_ends_the_program_that_it_runs():
    async with serving() as served:
        async with anyio.create_task_group() as group:
            group.start_soon(served.client.exec, A, ["sh", "-c", "echo x >begun; sleep 1000"])
            await served.shell("until [ -e begun ]; do sleep 0.01; done")
            group.cancel_scope.cancel()
        with anyio.fail_after(20):
            while [line for line in commands_inside(served.root) if "sleep" in line]:  # noqa: ASYNC110
                await anyio.sleep(0.02)
        await served.client.exec(A, ["true"])
