"""Set-up commands run once for each content; what they leave is what sandboxes start with."""

import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from fakes_tools import FakeBackend, FakeHosts, config
from sandboxes import backend_of, cancelled_at, entries, left_processes, output_of, sandbox_root
from sostenuto.errors import Blame, SandboxError
from sostenuto.sandbox import processes
from sostenuto.sandbox.bubblewrap import BubblewrapBackend
from sostenuto.sandbox.local import LocalSandbox
from sostenuto.sandbox.protocol import Blueprint, Sandbox, Snapshot
from sostenuto.tools import content
from sostenuto.tools.ladder import Ladder
from sostenuto.tools.metrics import Metrics
from sostenuto.tools.reconcile import forget_ownerless, open_state, reclaim_orphans, verify_layers
from sostenuto.tools.recorded import RecordedBackend
from sostenuto.tools.secrets import Secrets
from sostenuto.tools.server import listen
from sostenuto.tools.setup import Setup
from sostenuto.tools.stock import Stock
from sostenuto.types import SandboxRung
from stocks import clean_root, stocked

LOCAL = ("bubblewrap", "landlock")
DRAWN = Setup(("cd sub", "head -c 9 /dev/urandom | od -An -tx1 >made", "cp ../given copied"))
GIVEN = Blueprint(files={"sub/here": b"", "given": b"1"})
MIB = Setup(("head -c 1048576 /dev/urandom >big",))


async def stop_all(sandboxes: list[Ladder]) -> None:
    async with anyio.create_task_group() as group:
        for sandbox in sandboxes:
            group.start_soon(sandbox.stop)


async def start_together(stock: Stock, count: int, blueprint: Blueprint, setup: Setup) -> list[Ladder]:
    started: list[Ladder] = []

    async def start(number: int) -> None:
        started.append(await stock.start(f"p-{number}", blueprint, setup))

    async with anyio.create_task_group() as group:
        for number in range(count):
            group.start_soon(start, number)
    return started


@pytest.mark.parametrize("kind", LOCAL)
async def test_programs_that_come_together_and_later_start_over_one_layer(kind: str):
    async with clean_root() as root, stocked(backend_of(kind, root)) as stock:
        started = await start_together(stock, 6, GIVEN, DRAWN)
        drawn = {await output_of(one, "cat sub/made; cat sub/copied") for one in started}
        await stop_all(started)
        later = await stock.start("later", GIVEN, DRAWN)
        assert drawn == {await output_of(later, "cat sub/made; cat sub/copied")}
        await later.stop()
        assert stock.counters["layers_built"] == 1
        assert len(entries(root)) == 1


@pytest.mark.parametrize("kind", LOCAL)
async def test_what_a_program_changes_is_its_own(kind: str):
    async with clean_root() as root, stocked(backend_of(kind, root)) as stock:
        first, second = await start_together(stock, 2, GIVEN, DRAWN)
        await output_of(first, "echo 2 >sub/copied; rm given; echo 3 >new")
        third = await stock.start("third", GIVEN, DRAWN)
        for other in (second, third):
            assert await output_of(other, "cat sub/copied given; ls -A | wc -l") == "112"
        await stop_all([first, second, third])


async def test_contents_that_differ_have_layers_that_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(content, "FRESH_S", 0.0)
    async with clean_root() as root, stocked(backend_of("landlock", root)) as stock:
        template = tmp_path / "template"
        template.mkdir()
        blueprints = [
            Blueprint(),
            Blueprint(files={"a": b"1"}),
            Blueprint(files={"a": b"2"}),
            Blueprint(environment={"A": "1"}),
            Blueprint(template=str(template)),
        ]
        for blueprint in blueprints:
            await stop_all(await start_together(stock, 2, blueprint, MIB))
        (template / "new").write_text("1")
        await stop_all(await start_together(stock, 2, blueprints[-1], Setup(("cat new",))))
        await stop_all(await start_together(stock, 2, blueprints[-1], MIB))
        assert stock.counters["layers_built"] == len(blueprints) + 2


