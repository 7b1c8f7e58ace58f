"""Environments with packages of their own.  Packages are wheels made here, so no index is asked."""

import sys
import zipfile
from pathlib import Path

import anyio
import psutil
import pytest

from fakes_bounds import HungryTask, Needy
from hosts import ZOO, call, prepare
from sostenuto.envs.environment import Environment
from sostenuto.envs.pool import WorkerPool
from sostenuto.envs.registry import environment_ref
from sostenuto.errors import ConfigError, ToolServerError
from sostenuto.tools.wire import EnvironmentRef
from sostenuto.types import Episode


def wheel(folder: Path, version: str) -> str:
    """A wheel of a package with this version, as a requirement."""
    path = folder / f"sostenuto_tiny-{version}-py3-none-any.whl"
    info = f"sostenuto_tiny-{version}.dist-info"
    files = {
        "sostenuto_tiny.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: sostenuto-tiny\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in (files | {f"{info}/RECORD": record}).items():
            archive.writestr(name, text)
    return f"sostenuto-tiny @ file://{path}"


def needy(*requirements: str) -> EnvironmentRef:
    return environment_ref(Needy).model_copy(update={"requirements": requirements})


async def version_in(pool: WorkerPool, ref: EnvironmentRef, program: str) -> str:
    host = await pool.choose(ref)
    await prepare(host, program, ref=ref)
    return (await call(host, program, "version")).content


async def test_requirements_are_there_for_its_own_workers_and_for_no_others(tmp_path: Path):
    one, two = needy(wheel(tmp_path, "1.0")), needy(wheel(tmp_path, "2.0"), "pydantic")
    async with WorkerPool(interpreters=tmp_path / "made") as pool:
        assert (await version_in(pool, one, "a")).startswith(f"1.0 {tmp_path}/made/")
        assert (await version_in(pool, two, "b")).startswith("2.0 ")
        assert "No module named" in await version_in(pool, needy(), "c")
        assert pool.count == 3
        await prepare(await pool.choose(ZOO), "d")
        assert pool.count == 3, "who needs nothing shares the server's own interpreter"
    assert not list((tmp_path / "made").glob("*/lib/*/site-packages/pydantic")), "the server has it already"


async def test_what_was_made_is_used_again_and_what_is_half_made_is_made_anew(tmp_path: Path):
    ref = needy(wheel(tmp_path, "1.0"))
    ours_left: list[bool] = []
    for program in ("a", "b", "c"):
        async with WorkerPool(interpreters=tmp_path / "made") as pool:
            assert (await version_in(pool, ref, program)).startswith("1.0 ")
        (mark,) = (tmp_path / "made").glob("*/complete")
        ours_left.append((mark.parent / "ours").exists())
        (mark.parent / "ours").touch()
        if program == "b":
            mark.unlink()
            (mark.parent / "bin" / "python").unlink()
    assert ours_left == [False, True, False]


async def test_two_servers_that_need_the_same_at_once_make_it_once(tmp_path: Path):
    ref = needy(wheel(tmp_path, "1.0"))
    said: list[str] = []

    async def serve(program: str) -> None:
        async with WorkerPool(interpreters=tmp_path / "made") as pool:
            said.append(await version_in(pool, ref, program))

    async with anyio.create_task_group() as group:
        group.start_soon(serve, "a")
        group.start_soon(serve, "b")
    assert said[0].startswith("1.0 ")
    assert said[0] == said[1]


async def test_a_requirement_that_cannot_be_installed_is_infrastructure_with_pip_s_own_words(tmp_path: Path):
    secret = "sesame-in-a-path"
    requirement = f"sostenuto-tiny @ file://{tmp_path}/{secret}/sostenuto_tiny-1.0-py3-none-any.whl"
    async with WorkerPool(interpreters=tmp_path / "made", secrets={"TOKEN": secret}) as pool:
        with pytest.raises(ToolServerError, match=r"Needy: its requirements: .*No such file") as caught:
            await pool.describe(needy(requirement))
        assert secret not in str(caught.value)
        assert "[secret TOKEN]" in str(caught.value)
        (tmp_path / secret).mkdir()
        wheel(tmp_path / secret, "1.0")
        with anyio.move_on_after(0.05):
            await pool.describe(needy(requirement))
        with anyio.fail_after(120):
            while not list((tmp_path / "made").glob("*/complete")):  # noqa: ASYNC110 - nobody tells
                await anyio.sleep(0.05)
        assert pool.count == 0, "nobody waited for it any more, and it was made all the same"


async def test_an_environment_can_name_its_interpreter(tmp_path: Path):
    link = tmp_path / "python"
    link.write_text(f'#!/bin/sh\nexport SEEN_BY=link\nexec "{sys.executable}" "$@"\n')
    link.chmod(0o755)
    ref = needy().model_copy(update={"interpreter": str(link)})
    async with WorkerPool(interpreters=tmp_path / "made") as pool:
        await pool.describe(ref)
        assert [psutil.Process(pid).environ()["SEEN_BY"] for pid in pool.pids] == ["link"]
        with pytest.raises(ConfigError, match=r"`interpreter` is '/nowhere/python'"):
            await pool.describe(needy().model_copy(update={"interpreter": "/nowhere/python"}))


class Bare(Environment[HungryTask]):
    def reset(self, task: HungryTask) -> str:
        return "ask"

    def reward(self, episode: Episode) -> float:
        return 1.0


def test_what_a_class_declares_travels_in_its_reference():
    class Wanting(Bare):
        requirements = ("tiny==1.0", "other")

    class Named(Bare):
        interpreter = "venv/bin/python"

    assert environment_ref(Wanting).requirements == ("tiny==1.0", "other")
    assert environment_ref(Named).interpreter == str(Path(__file__).parent / "venv/bin/python")
    assert environment_ref(Bare).requirements == ()


def test_declarations_that_pip_must_not_be_given_are_refused():
    class Option(Bare):
        requirements = ("--index-url=elsewhere",)

    class Text(Bare):
        requirements = "tiny"

    class Both(Bare):
        requirements = ("tiny",)
        interpreter = "python3"

    for cls, said in ((Option, "--index-url"), (Text, "a tuple of str"), (Both, "keep one of them")):
        with pytest.raises(ConfigError, match=said):
            environment_ref(cls)
