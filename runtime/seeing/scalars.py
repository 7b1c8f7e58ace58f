"""The numbers of an event, by the names under which trackers show them."""

import math
from dataclasses import fields

from sostenuto.runtime.jobs.events import Alarm, Evaluated, FlowSeen, JobEvent, Published, StepTrained
from sostenuto.trainer.reports import StepReport
from sostenuto.types import Usage

_OF_REPORT = {
    "learn/loss": "loss",
    "learn/grad_norm": "grad_norm",
    "learn/rate": "learning_rate",
    "learn/entropy": "entropy",
    "learn/clip_share": "clip_share",
    "learn/truncated_share": "truncated_share",
    "learn/rejected_share": "rejected_share",
    "learn/kl": "kl",
    "learn/teacher_kl": "teacher_kl",
    "critic/value_loss": "value_loss",
    "critic/explained_variance": "explained_variance",
    "critic/value_clip_share": "value_clip_share",
    "learn/draft_loss": "draft_loss",
    "learn/tokens": "tokens",
    "learn/masked_tokens": "masked_tokens",
    "mismatch/mean_abs_dlogp": "mean_abs_dlogp",
    "mismatch/max_abs_dlogp": "max_abs_dlogp",
    "mismatch/k3": "mismatch_k3",
    "mismatch/engine": "engine_difference",
    "mismatch/update": "update_difference",
}


def scalars_of(event: JobEvent) -> tuple[int, dict[str, float]] | None:
    """Step and finite numbers; None for an event without any."""
    match event:
        case StepTrained():
            told = _of_step(event)
        case Evaluated():
            told = _of_evaluation(event)
        case Published():
            told = {
                "reward/mean": event.reward,
                "staleness/mean": event.staleness_mean,
                "staleness/max": event.staleness_max,
                "time/pause_s": event.pause_s,
            }
        case Alarm():
            told = {f"alarm/{event.name}": event.value}
        case _:
            return None
    return event.step, {name: float(v) for name, v in told.items() if v is not None and math.isfinite(v)}


def _of_step(event: StepTrained) -> dict[str, float | None]:
    return {
        "reward/mean": event.reward,
        **{f"reward/{name}": reward for name, reward in event.environments.items()},
        "reward/skipped_groups": event.skipped,
        "staleness/mean": event.staleness_mean,
        "staleness/max": event.staleness_max,
        "time/wait_s": event.wait_s,
        "time/learn_s": event.learn_s,
        "time/publish_s": event.publish_s,
        "time/pause_s": event.pause_s,
        **_of_report(event.report),
        **_of_usage(event.usage),
        **(_of_flow(event.flow) if event.flow else {}),
    }


def _of_report(report: StepReport) -> dict[str, float | None]:
    return {name: getattr(report, field) for name, field in _OF_REPORT.items()} | {
        "learn/refused": float(bool(report.refused))
    }


def _of_usage(usage: Usage) -> dict[str, float | None]:
    """Summed over the batch's programs: where their time and tokens went."""
    return {f"programs/{field.name}": float(getattr(usage, field.name)) for field in fields(usage)}


def _of_flow(flow: FlowSeen) -> dict[str, float | None]:
    return {
        "reward/success": flow.success,
        "reward/spread": flow.spread,
        "reward/zero_spread": flow.zero_spread,
        "staleness/buffered_groups": flow.buffered,
        "staleness/buffered_max": flow.buffered_staleness,
        "staleness/in_flight_groups": flow.in_flight,
        "staleness/in_flight_max": flow.in_flight_staleness,
        "versions/mean": flow.versions_mean,
        "versions/max": flow.versions_max,
        "stop/cut_short": flow.cut_short,
        **{f"stop/{reason}": float(count) for reason, count in flow.stops.items()},
    }


def _of_evaluation(event: Evaluated) -> dict[str, float | None]:
    how = "greedy" if event.temperature == 0 else "sampled"
    held_out = f"held_out/{event.environment}" if event.environment else "held_out"
    return {
        f"{held_out}/{how}": event.reward,
        f"{held_out}/{how}_low": event.low,
        f"{held_out}/{how}_high": event.high,
        f"{held_out}/{how}_turns": event.turns,
        f"{held_out}/failed": event.failed,
        **{f"{held_out}/{how}_pass_at_{k}": share for k, share in event.pass_at.items()},
    }