@pytest.mark.parametrize("kind", LOCAL)
@pytest.mark.parametrize(
    ("commands", "said"),
    [
        (("true", "echo first; echo no such package; exit 3"), "exited with 3; .*\nfirst\nno such package"),
        (("sleep 1000",), "'sleep 1000' was ended at the limit of 0.3 s"),
    ],
)
async def test_a_command_that_fails_is_named_with_what_it_wrote(
    kind: str, commands: tuple[str, ...], said: str
):
    async with clean_root() as root, stocked(backend_of(kind, root)) as stock:
        setup = Setup(commands, timeout_s=0.3 if commands == ("sleep 1000",) else 20)
        with pytest.raises(SandboxError, match=said) as raised:
            await stock.start("p", Blueprint(), setup)
        assert raised.value.blame is Blame.INFRASTRUCTURE
        assert stock.counters["layers_built"] == 0


async def test_the_least_recently_used_layer_goes_first():
    async with clean_root() as root, stocked(backend_of("bubblewrap", root), layer_bytes=5 << 19) as stock:
        for number in (b"1", b"2", b"1", b"3", b"1"):
            await (await stock.start("p", Blueprint(files={"n": number}), MIB)).stop()
        assert stock.counters["layers_built"] == 3
        assert stock.counters["layer_hits"] == 2
        assert stock.counters["layers_evicted"] == 1
        await _until_there_are(root, 2)


async def test_a_layer_in_use_is_not_evicted():
    async with clean_root() as root, stocked(backend_of("bubblewrap", root), layer_bytes=5 << 19) as stock:
        used = await stock.start("used", Blueprint(files={"n": b"0"}), MIB)
        for number in (b"1", b"2", b"3", b"2"):
            await (await stock.start("p", Blueprint(files={"n": number}), MIB)).stop()
        # 1 made room for 2, 2 for 3, and 3 for 2: beside the one in use there is room for one more.
        assert stock.counters["layers_evicted"] == 3
        assert stock.counters["layers_built"] == 5
        assert stock.layer_bytes <= 5 << 19
        assert await output_of(used, "cat n; wc -c <big") == "01048576"
        again = await stock.start("again", Blueprint(files={"n": b"0"}), MIB)
        assert stock.counters["layers_built"] == 5
        await stop_all([used, again])


async def test_a_layer_beyond_the_budget_lasts_as_long_as_its_users():
    async with clean_root() as root, stocked(backend_of("bubblewrap", root), layer_bytes=0) as stock:
        for built in (1, 2):
            started = await start_together(stock, 3, Blueprint(), MIB)
            assert stock.counters["layers_built"] == built
            await stop_all(started)
            assert stock.counters["layers_evicted"] == built
            assert stock.layer_bytes == 0


async def test_a_sandbox_that_is_snapshotted_needs_its_layer_no_more_and_comes_back():
    async with clean_root() as root, stocked(backend_of("bubblewrap", root), layer_bytes=0) as stock:
        ladder = await stock.start("p", GIVEN, DRAWN)
        made = await output_of(ladder, "echo own >own; cat sub/made")
        assert await ladder.move(SandboxRung.SNAPSHOTTED) is SandboxRung.SNAPSHOTTED
        assert stock.counters["layers_evicted"] == 1
        assert await output_of(ladder, "cat sub/made own given") == f"{made}\nown\n1"
        await ladder.stop()


async def test_whoever_leaves_a_build_does_not_end_it_for_the_others():
    async with clean_root() as root, stocked(backend_of("bubblewrap", root), layer_bytes=0) as stock:
        setup = Setup(("sleep 0.3; echo 1 >made",))
        with anyio.move_on_after(0.1) as scope:
            await stock.start("builder", Blueprint(), setup)
        started = await start_together(stock, 2, Blueprint(), setup)
        assert scope.cancelled_caught
        assert await output_of(started[0], "cat made") == "1"
        await stop_all(started)
        assert stock.counters["layers_built"] == 1
        assert stock.counters["layer_hits"] == 0
        assert stock.counters["layers_evicted"] == 1


@pytest.mark.parametrize("kind", LOCAL)
async def test_a_start_cancelled_at_any_await_leaves_nothing_but_the_layer(kind: str):
    setup = Setup(("echo 1 >made",), health="test -f made")
    step, in_time = 0, True
    async with clean_root() as root, stocked(backend_of(kind, root)) as stock:
        while in_time:
            started: list[Ladder] = []

            async def start(started: list[Ladder] = started) -> None:
                started.append(await stock.start("p", Blueprint(), setup))

            in_time = await cancelled_at(start(), step)
            await stop_all(started)
            await _until_there_are(root, 1)
            step += 1
        assert stock.counters["layers_built"] == 1
    assert step > 5


