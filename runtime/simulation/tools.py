"""The simulated tool server: environments, tool calls, and what sandboxes take of the machine.

It says what sandboxes take; it refuses nothing for lack of memory or disk: that is the scheduler's part.
A sandbox does one thing at a time, in the order in which it is asked.
"""

from collections import deque
from collections.abc import Callable, Mapping

from sostenuto.runtime.simulation.clock import Clock, Timer
from sostenuto.runtime.simulation.plan import Plan, PlannedTurn
from sostenuto.runtime.simulation.profile import ToolServerProfile
from sostenuto.runtime.simulation.usage import Usage
from sostenuto.types import ProgramId, SandboxRung

Told = Callable[[float], None]
"""Called at the end, with the seconds that were spent waiting or, for a move, that it took."""

_RUNNING = SandboxRung.RUNNING


class _Sandbox:
    __slots__ = ("job", "plan", "rung", "started_s", "todo")

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.started_s: float | None = None
        """None: it waits to be made."""
        self.rung = _RUNNING
        self.job: _Job | None = None
        self.todo: deque[_Job] = deque()


class _Job:
    """Something that a sandbox is busy with for a while."""

    __slots__ = ("asked_s", "began", "done", "needs_rung", "queue", "sandbox", "seconds", "spike_bytes",
                 "timer", "waited_s")  # fmt: skip

    def __init__(self, sandbox: _Sandbox, seconds: float, done: Told, asked_s: float) -> None:
        self.sandbox = sandbox
        self.seconds = seconds
        self.done = done
        self.asked_s = asked_s
        self.waited_s = 0.0
        self.queue: _Queue | None = None
        self.began: Callable[[], None] | None = None
        self.needs_rung: SandboxRung | None = None
        self.spike_bytes = 0
        self.timer: Timer | None = None


