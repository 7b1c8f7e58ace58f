"""A planned program that runs for real: how far it is, and what it was measured to be."""

from collections.abc import Callable, Mapping

from sostenuto.runtime.engines.wire import GenerateReply
from sostenuto.runtime.simulation.plan import Plan, PlannedTurn, Workload
from sostenuto.runtime.simulation.program import turn_limit_tokens
from sostenuto.runtime.simulation.results import ProgramResult, Series, Stretch
from sostenuto.runtime.simulation.waits import Waits
from sostenuto.scheduler.lifecycle import Phase
from sostenuto.types import EngineId, ProgramId


class Course:
    """The programs of one run, and what they have in common.  `now_s` is the run's clock."""

    def __init__(self, workload: Workload, now_s: Callable[[], float]) -> None:
        self.now_s = now_s
        self.waits = Waits()
        self.waiting: Series = []
        self._plans: Mapping[ProgramId, Plan] = {plan.id: plan for plan in workload.programs}
        self._programs: dict[ProgramId, ReplayedProgram] = {}
        self._seen: set[str] = set()

    def submit(self, plan: Plan) -> "ReplayedProgram":
        program = ReplayedProgram(plan, self)
        self._programs[plan.id] = program
        return program

    def program(self, program_id: str) -> "ReplayedProgram":
        return self._programs[ProgramId(program_id)]

    def results(self) -> list[ProgramResult]:
        return [program.result for program in self._programs.values()]

    def first_use(self, plan: Plan) -> int:
        """Tokens of common prefixes that no program has sent before."""
        new = [segment for segment in plan.shared if segment.key not in self._seen]
        self._seen.update(segment.key for segment in new)
        return sum(segment.tokens for segment in new)

    def one_waits(self, change: int) -> None:
        """One program more, or less, lacks nothing but an engine."""
        self.waits.change(self.now_s(), programs=change)
        self.waiting.append((self.now_s(), self.waits.programs))


class ReplayedProgram:
    def __init__(self, plan: Plan, course: Course) -> None:
        self.plan = plan
        self.turns_over = 0
        self.result = ProgramResult(plan.id, plan.group, plan.group_size, course.now_s())
        self.result.prompt_tokens = plan.shared_tokens + plan.prompt_tokens
        self._course = course
        self._engine_id: EngineId | None = None
        self._runnable_s = self._since_s = course.now_s()
        self._phase = Phase.QUEUED
        self._waits = False

    @property
    def turn(self) -> PlannedTurn:
        """The one that is next, or is running."""
        return self.plan.turns[self.turns_over]

    @property
    def last_turn(self) -> PlannedTurn:
        """The one that was over last."""
        return self.plan.turns[self.turns_over - 1]

    @property
    def is_over(self) -> bool:
        return self.turns_over == len(self.plan.turns)

    @property
    def turn_limit_tokens(self) -> int:
        """The most that any of its turns adds, as far as it says beforehand."""
        return max(turn_limit_tokens(turn.output_tokens) for turn in self.plan.turns)

    def prepares(self) -> None:
        self._enter(Phase.PREPARING)

    def is_prepared(self) -> None:
        result = self.result
        result.prepare_s = self._course.now_s() - self._since_s
        result.needed_tokens += self.plan.prompt_tokens + self._course.first_use(self.plan)
        self._becomes_runnable(Phase.WAITING)

    def is_sent(self, engine_id: EngineId, context_tokens: int) -> None:
        now_s, result = self._course.now_s(), self.result
        result.moves += self._engine_id not in (None, engine_id)
        result.admission_waits_s.append(now_s - self._runnable_s)
        result.context_tokens += context_tokens
        result.turn_contexts.append(context_tokens)
        self._stop_waiting()
        self._engine_id = engine_id
        self._enter(Phase.REASONING)

    def is_answered(self, reply: GenerateReply) -> None:
        result = self.result
        result.turn_waits_s.append(result.admission_waits_s[-1] + reply.queue_s)
        result.turns += 1
        result.generated_tokens += len(reply.token_ids)
        result.prefilled_tokens += reply.prefilled_tokens
        result.cached_tokens += reply.cached_tokens
        result.prefill_s += reply.prefill_s
        result.decode_s += reply.decode_s
        self.turns_over += 1
        if self.is_over:
            self._enter(Phase.DONE)
            result.finished_s = self._course.now_s()
        else:
            self._enter(Phase.ACTING)

    def tool_returned(self, tool_s: float, queue_s: float) -> None:
        self.result.tool_s += tool_s
        self.result.tool_queue_s += queue_s
        self.result.needed_tokens += self.last_turn.result_tokens
        self._becomes_runnable(Phase.READY)

    def is_evicted(self) -> None:
        """The policy has its KV given up between two turns."""
        if self._phase in {Phase.ACTING, Phase.READY}:
            self.result.evictions += 1

    def ends(self, failed: str) -> None:
        self._stop_waiting()
        if failed or not self.is_over:
            self.result.failed = failed or "it ended before its plan"
            self.result.finished_s = self._course.now_s()

    def _becomes_runnable(self, phase: Phase) -> None:
        self._enter(phase)
        self._runnable_s = self._course.now_s()
        self._waits = True
        self._course.one_waits(1)

    def _stop_waiting(self) -> None:
        if self._waits:
            self._waits = False
            self._course.one_waits(-1)

    def _enter(self, phase: Phase) -> None:
        now_s = self._course.now_s()
        engine = self._engine_id or ""
        self.result.stretches.append(Stretch(self._phase.value, self._since_s, now_s, engine))
        self._phase, self._since_s = phase, now_s