async def _until_there_are(root: Path, count: int) -> None:
    with anyio.fail_after(20):
        while len(entries(root)) != count or left_processes(root):  # noqa: ASYNC110
            await anyio.sleep(0.01)


@pytest.mark.parametrize("kind", LOCAL)
async def test_a_server_that_ends_at_any_moment_of_a_build_leaves_nothing(kind: str):
    for hops in range(0, 60, 4):
        async with clean_root() as root, stocked(backend_of(kind, root)) as stock:
            setup = Setup(("echo 1 >made", "sleep 0.05"))
            with anyio.move_on_after(hops * 0.002):
                # On a machine that is fast, or here slow, the build may be over by then.
                await (await stock.start("p", Blueprint(), setup)).stop()


async def test_a_server_killed_during_a_build_leaves_nothing_after_the_next_start(tmp_path: Path):
    with sandbox_root() as root:
        code = (
            "import anyio, sys\n"
            "sys.path.insert(0, sys.argv[2])\n"
            "from sandboxes import backend_of\n"
            "from pathlib import Path\n"
            "from sostenuto.sandbox.protocol import Blueprint\n"
            "from sostenuto.tools.setup import Setup\n"
            "from stocks import stocked\n"
            "async def main():\n"
            "    async with stocked(backend_of('bubblewrap', Path(sys.argv[1]))) as stock:\n"
            "        await stock.start('p', Blueprint(), Setup(('sleep 1000',)))\n"
            "anyio.run(main)\n"
        )
        argv = [sys.executable, "-c", code, str(root), str(Path(__file__).parent)]
        async with await anyio.open_process(argv, stdout=None, stderr=None) as server:
            with anyio.fail_after(30):
                while not any("sleep" in line for line in left_below(server.pid)):  # noqa: ASYNC110
                    await anyio.sleep(0.02)
            os.kill(server.pid, signal.SIGKILL)
        changes = {"state_dir": tmp_path, "sandbox_root": str(root)}
        async with listen(config(**changes), FakeBackend(), FakeHosts(), Secrets({})):
            assert entries(root) == []
            assert left_processes(root) == []


@asynccontextmanager
async def next_server(state: Path, root: Path, **changes: object) -> AsyncGenerator[Stock]:
    """What a server on the same state and disk starts with."""
    changes = {"state_dir": state, "sandbox_root": str(root), **changes}
    settings = config(**changes)
    async with open_state(settings) as journal:
        backend = RecordedBackend(backend_of("bubblewrap", root), journal, Metrics(None))
        await reclaim_orphans(settings, backend, journal)
        await verify_layers(journal, backend.name)
        await forget_ownerless(backend, journal.left)
        async with stocked(backend, journal, **changes) as stock:
            yield stock


async def left_by_a_killed_server(state: Path, root: Path) -> str:
    """What its set-up drew; the layer of GIVEN and DRAWN is on disk."""
    code = (
        "import anyio, os, signal, sqlite3, sys\n"
        "sys.path.insert(0, sys.argv[3])\n"
        "from contextlib import closing\n"
        "from pathlib import Path\n"
        "from test_tools_layers import DRAWN, GIVEN, next_server\n"
        "async def main():\n"
        "    async with next_server(Path(sys.argv[1]), Path(sys.argv[2])) as stock:\n"
        "        sandbox = await stock.start('p', GIVEN, DRAWN)\n"
        "        print((await sandbox.shell('cat sub/made', timeout_s=20)).output, flush=True)\n"
        "        with closing(sqlite3.connect(Path(sys.argv[1]) / 'journal.sqlite')) as journal:\n"
        "            while not journal.execute('SELECT * FROM layers').fetchall():\n"
        "                await anyio.sleep(0.01)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "anyio.run(main)\n"
    )
    argv = [sys.executable, "-c", code, str(state), str(root), str(Path(__file__).parent)]
    return (await anyio.run_process(argv, stderr=None, check=False)).stdout.decode().strip()


async def test_layers_survive_the_death_of_their_server_and_count_against_the_budget(tmp_path: Path):
    with sandbox_root() as root:
        drawn = await left_by_a_killed_server(tmp_path, root)
        assert drawn
        async with next_server(tmp_path, root) as stock:
            assert stock.counters["layers_inherited"] == 1
            assert stock.layer_bytes > 0
            sandbox = await stock.start("q", GIVEN, DRAWN)
            assert await output_of(sandbox, "cat sub/made") == drawn
            await sandbox.stop()
            assert stock.counters["layers_built"] == 0
        assert entries(root) == []
    with sandbox_root() as root:
        await left_by_a_killed_server(tmp_path, root)
        async with next_server(tmp_path, root, layer_bytes=0) as stock:
            assert stock.layer_bytes == 0


