"""Which backend is chosen, and what is said where none works."""

from collections.abc import Callable
from pathlib import Path

import pytest

from sandboxes import entries, sandbox_root
from sostenuto.errors import ConfigError, Unsupported
from sostenuto.sandbox import bubblewrap, landlock
from sostenuto.sandbox.bubblewrap import BubblewrapBackend, find_bwrap
from sostenuto.sandbox.choose import choose_backend, probe_backends
from sostenuto.sandbox.docker.backend import DockerSettings
from sostenuto.sandbox.landlock import LandlockBackend
from sostenuto.sandbox.plain import ProcessBackend
from sostenuto.sandbox.protocol import Blueprint

_VERSION = "[ $1 = --version ] && echo bubblewrap 0.9.0 && exit"
REFUSING = f"#!/bin/sh\n{_VERSION}\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n"
HANGING = f"#!/bin/sh\n{_VERSION}\nexec sleep 1000\n"
Install = Callable[[str], object]


@pytest.fixture
def root():
    with sandbox_root() as folder:
        yield folder


@pytest.fixture
def bwrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a program in bwrap's place on PATH and hides the packaged one."""

    def install(script: str) -> Path:
        program = tmp_path / "bwrap"
        program.write_text(script)
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        monkeypatch.setattr(bubblewrap, "_bundled", lambda: None)
        find_bwrap.cache_clear()
        return program

    yield install
    find_bwrap.cache_clear()


def nowhere(root: Path) -> DockerSettings:
    """No daemon, whatever this machine has."""
    return DockerSettings(socket=str(root / "no-daemon"))


def without_landlock(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(landlock.landlockpy, "abi_version", lambda: 0)


async def test_bubblewrap_is_the_first_choice(root: Path):
    backend = await choose_backend(root)
    assert isinstance(backend, BubblewrapBackend)
    assert entries(root) == []


async def test_probing_names_the_isolation_of_each_backend(root: Path):
    first, second, third = await probe_backends(root, docker=nowhere(root))
    assert [(probe.backend, probe.works) for probe in (first, second, third)] == [
        ("bubblewrap", True),
        ("landlock", True),
        ("docker", False),
    ]
    assert "start the daemon" in third.remedy
    assert "namespaces" in first.isolation
    assert "seccomp" in first.isolation
    assert "other processes can be seen" in second.isolation
    assert first.details["python3"].startswith("/")


async def test_landlock_takes_over_where_namespaces_are_refused(root: Path, bwrap: Install):
    bwrap(REFUSING)
    assert isinstance(await choose_backend(root), LandlockBackend)
    probe = (await probe_backends(root))[0]
    assert not probe.works
    assert "setting up uid map: Permission denied" in probe.details["error"]
    assert "/etc/apparmor.d/bwrap" in probe.remedy
    assert "kernel.apparmor_restrict_unprivileged_userns=0" in probe.remedy
    assert entries(root) == []


async def test_without_any_backend_the_error_has_every_remedy(
    root: Path, bwrap: Install, monkeypatch: pytest.MonkeyPatch
):
    bwrap(REFUSING)
    without_landlock(monkeypatch)
    with pytest.raises(
        Unsupported, match=r"apparmor(.|\n)*Landlock ABI 0, needed 3(.|\n)*6\.2 or newer(.|\n)*no Docker"
    ):
        await choose_backend(root, docker=nowhere(root))
    assert isinstance(await choose_backend(root, unsafe=True), ProcessBackend)


async def test_a_bwrap_that_hangs_is_given_up(root: Path, bwrap: Install, monkeypatch: pytest.MonkeyPatch):
    bwrap(HANGING)
    monkeypatch.setattr("sostenuto.sandbox.trial.TRIAL_S", 2.0)
    assert isinstance(await choose_backend(root), LandlockBackend)
    assert entries(root) == []


async def test_an_old_bwrap_on_the_path_gives_way_to_the_packaged_one(
    bwrap: Install, monkeypatch: pytest.MonkeyPatch
):
    found = bubblewrap._bundled()  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    bwrap("#!/bin/sh\necho bubblewrap 0.4.1\n")
    with pytest.raises(Unsupported, match=r"bwrap 0\.8 or newer"):
        find_bwrap()
    monkeypatch.setattr(bubblewrap, "_bundled", lambda: found)
    assert find_bwrap() == found


async def test_nothing_runs_unsandboxed_unless_it_was_asked_for(root: Path):
    with pytest.raises(Unsupported, match="unsafe=True"):
        ProcessBackend(root, unsafe=False)
    with pytest.raises(ConfigError, match="unsafe=True"):
        await choose_backend(root, preferred="process")
    with pytest.raises(ConfigError, match="contradicts"):
        await choose_backend(root, preferred="landlock", unsafe=True)
    assert (await choose_backend(root, unsafe=True)).name == "process"


async def test_an_unknown_backend_is_an_error_that_names_the_nearest(root: Path):
    with pytest.raises(ConfigError, match="did you mean 'landlock'"):
        await choose_backend(root, preferred="landlok")
    assert (await choose_backend(root, preferred="landlock")).name == "landlock"


async def test_a_root_that_cannot_be_a_folder_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Unsupported, match="file/sub"):
        await choose_backend(tmp_path / "file" / "sub")


async def test_without_libseccomp_the_remedy_is_named(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sostenuto.sandbox.seccomp.program", _no_library)
    with pytest.raises(Unsupported, match="apt install libseccomp2"):
        await choose_backend(root, docker=nowhere(root))
    with pytest.raises(Unsupported):
        await BubblewrapBackend(root).start("x", Blueprint())
    assert entries(root) == []


def _no_library(**_: bool) -> bytes:
    raise Unsupported("no seccomp filters; install libseccomp (Debian and Ubuntu: apt install libseccomp2)")
