"""Templates as layers, snapshots and forks."""

import os
from pathlib import Path

import pytest

from sandboxes import ALL, backend_of, cancelled_at, entries, output_of, running, sandbox_root
from sostenuto.errors import SandboxError
from sostenuto.sandbox import bubblewrap
from sostenuto.sandbox.bubblewrap import BubblewrapBackend
from sostenuto.sandbox.folders import reclaim
from sostenuto.sandbox.protocol import Backend, Blueprint, Sandbox, SandboxLimits, Snapshot

each_backend = pytest.mark.parametrize("kind", ALL)


@pytest.fixture
def template(tmp_path: Path):
    folder = tmp_path / "template"
    for name in ("a/one", "a/two", "b/deep/three", "b/four", "c/five"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "link").symlink_to("b")
    (folder / "run").write_text("#!/bin/sh\necho ran\n")
    (folder / "run").chmod(0o755)
    return folder


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


async def is_overlay(sandbox: Sandbox) -> bool:
    return "overlay" in await output_of(sandbox, "grep ' /workspace ' /proc/self/mounts")


CHANGES = (
    "echo new > a/one && rm b/four && rm -r c && mkdir c && echo again > c/six && mv a/two moved && "
    "ln -s a/one link2 && mkfifo pipe && mkdir shut && touch shut/in && chmod 0 shut && chmod 0 moved && "
    "./run"
)
SEEN = (
    "cat a/one; ls a b c; readlink link link2; test -p pipe && echo pipe; stat -c %a shut moved run; "
    "chmod 700 shut moved; ls shut; cat moved"
)


async def state(sandbox: Sandbox) -> str:
    return await output_of(sandbox, SEEN)


async def test_a_template_lies_below_the_workspace_and_is_not_changed(template: Path):
    before = contents(template)
    blueprint = Blueprint(str(template), {"link/file": b"through a link", "a/b/c": b"", "a/one": b"mine"})
    async with running("bubblewrap", blueprint) as (sandbox, root):
        if not await is_overlay(sandbox):
            pytest.skip("overlays cannot be mounted here")
        assert await output_of(sandbox, "cat b/file a/one b/deep/three") == "through a linkmineb/deep/three"
        assert await output_of(sandbox, CHANGES) == "ran"
        assert await sandbox.read("a/one") == b"new\n"
        assert await sandbox.read("link/deep/three") == b"b/deep/three"
        await sandbox.write("b/deep/three", b"from outside")
        assert (
            await output_of(sandbox, "cat b/deep/three; echo x >> b/deep/three; stat -c %u . a a/one b/deep")
            != ""
        )
        assert await sandbox.read("b/deep/three") == b"from outsidex\n"
        usage = await sandbox.usage()
        assert 0 < usage.disk_bytes < 200_000
        (folder,) = root.iterdir()
        assert not (folder / "workspace" / "run").exists()
    assert contents(template) == before


async def test_files_of_a_layer_are_the_sandbox_s_own(template: Path):
    async with running("bubblewrap", Blueprint(str(template))) as (sandbox, _):
        owners = await output_of(sandbox, "stat -c %u:%g . a a/one link b/deep/three; echo $(id -u):$(id -g)")
        assert len(set(owners.splitlines())) == 1
        changed = await sandbox.shell(
            "chmod 600 a/one && touch -d 2001-01-01 b/four && mv b/deep d", timeout_s=20
        )
        assert changed.exit_code == 0, changed.output


@each_backend
async def test_a_fork_starts_with_what_the_workspace_was_and_goes_its_own_way(kind: str, template: Path):
    with sandbox_root() as root:
        backend = backend_of(kind, root)
        first = await backend.start("first", Blueprint(str(template), environment={"X": "y"}))
        if kind == "landlock" and os.geteuid() != 0:
            await first.shell(CHANGES.replace("chmod 0 shut && chmod 0 moved && ", ""), timeout_s=20)
        else:
            assert await output_of(first, CHANGES) == "ran"
        snapshot = await first.snapshot()
        assert snapshot.size_bytes > 0
        expected = await state(first)
        await first.shell("echo later > a/one; rm -r b", timeout_s=20)
        forks = [await backend.start(f"fork{n}", Blueprint(), snapshot=snapshot) for n in range(2)]
        assert await state(forks[0]) == expected
        await forks[0].shell("echo other > a/one; echo only > only", timeout_s=20)
        assert await state(forks[1]) == expected
        assert await output_of(forks[1], "ls only 2>&1") != "only"
        await backend.forget(snapshot)
        await backend.forget(snapshot)
        assert await output_of(forks[1], "cat link/deep/three moved") == "b/deep/threea/two"
        with pytest.raises(SandboxError, match="gone"):
            await backend.start("late", Blueprint(), snapshot=snapshot)
        for sandbox in (first, *forks):
            await sandbox.stop()
        assert entries(root) == []