async def test_a_layer_that_is_not_what_it_was_is_made_anew(tmp_path: Path):
    with sandbox_root() as root:
        drawn = await left_by_a_killed_server(tmp_path, root)
        (made,) = root.glob("snapshot.*/content/sub/made")
        made.write_bytes(made.read_bytes()[::-1])
        async with next_server(tmp_path, root) as stock:
            assert stock.counters["layers_inherited"] == 0
            sandbox = await stock.start("q", GIVEN, DRAWN)
            assert await output_of(sandbox, "cat sub/made") not in {drawn, drawn[::-1]}
            await sandbox.stop()
        assert entries(root) == []


async def test_a_server_that_ends_in_order_leaves_its_layers_where_it_is_told_to(tmp_path: Path):
    with sandbox_root() as root:
        drawn: list[str] = []
        for keeps, there in ((True, 1), (True, 1), (False, 0)):
            async with next_server(tmp_path, root, keep_layers=keeps) as stock:
                sandbox = await stock.start("p", GIVEN, DRAWN)
                drawn.append(await output_of(sandbox, "cat sub/made"))
                await sandbox.stop()
                assert stock.counters["layers_built"] == (len(drawn) == 1)
            assert len(entries(root)) == there
        assert len(set(drawn)) == 1


def left_below(pid: int) -> list[str]:
    """Command lines of all descendants."""
    found: list[str] = []
    for child in processes.descendants(pid):
        path = Path(f"/proc/{child}/cmdline")
        found += [path.read_bytes().decode()] if path.exists() else []
    return found


class UnfitBackend(BubblewrapBackend):
    """The first `unfit` programs' sandboxes lack the file that the health check looks for."""

    unfit = 0
    starts = 0

    async def start(
        self, name: str, blueprint: Blueprint, *, snapshot: Snapshot | None = None
    ) -> LocalSandbox:
        sandbox = await super().start(name, blueprint, snapshot=snapshot)
        self.starts += 1
        if self.unfit and not name.startswith("layer"):
            self.unfit -= 1
            await sandbox.shell("rm fit", timeout_s=20)
        return sandbox


@pytest.mark.parametrize("setup", [Setup(health="test -f fit"), Setup(("true",), health="test -f fit")])
async def test_an_unfit_sandbox_is_thrown_away_and_started_once_more(setup: Setup):
    async with clean_root() as root:
        backend = UnfitBackend(root)
        async with stocked(backend) as stock:
            backend.unfit = 1
            sandbox = await stock.start("p", Blueprint(files={"fit": b""}), setup)
            assert await output_of(sandbox, "ls") == "fit"
            await sandbox.stop()
            backend.unfit = 2
            with pytest.raises(SandboxError, match="health check 'test -f fit' exited with 1"):
                await stock.start("p", Blueprint(files={"fit": b""}), setup)
            assert backend.unfit == 0


async def test_a_layer_over_which_nothing_starts_is_built_anew_for_the_next_program():
    async with clean_root() as root:
        backend = UnfitBackend(root)
        async with stocked(backend) as stock:
            setup, blueprint = Setup(("true",), health="test -f fit"), Blueprint(files={"fit": b""})
            using = await stock.start("using", blueprint, setup)
            backend.unfit = 2
            with pytest.raises(SandboxError, match="health check"):
                await stock.start("p", blueprint, setup)
            await (await stock.start("p", blueprint, setup)).stop()
            assert stock.counters["layers_built"] == 2
            assert await output_of(using, "ls") == "fit"
            await using.stop()
            await _until_there_are(root, 1)


async def test_a_health_check_leaves_the_shell_as_it_was():
    async with clean_root() as root, stocked(backend_of("bubblewrap", root)) as stock:
        sandbox: Sandbox = await stock.start("p", Blueprint(), Setup(health="cd / && X=1 && true"))
        assert (await output_of(sandbox, 'echo "$X"; pwd')).splitlines()[-1] != "/"
        assert await output_of(sandbox, 'echo "$X"') == ""
        await sandbox.stop()
