"""Checkpoints that are not as they were written, places that cannot be written, and who else writes there."""

import resource
import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sostenuto.errors import ConfigError, TrainerError
from sostenuto.trainer.algorithms import SFT
from sostenuto.trainer.checkpoint import restore_checkpoint, save_checkpoint
from sostenuto.trainer.learner import Learner
from sostenuto.trainer.retention import JOB_NOTES, check_checkpoint, checkpoints, held
from sostenuto.types import Version
from trainer_world import learner, random_samples, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def saved(subject: Learner, root: Path, number: int, source: Path) -> Path:
    subject.fit(random_samples(3, seed=number), SFT())
    return save_checkpoint(subject, root, Version(0, number), source=source, notes={JOB_NOTES: b"{}"})


def weights_of(subject: Learner) -> list[bytes]:
    return [bytes(p.detach().numpy().tobytes()) for p in subject.policy.module.parameters()]


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(bytes(content))


def test_one_flipped_byte_in_any_file_is_refused_and_the_older_checkpoint_is_named(
    tmp_path: Path, folder: Path
):
    subject = learner(folder)
    good, bad = (saved(subject, tmp_path, number, folder) for number in (1, 2))
    files = sorted(path for path in bad.rglob("*") if path.name != "checksums.json")
    assert {"model.safetensors", "trainer.safetensors", "trainer.json", JOB_NOTES} < {f.name for f in files}
    before = weights_of(subject)
    for file in files:
        place = file.stat().st_size // 2
        flip(file, place)
        with pytest.raises(ConfigError, match=rf"{file.name} is not what was written.*go on from {good}"):
            restore_checkpoint(subject, bad)
        flip(file, place)
    assert weights_of(subject) == before
    restore_checkpoint(subject, bad)


def test_what_is_cut_off_missing_or_without_checksums_is_refused(tmp_path: Path, folder: Path):
    path = saved(learner(folder), tmp_path, 1, folder)
    with (path / "trainer.json").open("a") as file:
        file.write(" ")
    with pytest.raises(ConfigError, match=r"trainer\.json has \d+ bytes.*no other one: restore the file"):
        check_checkpoint(path)
    (path / "trainer.json").unlink()
    with pytest.raises(ConfigError, match=r"trainer\.json is missing"):
        check_checkpoint(path)
    for content in ("", "[]", '{"model.safetensors": 3}'):
        (path / "checksums.json").write_text(content)
        with pytest.raises(ConfigError, match=r"checksums\.json cannot be read"):
            check_checkpoint(path)


@contextmanager
def files_of_at_most(nbytes: int) -> Generator[None]:
    """As on a full disk: what goes beyond is refused by the system."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


@pytest.mark.parametrize("name", ["model.safetensors", "trainer.safetensors", "tokenizer.json"])
def test_a_disk_that_is_full_leaves_what_was_good_and_no_part(tmp_path: Path, folder: Path, name: str):
    subject = learner(folder, keep_checkpoints=1)
    path = saved(subject, tmp_path, 1, folder)
    with files_of_at_most((path / name).stat().st_size - 1), pytest.raises(TrainerError, match="checkpoint"):
        saved(subject, tmp_path, 2, folder)
    assert [kept for _, kept in checkpoints(tmp_path)] == [path]
    assert [left.name for left in tmp_path.iterdir()] == [path.name]
    check_checkpoint(path)


def test_a_job_that_begins_from_a_checkpoint_takes_over_no_notes_of_it(tmp_path: Path, folder: Path):
    path = saved(learner(folder), tmp_path / "one", 1, folder)
    other = save_checkpoint(learner(path), tmp_path / "two", Version(0, 1), source=path)
    assert (path / JOB_NOTES).is_file()
    assert not (other / JOB_NOTES).exists()
    check_checkpoint(other)


def test_two_jobs_cannot_write_to_one_folder_of_checkpoints(tmp_path: Path):
    with (
        held(tmp_path / "checkpoints"),
        pytest.raises(ConfigError, match="another job writes there"),
        held(tmp_path / "checkpoints"),
    ):
        pass
    with held(tmp_path / "checkpoints"):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="choose another run directory"), held(tmp_path / "file" / "x"):
        pass