class _Queue:
    """So many jobs at a time, first come first served."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: deque[_Job] = deque()

    def enter(self, job: _Job) -> bool:
        """Whether there is a place; otherwise the job waits for one."""
        if self._free:
            self._free -= 1
            return True
        self._waiting.append(job)
        return False

    def leave(self) -> _Job | None:
        """Give up a place; returns the job that has it now."""
        while self._waiting:
            job = self._waiting.popleft()
            if job.sandbox.job is job:
                return job
        self._free += 1
        return None


class SimulatedTools:
    def __init__(self, profile: ToolServerProfile, tool_concurrency: Mapping[str, int], clock: Clock) -> None:
        self.usage = Usage()
        self._profile = profile
        self._clock = clock
        self._sandboxes: dict[ProgramId, _Sandbox] = {}
        self._preparing = _Queue(profile.prepare_concurrency)
        self._calls = {tool: _Queue(places) for tool, places in tool_concurrency.items()}

    def __repr__(self) -> str:
        return f"<SimulatedTools {len(self._sandboxes)} sandboxes, {self.usage!r}>"

    def prepare(self, plan: Plan, done: Told) -> None:
        """Make the program's environment."""
        sandbox = self._sandboxes[plan.id] = _Sandbox(plan)
        job = _Job(sandbox, plan.prepare_s, done, self._clock.now_s())
        job.queue, job.began = self._preparing, lambda: self._made(sandbox)
        self._ask(job)

    def call(self, plan: Plan, turn: PlannedTurn, done: Told) -> None:
        """Run the turn's tool; the sandbox comes back to RUNNING first."""
        job = _Job(self._sandboxes[plan.id], turn.tool_s, done, self._clock.now_s())
        job.queue = self._calls.get(turn.tool or "")
        job.needs_rung, job.spike_bytes = _RUNNING, plan.spike_bytes
        self._ask(job)

    def move(self, program_id: ProgramId, rung: SandboxRung, done: Told) -> None:
        """Bring the sandbox to a rung, after what it is busy with."""
        sandbox = self._sandboxes.get(program_id)
        if sandbox is not None:
            job = _Job(sandbox, 0.0, done, self._clock.now_s())
            job.began = lambda: self._start_moving(job, rung)
            self._ask(job)

    def cancel(self, program_id: ProgramId) -> None:
        """Nothing of what was asked for the program is heard of any more; its sandbox stays."""
        sandbox = self._sandboxes.get(program_id)
        if sandbox is None:
            return
        sandbox.todo.clear()
        job, sandbox.job = sandbox.job, None
        if job is not None and job.timer is not None:
            job.timer.cancel()
            self._leave(job)

    def release(self, program_id: ProgramId) -> float:
        """End the program's sandbox and all that runs in it; returns how long there was one."""
        self.cancel(program_id)
        sandbox = self._sandboxes.pop(program_id, None)
        if sandbox is None or sandbox.started_s is None:
            return 0.0
        self.usage.ends(sandbox.plan.sandbox, sandbox.rung)
        return self._clock.now_s() - sandbox.started_s

    def _ask(self, job: _Job) -> None:
        job.sandbox.todo.append(job)
        if job.sandbox.job is None:
            self._next(job.sandbox)

    def _next(self, sandbox: _Sandbox) -> None:
        job = sandbox.todo[0]
        if job.needs_rung is not None and job.needs_rung is not sandbox.rung:
            job = self._coming_back(sandbox)
        else:
            sandbox.todo.popleft()
        sandbox.job = job
        if job.queue is None or job.queue.enter(job):
            self._begin(job)

    def _begin(self, job: _Job) -> None:
        now_s = self._clock.now_s()
        job.waited_s = now_s - job.asked_s
        if job.began is not None:
            job.began()
        if job.spike_bytes:
            self.usage.grows(job.spike_bytes)
        job.timer = self._clock.call_at(now_s + job.seconds, lambda: self._end(job))

    def _end(self, job: _Job) -> None:
        sandbox = job.sandbox
        sandbox.job = None
        self._leave(job)
        job.done(job.waited_s)
        if sandbox.todo and sandbox.job is None:
            self._next(sandbox)

    def _leave(self, job: _Job) -> None:
        if job.spike_bytes:
            self.usage.grows(-job.spike_bytes)
        if job.queue is not None and (following := job.queue.leave()) is not None:
            self._begin(following)

    def _made(self, sandbox: _Sandbox) -> None:
        sandbox.started_s = self._clock.now_s()
        self.usage.begins(sandbox.plan.sandbox)

    # ---- rungs ----

    def _coming_back(self, sandbox: _Sandbox) -> _Job:
        job = _Job(sandbox, 0.0, lambda _: None, self._clock.now_s())
        job.began = lambda: self._start_moving(job, _RUNNING)
        return job

    def _start_moving(self, job: _Job, rung: SandboxRung) -> None:
        """What it takes is taken at the start, what it frees is free at the end."""
        sandbox, told = job.sandbox, job.done
        before, claim = sandbox.rung, sandbox.plan.sandbox
        elapsed_s = job.seconds = self._move_s(before, rung)
        if rung is _RUNNING:
            sandbox.rung = rung
            self.usage.moves(claim, before, rung)

        def arrived(_: float) -> None:
            if sandbox.rung is not rung:
                self.usage.moves(claim, sandbox.rung, rung)
                sandbox.rung = rung
            told(elapsed_s)

        job.done = arrived

    def _move_s(self, before: SandboxRung, rung: SandboxRung) -> float:
        profile = self._profile
        if before is rung:
            return 0.0
        up_s = {
            SandboxRung.PAUSED: profile.resume_s,
            SandboxRung.RECLAIMED: profile.reclaim_s,
            SandboxRung.SNAPSHOTTED: profile.restore_s,
        }
        down_s = {
            SandboxRung.PAUSED: profile.pause_s,
            SandboxRung.RECLAIMED: profile.reclaim_s,
            SandboxRung.SNAPSHOTTED: profile.snapshot_s,
        }
        return up_s[before] if rung is _RUNNING else down_s[rung]
