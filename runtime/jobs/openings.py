"""Which task comes next, and what each member of its group is started with.

- A draw is known by its ordinal. Its group has that in its id; one that is started anew has `.2` behind it.
- What was opened and has not come to its end is drawn again by who goes on from `state_dict`, but for
  groups that were finished and are there.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import JsonValue

from sostenuto.envs.task import Draw
from sostenuto.errors import ConfigError
from sostenuto.records import Trajectory
from sostenuto.runtime.jobs.plan import Plan, PlanPart
from sostenuto.runtime.jobs.seeds import seed_of
from sostenuto.runtime.program import ProgramSpec
from sostenuto.types import GroupId, ProgramId, Purpose, Version

_MOST_STARTS = 2
"""Of one draw: the group that was given up while it ran is started anew once."""
_LOOKED_AT = 1000


@dataclass(frozen=True, slots=True)
class Opening:
    """A group that is about to start."""

    group_id: GroupId
    specs: tuple[ProgramSpec, ...]
    start: "Start"


@dataclass(frozen=True, slots=True)
class Start:
    """Of a draw."""

    ordinal: int
    number: int = 1
    """The second one is of a group that was given up before."""


@dataclass(frozen=True, slots=True)
class KeptGroup:
    """A group that had finished when its job was cut off."""

    group_id: GroupId
    start: Start
    programs: tuple[ProgramId, ...]
    """Of its members that could be learnt from."""
    members: tuple[Trajectory, ...]
    fault: str = ""
    """Why none of them can, after all; empty: they may."""


class Openings:
    """Of one job."""

    def __init__(
        self, plan: Plan, is_quarantined: Callable[[str], bool], trainable_until: Callable[[], Version]
    ) -> None:
        self._plan = plan
        self._is_quarantined = is_quarantined
        self._trainable_until = trainable_until
        self._next = 0
        self._again: deque[Start] = deque()
        self._starts: dict[GroupId, Start] = {}
        self._there = set[int]()
        """Ordinals that have a group from before the run died; those ahead are passed over."""

    @property
    def draws(self) -> int:
        """How many ordinals were looked at."""
        return self._next

    def next(self) -> Opening | None:
        """The next group; None beyond the last task.  ConfigError when every task is quarantined."""
        for _ in range(_LOOKED_AT):
            start = self._following()
            try:
                draw = self._plan.source.at(start.ordinal)
            except IndexError:
                return None
            self._next = max(self._next, start.ordinal + 1)
            if not self._is_quarantined(draw.task_id):
                return self._open(draw, start)
        raise ConfigError(f"tasks: {_LOOKED_AT} in a row are quarantined; look at why their programs fail")

    def again(self, group_id: GroupId) -> bool:
        """Start the group's task anew, under another id; False when that was done before."""
        start = self._starts[group_id]
        if start.number >= _MOST_STARTS:
            return False
        self._again.append(replace(start, number=start.number + 1))
        return True

    def task_of(self, group_id: GroupId) -> dict[str, JsonValue]:
        """Of a group that has not come to its end."""
        return self._plan.source.at(self._starts[group_id].ordinal).payload()

    def part_of(self, group_id: GroupId) -> PlanPart:
        """The environment of a group that has not come to its end."""
        return self._plan.parts[self._plan.source.at(self._starts[group_id].ordinal).part]

    @property
    def waits(self) -> bool:
        """Whether something is to be started anew."""
        return bool(self._again)

    def anew(self, spec: ProgramSpec, times: int) -> ProgramSpec:
        """The same member once more, with an id and noise of its own."""
        program_id = ProgramId(f"{spec.id.partition('+')[0]}+{times}")
        return replace(
            spec,
            id=program_id,
            seed=seed_of(self._plan.seed, program_id),
            trainable_until=self._trainable_until(),
        )

    def state_dict(self, unfinished: Collection[GroupId]) -> dict[str, JsonValue]:
        """`unfinished`: groups that were opened and have not come to their end."""
        opened = [self._starts[group].ordinal for group in unfinished]
        again: list[JsonValue] = [*opened, *(start.ordinal for start in self._again)]
        there: list[JsonValue] = [*sorted(ordinal for ordinal in self._there if ordinal >= self._next)]
        return {"next": self._next, "again": again, "there": there}

    def load_state_dict(
        self, state: Mapping[str, JsonValue], there: Mapping[GroupId, Start] | None = None
    ) -> None:
        """Go on: first with what had not come to its end, in its order.  ConfigError for another thing.

        `there`: groups that are finished; their ordinals are not drawn again.
        """
        following, again, ahead = state.get("next"), state.get("again"), state.get("there", [])
        if not isinstance(following, int) or not isinstance(again, list) or not isinstance(ahead, list):
            raise ConfigError(f"tasks: {dict(state)} is no place in them; give what state_dict gave")
        self._starts |= there or {}
        kept = {start.ordinal for start in self._starts.values()}
        self._there = kept | {ordinal for ordinal in ahead if isinstance(ordinal, int)}
        ordinals = [ordinal for ordinal in again if isinstance(ordinal, int) and ordinal not in kept]
        self._next, self._again = following, deque(map(Start, ordinals))

    def keep(self, unfinished: Collection[GroupId]) -> None:
        """Forget the groups that have come to their end."""
        self._starts = {group_id: self._starts[group_id] for group_id in unfinished}

    def _following(self) -> Start:
        if self._again:
            return self._again.popleft()
        while self._next in self._there:
            self._next += 1
        return Start(self._next)

    def _open(self, draw: Draw[Any], start: Start) -> Opening:
        anew = f".{start.number}" if start.number > 1 else ""
        group_id = GroupId(f"{self._plan.name}-{draw.ordinal:06d}{anew}")
        self._starts[group_id] = start
        task, plan, part = draw.payload(), self._plan, self._plan.parts[draw.part]
        specs = tuple(
            ProgramSpec(
                id=ProgramId(f"{group_id}-{member}"),
                group_id=group_id,
                task_id=draw.task_id,
                purpose=Purpose.TRAIN,
                environment=part.environment,
                task=task,
                limits=part.limits,
                temperature=plan.temperature,
                seed=seed_of(plan.seed, draw.ordinal, member, *([start.number] if anew else [])),
                environment_seed=seed_of(plan.seed, draw.ordinal),
                group_size=part.group_size,
                routed_experts=plan.routed_experts,
                trainable_until=self._trainable_until(),
            )
            for member in range(part.group_size)
        )
        return Opening(group_id, specs, start)