@each_backend
async def test_a_snapshot_of_a_fork_needs_neither_the_fork_nor_the_snapshot_before(kind: str, template: Path):
    with sandbox_root() as root:
        backend = backend_of(kind, root)
        first = await backend.start("first", Blueprint(str(template)))
        one = await _changed(backend, first, "rm a/one; mkdir -p x/y; echo 1 > x/y/z; rm -r c; echo 1 > c")
        fork = await backend.start("fork", Blueprint(), snapshot=one)
        two = await _changed(
            backend, fork, "echo back > a/one; rm -r x; mkdir x; echo 2 > x/new; rm c; mkdir c"
        )
        await backend.forget(one)
        again = await backend.start("again", Blueprint(), snapshot=two)
        assert (
            await output_of(again, "cat a/one; find x c b | sort")
            == "back\nb\nb/deep\nb/deep/three\nb/four\nc\nx\nx/new"
        )
        await again.stop()
        await backend.forget(two)
        assert entries(root) == []


async def _changed(backend: Backend, sandbox: Sandbox, command: str) -> Snapshot:
    result = await sandbox.shell(command, timeout_s=20)
    assert result.exit_code == 0, result.output
    snapshot = await sandbox.snapshot()
    await sandbox.stop()
    return snapshot


@each_backend
async def test_a_sandbox_goes_on_after_a_snapshot_and_stays_paused_if_it_was(kind: str):
    async with running(kind) as (sandbox, root):
        loop = "(while :; do echo x >> log; sleep 0.01; done) & until [ -s log ]; do :; done; X=kept"
        await sandbox.shell(loop, timeout_s=20)
        await sandbox.snapshot()
        size = len(await sandbox.read("log"))
        assert (
            await output_of(sandbox, f"until [ $(wc -c < log) -gt {size} ]; do sleep 0.01; done; echo $X")
            == "kept"
        )
        await sandbox.pause()
        await sandbox.snapshot()
        with pytest.raises(SandboxError, match="paused"):
            await sandbox.shell("true", timeout_s=20)
        await sandbox.resume()
        _remove_snapshots(root)


def _remove_snapshots(root: Path):
    """As `reclaim` does once their owner is dead."""
    for path in root.glob("snapshot.*"):
        record = (path / "owner.json").read_text().replace(f'"pid": {os.getpid()}', '"pid": 0')
        (path / "owner.json").write_text(record)
    assert all(name == "snapshot of tested" for name in reclaim(root))


@each_backend
async def test_a_snapshot_cancelled_at_any_await_leaves_nothing_and_the_sandbox_goes_on(kind: str):
    async with running(kind) as (sandbox, root):
        await sandbox.shell("for i in 1 2 3 4 5 6 7 8 9; do echo x > $i; done", timeout_s=20)
        for n in range(60):
            was_cancelled = await cancelled_at(sandbox.snapshot(), n)
            assert await output_of(sandbox, "echo alive") == "alive"
            if not was_cancelled:
                break
            for _ in range(100):
                if len(entries(root)) == 1:
                    break
                await sandbox.shell("sleep 0.02", timeout_s=20)
            assert len(entries(root)) == 1
        else:
            pytest.fail("snapshot has more awaits than are tried")
        _remove_snapshots(root)


async def test_snapshots_of_a_dead_owner_are_removed_but_for_those_that_its_successor_keeps(template: Path):
    with sandbox_root() as root:
        backend = backend_of("bubblewrap", root)
        sandbox = await backend.start("first", Blueprint(str(template)))
        kept = await _changed(backend, sandbox, "echo kept > kept")
        dropped = await backend.start("second", Blueprint(str(template)))
        await _changed(backend, dropped, "echo dropped > dropped")
        assert reclaim(root) == []
        for path in root.iterdir():
            record = (path / "owner.json").read_text().replace(f'"pid": {os.getpid()}', '"pid": 0')
            (path / "owner.json").write_text(record)
        assert reclaim(root, keep=[kept.reference]) == ["snapshot of second"]
        assert reclaim(root) == []
        successor = backend_of("bubblewrap", root)
        sandbox = await successor.start("again", Blueprint(), snapshot=kept)
        assert await output_of(sandbox, "cat kept a/one") == "kept\na/one"
        await sandbox.stop()
        await successor.forget(kept)
        assert entries(root) == []


