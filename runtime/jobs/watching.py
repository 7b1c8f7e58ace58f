"""What a step's programs, and those behind them, say of how sampling and learning fit together."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from sostenuto.records import Trajectory
from sostenuto.runtime.jobs.events import FlowSeen
from sostenuto.trainer.groups import ReadyGroup
from sostenuto.trainer.samplers import Standing
from sostenuto.types import StopReason

_CUT_SHORT = (StopReason.TURN_TOKENS, StopReason.TOTAL_TOKENS, StopReason.CONTEXT_FULL)


def flow_seen(groups: Sequence[ReadyGroup], standing: Standing, success: float) -> FlowSeen:
    """Of a batch with its skipped groups, and of what was left behind when it was taken."""
    members = [member for group in groups for member in group.members]
    rewards = [member.reward for member in members if member.reward is not None]
    buffered = [standing.staleness(group.oldest_version) for group in standing.ready]
    in_flight = [standing.staleness(group.started) for group in standing.running]
    versions = [len({v.version for v in member.version_spans}) for member in members]
    stops = Counter(str(member.stop_reason) for member in members)
    return FlowSeen(
        success=_mean([float(reward >= success - 1e-9) for reward in rewards]),
        spread=_mean([_spread(group.members) for group in groups]),
        zero_spread=_mean([float(not group.has_signal) for group in groups]),
        buffered=len(standing.ready),
        buffered_staleness=max(buffered, default=0),
        in_flight=len(standing.running),
        in_flight_staleness=max(in_flight, default=0),
        versions_mean=_mean([float(count) for count in versions]),
        versions_max=max(versions, default=0),
        cut_short=sum(stops[reason] for reason in _CUT_SHORT) / max(1, len(members)),
        stops=dict(stops),
    )


def _spread(members: Sequence[Trajectory]) -> float:
    rewards = [member.reward for member in members if member.reward is not None]
    return float(np.std(rewards)) if rewards else 0.0


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
