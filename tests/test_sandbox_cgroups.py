"""Cgroups: where they can be made, what they bound, and that a dead owner's are ended and no others."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from fakes_cgroups import TOP, FakeV2
from sostenuto.errors import SandboxError, Unsupported
from sostenuto.sandbox.cgroup_end import reclaim_cgroups
from sostenuto.sandbox.cgroup_tree import Tree, find_mounts, new_name
from sostenuto.sandbox.cgroups import Bounds, Cgroup, Cgroups, describe_limits, look_for_cgroups

SCOPE = "/user.slice/user@1000.service/app.slice/run-1.scope"
APP = "/user.slice/user@1000.service/app.slice"
HOG = "import sys; block = bytearray(256 << 20); print(len(block))"
_NEEDS = "needs cgroups that this user can make and that bound memory: run as root, or in a delegated scope"


def delegated() -> FakeV2:
    """As systemd gives a user: the own scope holds processes, the slice above hands memory and pids on."""
    tree = FakeV2(SCOPE, readonly=("/", "/user.slice"))
    tree.hand_on("/", "cpu memory pids")
    tree.hand_on("/user.slice", "cpu memory pids")
    tree.hand_on("/user.slice/user@1000.service", "cpu memory pids")
    tree.hand_on(APP, "cpu memory pids")
    return tree


def found(tree: Tree) -> Cgroups:
    cgroups = look_for_cgroups(tree)
    assert cgroups is not None
    return cgroups


def in_v2(bounds: Bounds) -> tuple[FakeV2, Cgroup, Path]:
    """A group on v2, and where it is."""
    tree = FakeV2("/", inside=False)
    group = found(tree).create(bounds)
    (path,) = tree.groups(TOP)
    return tree, group, path


@contextmanager
def real(bounds: Bounds) -> Generator[Cgroup]:
    """A group of this system; afterwards it is gone."""
    cgroups = look_for_cgroups(Tree())
    if cgroups is None or not cgroups.bound_memory:
        pytest.skip(_NEEDS)
    group = cgroups.create(bounds)
    try:
        yield group
    finally:
        group.remove()
    assert own_groups() == []


def own_groups() -> list[Path]:
    """Groups of this process, in all places where it may have made some."""
    mark = new_name().rsplit(".", 1)[0]
    places = [path for mount in find_mounts(Tree()) for path in (mount.own, *mount.own.parents)]
    return [group for path in places for group in Tree().groups(path) if group.name.startswith(mark)]


def run_in(group: Cgroup, *command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*group.entering(), *command], capture_output=True, text=True, check=False)


def test_a_group_is_made_beside_the_own_one_because_that_holds_processes():
    tree = delegated()
    before = {path: dict(files) for path, files in tree.files.items()}
    group = found(tree).create(Bounds(memory_bytes=64 << 20))
    assert len(tree.groups(tree.path(APP))) == 2
    group.remove()
    assert {path: dict(files) for path, files in tree.files.items()} == before, "looking changed something"


def test_controllers_are_handed_on_where_no_process_forbids_it():
    tree = FakeV2("/own", inside=False)
    tree.hand_on("/", "cpu memory pids")
    assert found(tree).bound_memory
    assert tree.read(tree.path("/own") / "cgroup.subtree_control").split() == ["cpu", "memory", "pids"]


def test_what_was_handed_on_in_vain_is_taken_back():
    tree = FakeV2("/own", inside=False)
    tree.hand_on("/", "cpu pids")  # not memory; and nothing can be made in the root either
    tree.can_enter = lambda path: False
    assert look_for_cgroups(tree) is None
    assert tree.read(tree.path("/own") / "cgroup.subtree_control") == ""


def test_without_a_writable_group_there_are_rlimits_alone_and_a_remedy():
    tree = FakeV2("/user.slice/session-1.scope", readonly=("/", "/user.slice", "/user.slice/session-1.scope"))
    assert look_for_cgroups(tree) is None
    assert "rlimits alone" in describe_limits(None)
    assert "Delegate=yes" in describe_limits(None)


def test_where_v2_hands_on_no_controller_it_still_freezes_and_doctor_says_what_is_missing():
    tree = FakeV2("/own", controllers="")
    cgroups = found(tree)
    assert not cgroups.bound_memory
    assert cgroups.create(Bounds(memory_bytes=1 << 20)).can_freeze
    assert "cgroup v2: freezer" in describe_limits(cgroups)
    assert "Delegate=yes" in describe_limits(cgroups)


def test_v2_is_told_every_bound_in_its_own_words():
    tree, _, path = in_v2(Bounds(memory_bytes=64 << 20, processes=9, cpus=1.5))
    files = tree.files[path]
    assert files["memory.max"] == str(64 << 20)
    assert files["memory.high"] == str(62 << 20), "the last 1/32 is throttled"
    assert files["memory.swap.max"] == "0"
    assert (files["pids.max"], files["cpu.max"]) == ("9", "150000 100000")


def test_v2_usage_is_read():
    tree, group, path = in_v2(Bounds())
    assert group.memory_bytes() == (4096, 8192)
    assert group.cpu_s() == 1.5
    tree.files[path]["memory.events"] = "oom 3\noom_kill 2\noom_group_kill 0\n"
    assert group.out_of_memory_kills() == 2


def test_on_v2_the_processes_of_a_divided_group_are_in_a_group_below_so_that_calls_can_have_theirs():
    tree = FakeV2("/", inside=False)
    group = found(tree).create(Bounds(memory_bytes=64 << 20), divided=True)
    (path,) = tree.groups(TOP)
    assert group.entering()[-2] == str(path / "home")
    tree.write(path / "home" / "cgroup.procs", "77")
    cell = group.cell(16 << 20)
    assert cell is not None
    (inner,) = [each for each in tree.groups(path) if each.name != "home"]
    assert tree.files[path]["memory.max"] == str(64 << 20)
    assert tree.files[inner]["memory.max"] == str(16 << 20)
    cell.take(78)
    tree.files[inner]["memory.events"] = "oom_kill 1\n"
    assert (cell.kills(), group.out_of_memory_kills()) == (1, 0)
    cell.remove()
    assert tree.groups(path) == [path / "home"]
    assert tree.members[path / "home"] == [77, 78], "what lives on is the sandbox's"


def test_a_cell_that_cannot_be_bounded_is_an_error_and_leaves_nothing():
    tree = FakeV2("/", inside=False)
    group = found(tree).create(Bounds(), divided=True)
    (path,) = tree.groups(TOP)
    tree.write(path / "cgroup.subtree_control", "-memory")
    with pytest.raises(SandboxError, match="No such file"):
        group.cell(16 << 20)
    assert tree.groups(path) == [path / "home"]


def test_v2_without_a_peak_counter_keeps_the_most_that_was_seen():
    tree, group, path = in_v2(Bounds())
    del tree.files[path]["memory.peak"]
    tree.files[path]["memory.current"] = "9000"
    assert group.memory_bytes() == (9000, 9000)
    tree.files[path]["memory.current"] = "100"
    assert group.memory_bytes() == (100, 9000)


def test_v2_freezes_and_thaws():
    tree, group, path = in_v2(Bounds())
    group.freeze()
    assert tree.files[path]["cgroup.freeze"] == "1"
    group.thaw()
    assert tree.files[path]["cgroup.freeze"] == "0"


def test_a_group_whose_files_are_gone_is_an_error_that_names_it():
    _, group, path = in_v2(Bounds())
    group.remove()
    with pytest.raises(SandboxError, match=path.name):
        group.memory_bytes()
    group.remove()


def test_a_bound_that_the_kernel_refuses_leaves_no_group():
    tree = FakeV2("/", inside=False)
    cgroups = found(tree)
    refuse = OSError(22, "Invalid argument")
    write = tree.write

    def refusing(path: Path, text: str) -> None:
        if path.name == "cpu.max":
            raise refuse
        write(path, text)

    tree.write = refusing
    with pytest.raises(SandboxError, match="Invalid argument"):
        cgroups.create(Bounds(cpus=0.0001))
    assert tree.groups(TOP) == []


def test_reclaim_ends_the_groups_of_dead_owners_and_no_others():
    tree = FakeV2("/", inside=False)
    mine = new_name()
    namespace, pid, ticks, token = mine.split(".")[1:]
    dead = f"sostenuto.{namespace}.{pid}.{int(ticks) + 1}.{token}"
    foreign = f"sostenuto.{int(namespace) + 1}.{pid}.{int(ticks) + 1}.{token}"
    for name in (mine, dead, foreign, "docker"):
        tree.make(TOP / name)
        tree.make(TOP / name / "inner")
    tree.make(TOP / "docker" / dead)
    for path in (TOP / dead, TOP / dead / "inner", TOP / "docker" / dead, TOP / foreign):
        tree.members[path].append(os.getpid())
    assert reclaim_cgroups(tree) == [dead]
    assert {path.name for path in tree.groups(TOP)} == {mine, foreign, "docker"}
    assert [path.name for path in tree.groups(TOP / "docker")] == ["inner"]


def test_mount_points_and_groups_are_found_behind_cgroup_namespaces_and_odd_names():
    class Odd(FakeV2):
        def mounts(self) -> str:
            return (
                "31 22 0:27 /docker/abc /sys/fs/cgroup/my\\040cpu ro - cgroup cgroup rw,cpu,cpuacct\n"
                "32 22 0:28 /../.. /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
                "33 22 0:29 / /sys/fs/cgroup/systemd ro - cgroup systemd rw,name=systemd\n"
            )

        def memberships(self) -> str:
            return "5:name=systemd:/x\n4:cpu,cpuacct:/docker/abc/inner\n3:memory:/\n0::/\n"

    mounts = {mount.top.name: mount for mount in find_mounts(Odd("/"))}
    assert mounts["my cpu"].own == TOP / "my cpu" / "inner"
    assert mounts["memory"].own == TOP / "memory"
    assert "systemd" not in mounts


def test_a_hog_is_ended_and_counted_and_what_started_it_lives_on():
    with real(Bounds(memory_bytes=64 << 20)) as group:
        ran = run_in(group, "/bin/sh", "-c", f"{sys.executable} -c '{HOG}'; echo code $?")
        assert ran.stdout == "code 137\n"
        assert group.out_of_memory_kills() == 1
        used_bytes, peak_bytes = group.memory_bytes() or (0, 0)
        assert used_bytes < 64 << 20
        assert peak_bytes > 60 << 20


def test_processes_that_are_small_alone_share_one_bound():
    half = "import sys; block = bytearray(40 << 20); sys.stdin.read()"
    with real(Bounds(memory_bytes=64 << 20)) as group:
        one, two = (
            subprocess.Popen([*group.entering(), sys.executable, "-c", half], stdin=subprocess.PIPE)
            for _ in range(2)
        )
        with one, two:
            deadline_s = time.monotonic() + 20
            while not group.out_of_memory_kills() and time.monotonic() < deadline_s:
                time.sleep(0.01)
        assert sorted([one.returncode, two.returncode]) == [-signal.SIGKILL, 0]


def test_no_more_processes_than_the_bound_can_be_started():
    with real(Bounds(processes=4)) as group:
        ran = run_in(
            group, "/bin/sh", "-c", "for i in 1 2 3 4 5 6; do sleep 60 >/dev/null 2>&1 & done; echo all"
        )
        assert "all" not in ran.stdout, "dash gives up when it cannot fork"


def test_a_busy_loop_gets_the_share_of_a_core_that_it_may_have():
    loop = "import time\nend = time.monotonic() + 0.6\nwhile time.monotonic() < end: pass"
    with real(Bounds(cpus=0.2)) as group:
        run_in(group, sys.executable, "-S", "-c", loop)
        assert 0 < (group.cpu_s() or 0) < 0.4


def test_what_forks_away_is_still_inside_and_ends_with_the_group():
    with real(Bounds(processes=64)) as group:
        run_in(group, "/bin/sh", "-c", "setsid sh -c 'sleep 61 & sleep 62 & wait' >/dev/null 2>&1 &")
        group.remove()
        assert running("sleep 61") + running("sleep 62") == []


def running(words: str) -> list[int]:
    found: list[int] = []
    for entry in filter(lambda each: each.name.isdigit(), Path("/proc").iterdir()):
        with suppress(FileNotFoundError, ProcessLookupError):
            if (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip() == words:
                found.append(int(entry.name))
    return found


def test_a_fork_bomb_ends_with_its_group():
    bomb = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    with real(Bounds(processes=40, cpus=0.5)) as group:
        process = subprocess.Popen([*group.entering(), sys.executable, "-S", "-c", bomb])
        time.sleep(0.2)
        group.remove()
        assert process.wait() == -signal.SIGKILL


def test_a_frozen_group_does_nothing_until_it_thaws():
    with real(Bounds()) as group:
        if not group.can_freeze:
            pytest.skip("needs a writable cgroup v2")
        process = subprocess.Popen(
            [*group.entering(), "/bin/sh", "-c", "while read -r word; do echo $word; done"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        with process as shell:
            assert shell.stdin is not None
            assert shell.stdout is not None
            shell.stdin.write("one\n")
            assert shell.stdout.readline() == "one\n"
            group.freeze()
            used_s = group.cpu_s()
            shell.stdin.write("two\n")
            assert group.cpu_s() == used_s
            group.thaw()
            assert shell.stdout.readline() == "two\n"


def test_moving_memory_out_needs_swap_and_says_so():
    swaps = Path("/proc/swaps").read_text().splitlines()[1:]
    with real(Bounds(memory_bytes=64 << 20)) as group:
        if swaps:
            group.move_out()
            group.let_back()
        else:
            with pytest.raises(Unsupported, match="swap"):
                group.move_out()


def test_a_killed_owner_s_group_is_reclaimed_with_what_runs_in_it():
    with real(Bounds()):
        pass
    program = (
        "import subprocess, sys\n"
        "from sostenuto.sandbox.cgroups import Bounds, find_cgroups\n"
        "group = find_cgroups().create(Bounds(processes=64))\n"
        "command = 'sleep 63 >/dev/null 2>&1 & sleep 63 >/dev/null 2>&1 & echo started'\n"
        "subprocess.run([*group.entering(), '/bin/sh', '-c', command])\n"
        "print(group.entering()[4], flush=True)\n"
        "sys.stdin.read()\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "started\n"
        path = Path(owner.stdout.readline().strip())
        assert path.name not in reclaim_cgroups(Tree()), "its owner lives"
        owner.kill()
    assert (path / "cgroup.procs").read_text() != ""
    assert path.name in reclaim_cgroups(Tree())
    assert not path.exists()
    assert running("sleep 63") == []
