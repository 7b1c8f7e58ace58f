"""Which transport is chosen, by which numbers."""

from dataclasses import replace
from pathlib import Path
from typing import TypeVar, cast

import pytest

from sostenuto.errors import ConfigError, TrainerError
from sostenuto.runtime.config import RuntimeConfig
from sostenuto.runtime.jobs.receiving import with_receivers
from sostenuto.trainer.publication.auto import resolved
from sostenuto.trainer.publication.bandwidths import measure
from sostenuto.trainer.publication.costs import Bandwidths, Fleet, estimates
from sostenuto.trainer.ranks import Ranks
from sostenuto.trainer.settings import LearnerSettings, PublicationSettings, Receivers

T = TypeVar("T")
SPEED = Bandwidths(copy=10e9, checksum=5e9, memory=4e9, write=1e9, read=5e9, network=3e9)
FLEET = Fleet(
    nbytes=10**9, ranks=1, engines=2, processors=2, is_local=True, has_room=True, reads_files=False,
    quantized=False, changed=0.02, deltas=8,
)  # fmt: skip


def chosen(fleet: Fleet, speed: Bandwidths = SPEED) -> str:
    return estimates(fleet, speed)[0].transport


def test_the_fastest_is_chosen():
    assert chosen(FLEET) == "shared_memory"
    # Without memory: one send for both, or each its own; then a shared folder of little bandwidth.
    elsewhere = replace(FLEET, is_local=False)
    assert chosen(replace(FLEET, has_room=False), replace(SPEED, write=None, read=None)) == "point_to_point"
    assert chosen(replace(elsewhere, engines=8)) == "disk_delta"
    assert chosen(replace(elsewhere, engines=8, changed=1.0), replace(SPEED, write=5e8)) == "broadcast"
    assert chosen(replace(elsewhere, engines=2, ranks=4, changed=1.0)) == "point_to_point"
    slow = replace(SPEED, network=1e7)
    assert chosen(replace(elsewhere, changed=1.0), slow) == "disk"


def test_an_estimate_is_the_sum_of_its_parts_by_the_bandwidths():
    found = {one.transport: one for one in estimates(FLEET, SPEED)}
    shared = found["shared_memory"]
    assert (shared.conversion_s, shared.transfer_s, shared.apply_s) == (0.2, 0.35, 0.2)
    disk = found["disk"]
    assert (disk.conversion_s, disk.transfer_s, disk.apply_s) == pytest.approx((0.2, 1.2, 0.3))
    # Two turns of a tree for two engines; a conversion copies, too.
    sent = found["broadcast"]
    assert (sent.conversion_s, sent.transfer_s) == pytest.approx((0.3, 2 / 3))
    assert found["point_to_point"].transfer_s == pytest.approx(1 / 3)
    assert [one.total_s for one in found.values()] == sorted(one.total_s for one in found.values())
    assert str(shared) == "shared_memory 0.750 s (0.200 + 0.350 + 0.200)"


def test_more_engines_than_processors_take_turns():
    four = estimates(replace(FLEET, engines=4), SPEED)
    two = {one.transport: one for one in estimates(FLEET, SPEED)}
    for one in four:
        assert one.apply_s == pytest.approx(2 * two[one.transport].apply_s)


def test_a_quantized_engine_copies_out_of_shared_memory():
    plain, quantized = (estimates(replace(FLEET, quantized=kind), SPEED)[0] for kind in (False, True))
    assert quantized.apply_s == pytest.approx(plain.apply_s + 0.1)


def test_an_engine_that_reads_files_leaves_no_network():
    assert {one.transport for one in estimates(replace(FLEET, reads_files=True), SPEED)} == {
        "shared_memory", "disk", "disk_delta",
    }  # fmt: skip
    assert estimates(replace(FLEET, reads_files=True, has_room=False), replace(SPEED, write=None)) == []


def test_auto_says_what_it_has_chosen_with_its_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    def measured(directory: Path | None, host: str) -> Bandwidths:
        assert (directory, host) == (tmp_path, "127.0.0.1")
        return SPEED

    settings = PublicationSettings(transport="auto", directory=str(tmp_path), engines=Receivers(local=False))
    found = resolved(settings, 10**9, measure=measured)
    assert found == settings.model_copy(update={"transport": "broadcast"})
    assert "broadcast is chosen for 1000.0 MB, 1 rank(s), 1 engine(s)" in caplog.text
    assert "broadcast 0.833 s (0.300 + 0.333 + 0.200)" in caplog.text
    assert "checksum 5.00, shared memory 4.00, disk write 1.00" in caplog.text
    assert resolved(found, 1) is found


class Second(Ranks):
    """Of two ranks, the one that measures nothing."""

    def gather(self, value: T) -> list[T]:
        assert value is None
        return cast("list[T]", ["disk", None])


def test_all_ranks_take_what_the_first_has_chosen():
    settings = PublicationSettings(transport="auto")
    assert resolved(settings, 10**9, Second(1, 2)).transport == "disk"


def test_bandwidths_are_measured_here(tmp_path: Path):
    found = measure(tmp_path / "new", "127.0.0.1")
    assert all(
        rate is not None and rate > 0 for rate in (found.copy, found.checksum, found.write, found.read)
    )
    assert found.memory > 0
    assert found.network > 0
    assert measure(None, "127.0.0.1").write is None
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(TrainerError, match=r"learner.publication.directory: .*; name a folder"):
        measure(file, "127.0.0.1")


def test_without_any_transport_that_is_said():
    settings = PublicationSettings(transport="auto", engines=Receivers(local=False, files_alone=True))
    with pytest.raises(ConfigError, match=r"no transport is possible.*name one that trainer and engines"):
        resolved(settings, 10**9, measure=lambda _directory, _host: replace(SPEED, write=None, read=None))


def test_a_job_tells_the_trainer_of_its_engines():
    several = RuntimeConfig.model_validate({"engine": {"replicas": 3, "quantization": "fp8"}})
    told = with_receivers(LearnerSettings(), several).publication.engines
    assert told == Receivers(count=3, quantized=True)
    mixed = RuntimeConfig.model_validate({"engines": [{}, {"kind": "vllm", "url": "http://127.0.0.1:1"}]})
    assert with_receivers(LearnerSettings(), mixed).publication.engines == Receivers(
        count=2, files_alone=True
    )
    own = LearnerSettings.model_validate({"publication": {"engines": {"count": 9}}})
    assert with_receivers(own, several) is own
    sent = LearnerSettings.model_validate({"publication": {"transport": "broadcast"}})
    with pytest.raises(ConfigError, match="'broadcast' is for embedded engines, and one of kind 'vllm'"):
        with_receivers(sent, mixed)