def _never(path: str, owner: tuple[int, int]) -> str:
    return f"{path} of {owner[0]}: not today"


async def test_the_probe_tells_whether_templates_are_mounted(template: Path, monkeypatch: pytest.MonkeyPatch):
    with sandbox_root() as root:
        sandbox = await BubblewrapBackend(root).start("first", Blueprint(str(template)))
        mounted = await is_overlay(sandbox)
        await sandbox.stop()
        said = (await BubblewrapBackend(root).probe()).details["templates"]
        assert said == "mounted below the workspace" if mounted else said.startswith("copied: ")
        monkeypatch.setattr("sostenuto.sandbox.layers._refusal", _never)
        said = (await BubblewrapBackend(root).probe()).details["templates"]
        assert said.startswith("copied: ")
        assert said.endswith("not today")
        assert entries(root) == []


async def test_only_snapshots_are_forgotten(tmp_path: Path):
    (tmp_path / "kept").mkdir()
    backend = BubblewrapBackend(tmp_path)
    for reference in (
        str(tmp_path),
        str(tmp_path / "kept"),
        str(tmp_path / "x" / ("snapshot." + "0" * 16)),
        "/",
    ):
        with pytest.raises(SandboxError, match="no snapshot"):
            await backend.forget(Snapshot("bubblewrap", reference, 0))
    assert entries(tmp_path) == ["kept"]


async def test_where_overlays_cannot_be_mounted_templates_are_copied(
    template: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    real = bubblewrap.find_bwrap()
    old = tmp_path / "bwrap"
    old.write_text(
        "#!/bin/sh\n[ $1 = --version ] && echo bubblewrap 0.8.0 && exit\n"
        'for word; do [ "$word" = --overlay ] && echo "bwrap: Unknown option --overlay" >&2 && exit 1; done\n'
        f'exec {real} "$@"\n'
    )
    old.chmod(0o755)
    monkeypatch.setattr(bubblewrap, "find_bwrap", lambda: str(old))
    with sandbox_root() as root:
        backend = BubblewrapBackend(root)
        for _ in range(2):
            sandbox = await backend.start("copied", Blueprint(str(template), {"a/one": b"mine"}))
            assert not await is_overlay(sandbox)
            assert await output_of(sandbox, "cat a/one b/four && " + CHANGES) == "mineb/fourran"
            snapshot = await sandbox.snapshot()
            fork = await backend.start("fork", Blueprint(), snapshot=snapshot)
            assert await state(fork) == await state(sandbox)
            assert (await sandbox.usage()).disk_bytes < 200_000
            await fork.stop()
            await sandbox.stop()
            await backend.forget(snapshot)
        assert entries(root) == []


async def test_a_template_that_others_own_or_that_is_read_only_is_copied(template: Path):
    (template / "a").chmod(0o500)
    try:
        async with running("bubblewrap", Blueprint(str(template))) as (sandbox, _):
            assert not await is_overlay(sandbox)
            assert await output_of(sandbox, "rm a/one && echo removed") == "removed"
        (template / "a").chmod(0o700)
        if os.geteuid() == 0:
            os.chown(template / "b" / "four", 12345, 12345)
            async with running("bubblewrap", Blueprint(str(template))) as (sandbox, _):
                assert not await is_overlay(sandbox)
                assert await output_of(sandbox, "echo x >> b/four && cat b/four") == "b/fourx"
    finally:
        (template / "a").chmod(0o700)


def mounts() -> str:
    """As the present thread sees them."""
    return Path("/proc/thread-self/mounts").read_text()


def mounts_of_other_threads() -> list[str]:
    tasks = Path("/proc/self/task")
    return [(task / "mounts").read_text() for task in tasks.iterdir() if task.name != str(os.getpid())]


async def test_mounts_under_another_owner_are_seen_by_nobody_else(template: Path):
    if os.geteuid() != 0:
        pytest.skip("only root mounts layers under another owner")
    async with running("bubblewrap", Blueprint(str(template))) as (sandbox, root):
        if not await is_overlay(sandbox):
            pytest.skip("overlays cannot be mounted here")
        for seen in (mounts(), *mounts_of_other_threads()):
            assert str(root) not in seen
        fails = Blueprint(str(template), limits=SandboxLimits(memory_bytes=4096))
        with pytest.raises(SandboxError):
            await BubblewrapBackend(root).start("fails", fails)
        assert not any(str(root) in seen for seen in mounts_of_other_threads())
