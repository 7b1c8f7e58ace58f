"""What is seen of training: the flow behind a step, scalars in trackers, alarms."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from sostenuto.errors import ConfigError, Unsupported
from sostenuto.runtime.jobs.alarms import Alarms, AlarmSettings
from sostenuto.runtime.jobs.events import Alarm, Evaluated, FlowSeen, Published, Stalled, StepTrained
from sostenuto.runtime.jobs.watching import flow_seen
from sostenuto.runtime.seeing.scalars import scalars_of
from sostenuto.runtime.seeing.trackers import MLflow, Wandb, trackers
from sostenuto.trainer.buffer import Buffer
from sostenuto.trainer.reports import StepReport
from sostenuto.types import GroupId, ProgramId, StopReason, Usage, Version
from trainer_world import sampled, trajectory

REPORT = StepReport(
    step=1, loss=0.5, grad_norm=1.0, learning_rate=1e-4, entropy=2.0, mean_abs_dlogp=0.01,
    max_abs_dlogp=0.2, mismatch_k3=1e-4, engine_difference=None, update_difference=None, clip_share=0.01,
    truncated_share=0.0, rejected_share=0.0, kl=None, samples=8, micro_batches=1, tokens=100,
    masked_tokens=50, elapsed_s=1.0, cpu_s=1.0,
)  # fmt: skip
FLOW = FlowSeen(
    success=0.5, spread=0.4, zero_spread=0.25, buffered=3, buffered_staleness=1, in_flight=2,
    in_flight_staleness=2, versions_mean=1.5, versions_max=2, cut_short=0.125, stops={"answered": 7},
)  # fmt: skip


def step(number: int = 1, *, flow: FlowSeen | None = FLOW, **report: Any) -> StepTrained:  # noqa: ANN401
    return StepTrained(
        step=number, steps=100, version=Version(0, number), reward=0.5, groups=4, skipped=1,
        staleness_mean=0.5, staleness_max=1, report=replace(REPORT, **report), usage=Usage(tool_s=3.0),
        wait_s=1.0, learn_s=2.0, publish_s=0.5, pause_s=0.1, flow=flow,
    )  # fmt: skip


def test_the_flow_behind_a_step_is_counted_from_its_groups_and_what_they_leave_behind():
    buffer = Buffer(zero_spread="keep")
    for name, rewards, versions in (
        ("g", (1.0, 0.0), (3, 4)),
        ("h", (1.0, 1.0), (4, 4)),
        ("i", (0.0, 0.5), (2, 4)),
    ):
        members = [ProgramId(f"{name}{index}") for index in range(2)]
        buffer.open(GroupId(name), members, Version(0, versions[0]))
        spans = tuple(sampled([5], version=Version(0, version)) for version in versions)
        for member, reward in zip(members, rewards, strict=True):
            record = trajectory(member, reward, group=name, sequences=((sampled([1]).as_context(), *spans),))
            cut = StopReason.TURN_TOKENS if member == "g1" else StopReason.ANSWERED
            buffer.add(replace(record, stop_reason=cut))
    buffer.open(GroupId("late"), [ProgramId("x"), ProgramId("y")], Version(0, 4))
    taken = buffer.take(2, Version(0, 5), 4)
    assert [group.group_id for group in taken.batch] == ["i", "g"]
    seen = flow_seen(taken.batch, buffer.standing(Version(0, 5), 4, 2, 2), success=0.5)
    assert seen == FlowSeen(
        success=0.5, spread=(0.5 + 0.25) / 2, zero_spread=0.0, buffered=1, buffered_staleness=1,
        in_flight=1, in_flight_staleness=1, versions_mean=2.0, versions_max=2, cut_short=0.25,
        stops={"answered": 3, "turn_tokens": 1},
    )  # fmt: skip


def test_scalars_have_all_that_is_known_and_nothing_that_is_not_finite():
    told = scalars_of(step(3, loss=math.nan))
    assert told is not None
    number, scalars = told
    assert number == 3
    assert "learn/loss" not in scalars
    assert "mismatch/engine" not in scalars
    assert {
        "reward/success": 0.5, "staleness/in_flight_max": 2.0, "stop/answered": 7.0, "versions/max": 2.0,
        "programs/tool_s": 3.0, "mismatch/k3": 1e-4, "learn/refused": 0.0,
    }.items() <= scalars.items()  # fmt: skip
    published = Published(1, Version(0, 1), 0, None, None, None, 0.1)
    assert scalars_of(published) == (1, {"time/pause_s": 0.1})
    assert scalars_of(Stalled(30.0, ())) is None


EVALUATED = Evaluated(
    2,
    Version(0, 2),
    1.0,
    8,
    0,
    0.5,
    3.0,
    1.0,
    tasks=4,
    low=0.3,
    high=0.7,
    interval="wilson",
    pass_at={2: 0.75},
)


def test_tensorboard_has_the_scalars_in_its_file(tmp_path: Path):
    with trackers(("tensorboard", "tensorboard"), tmp_path) as say:
        assert not (tmp_path / "tensorboard").exists()
        say(Stalled(30.0, ()))
        say(step())
        say(EVALUATED)
    (file,) = (tmp_path / "tensorboard").iterdir()
    content = file.read_bytes()
    for name in (
        b"reward/success",
        b"staleness/buffered_max",
        b"held_out/sampled_pass_at_2",
        b"held_out/sampled_low",
    ):
        assert content.count(name) == 1


@dataclass
class FakeWandb:
    """The part of Weights & Biases that is used; the library itself wants to start a service."""

    rows: list[Mapping[str, float]] = field(default_factory=list[Mapping[str, float]])
    finished: int = 0

    def init(self, *, dir: str, name: str) -> "FakeWandb":  # noqa: A002 - its name there
        assert Path(dir).name == name
        return self

    def define_metric(self, name: str, *, step_metric: str) -> None:
        assert (name, step_metric) == ("*", "step")

    def log(self, row: Mapping[str, float]) -> None:
        self.rows.append(row)

    def finish(self) -> None:
        self.finished += 1


def test_wandb_gets_a_row_a_step_with_the_step_in_it(tmp_path: Path):
    library = FakeWandb()
    tracker = Wandb(library, tmp_path)
    tracker.log({"reward/mean": 0.5}, 7)
    tracker.close()
    assert (library.rows, library.finished) == ([{"step": 7, "reward/mean": 0.5}], 1)


@dataclass
class FakeMLflow:
    """The part of MLflow that is used."""

    logged: list[tuple[dict[str, float], int, str]] = field(
        default_factory=list[tuple[dict[str, float], int, str]]
    )
    ended: int = 0

    def start_run(self, *, run_name: str) -> SimpleNamespace:
        assert run_name
        return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

    def log_metrics(self, metrics: dict[str, float], *, step: int, run_id: str) -> None:
        self.logged.append((metrics, step, run_id))

    def end_run(self) -> None:
        self.ended += 1


def test_mlflow_gets_metrics_of_its_run(tmp_path: Path):
    library = FakeMLflow()
    tracker = MLflow(library, tmp_path)
    tracker.log({"reward/mean": 0.5}, 7)
    tracker.close()
    assert (library.logged, library.ended) == ([({"reward/mean": 0.5}, 7, "r1")], 1)


def test_mlflow_writes_real_files_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    with trackers(("mlflow",), tmp_path) as say:
        say(step())
    (file,) = tmp_path.glob("mlruns/*/*/metrics/reward/success")
    assert file.read_text().split()[1:] == ["0.5", "1"]


def test_wandb_writes_real_files_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with trackers(("wandb",), tmp_path) as say:
        say(step())
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert b"reward/success" in file.read_bytes()


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_that_is_not_installed_is_an_error_with_a_remedy(
    name: Literal["wandb", "mlflow"], tmp_path: Path
):
    if find_spec(name) is not None:
        pytest.skip("it is installed here")
    with pytest.raises(Unsupported, match=rf"trackers: {name} needs {name}: pip install"):
        trackers((name,), tmp_path).__enter__()


def rings(alarms: Alarms, *steps: StepTrained) -> list[tuple[int, str]]:
    return [(alarm.step, alarm.name) for told in steps for alarm in alarms.look(told)]


@pytest.mark.parametrize(
    ("report", "name"),
    [
        ({"refused": "the gradient is not finite"}, "refused_step"),
        ({"loss": math.nan}, "loss_not_finite"),
        ({"max_abs_dlogp": math.log(11)}, "ratio"),
        ({"max_abs_dlogp": math.inf}, "ratio"),
        ({"mismatch_k3": 0.2}, "mismatch_k3"),
        ({"mismatch_k3": math.nan}, "mismatch_k3"),
    ],
)
def test_one_bad_step_rings_at_once_and_a_good_one_does_not(report: dict[str, Any], name: str):
    assert rings(Alarms(AlarmSettings()), step(1), step(2, **report), step(3)) == [(2, name)]


@pytest.mark.parametrize(
    ("flow", "report", "name"),
    [
        ({"zero_spread": 0.9}, {}, "zero_spread"),
        ({"cut_short": 0.6}, {}, "cut_short"),
        ({}, {"truncated_share": 0.3, "rejected_share": 0.3}, "left_out"),
    ],
)
def test_a_share_rings_when_it_has_lasted_and_again_after_a_while(
    flow: dict[str, Any], report: dict[str, Any], name: str
):
    alarms = Alarms(AlarmSettings(steps=3))
    steps = [step(number, flow=replace(FLOW, **flow), **report) for number in range(1, 15)]
    assert rings(alarms, *steps) == [(3, name), (13, name)]
    assert rings(alarms, *(step(number) for number in range(15, 20))) == []
    assert rings(alarms, *(replace(told, step=told.step + 20) for told in steps[:4])) == [(23, name)]


def test_an_alarm_names_number_threshold_and_remedy():
    (alarm,) = Alarms(AlarmSettings()).look(step(4, mismatch_k3=0.25))
    assert isinstance(alarm, Alarm)
    assert str(alarm).startswith("mismatch_k3 is 0.25 at step 4, above 0.1: engine and trainer disagree")
    assert scalars_of(alarm) == (4, {"alarm/mismatch_k3": 0.25})
    with pytest.raises(ConfigError, match="steps is 0"):
        AlarmSettings(steps=0)
    with pytest.raises(ConfigError, match="ratio is 1"):
        AlarmSettings(ratio=1.0)
