"""What a live comparison runs: each policy on engines of its own, and the endless pool beside them."""

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from sostenuto.errors import ConfigError
from sostenuto.runtime.bench.cells import most_kv, policy_of
from sostenuto.runtime.bench.comparison import ENDLESS, ENDLESS_POOL, RATIO, REFERENCE
from sostenuto.runtime.bench.live.model import random_model
from sostenuto.runtime.bench.live.run import replay
from sostenuto.runtime.bench.summary import UNKNOWN, Measured, summarize
from sostenuto.runtime.config import EngineSettings
from sostenuto.runtime.engines.client import launch_embedded
from sostenuto.runtime.engines.embedded.settings import EmbeddedSettings
from sostenuto.runtime.engines.protocol import Engine
from sostenuto.runtime.simulation.plan import Workload
from sostenuto.runtime.simulation.workloads import working_set_tokens
from sostenuto.scheduler.scheduler import Scheduler
from sostenuto.types import EngineId

ON_AN_ENDLESS_POOL = "request-sticky"
"""Without pressure there is nothing to decide but where."""


@dataclass(frozen=True, slots=True)
class LiveCell:
    policy: str
    workload: Workload
    seed: int
    kv_tokens: int
    settings: Mapping[str, str] = field(default_factory=dict[str, str])

    def __str__(self) -> str:
        where = " ".join(f"{name} {value}" for name, value in self.settings.items())
        return f"{self.policy}, {where}, {self.kv_tokens} tokens of KV an engine, seed {self.seed}"


@dataclass(frozen=True, slots=True)
class LiveSweep:
    policies: tuple[str, ...]
    workload: Callable[[int], Workload]
    """By seed."""
    seeds: tuple[int, ...]
    engine: EngineSettings
    """Its pool is that of each cell."""
    engines: int = 1
    model: Path | None = None
    """None: a small one with random weights."""
    ratio: float = 2.0
    kv_tokens: int | None = None
    """Of each engine, in place of what the ratio asks for."""
    time_scale: float = 1.0
    references: bool = True

    def cells(self) -> list[LiveCell]:
        """ConfigError, before anything runs, when one of them could not."""
        self._check()
        cells = [cell for seed in self.seeds for cell in self._of_seed(seed)]
        for cell in cells:
            _check_that_programs_fit(cell)
        return cells

    async def run(self, say: Callable[[LiveCell, Measured], None]) -> list[Measured]:
        """Run one cell after the other."""
        measured: list[Measured] = []
        with TemporaryDirectory(prefix="sostenuto-", ignore_cleanup_errors=True) as place:
            model = self.model or await random_model(Path(place) / "model")
            for number, cell in enumerate(self.cells()):
                folder = Path(place) / str(number)
                folder.mkdir()
                measured.append(await self._run(cell, model, folder))
                say(cell, measured[-1])
        return measured

    async def _run(self, cell: LiveCell, model: Path, folder: Path) -> Measured:
        policy = policy_of(cell.policy, cell.workload)
        async with self._launched(cell, model, folder) as engines:
            run = await replay(policy, cell.workload, engines, seed=cell.seed, time_scale=self.time_scale)
        run.policy, run.settings = cell.policy, dict(cell.settings)
        run.fleet = f"{self.engines} x embedded"
        if isinstance(policy, Scheduler):
            run.worst_bound_s = policy.patience.longest_bound_s or UNKNOWN
        return Measured(run, summarize(run))

    @asynccontextmanager
    async def _launched(
        self, cell: LiveCell, model: Path, folder: Path
    ) -> AsyncGenerator[dict[EngineId, Engine]]:
        async with AsyncExitStack() as stack:
            engines: dict[EngineId, Engine] = {}
            for number in range(self.engines):
                engine_id = EngineId(f"engine-{number}")
                settings = EmbeddedSettings(
                    model=model,
                    socket=folder / f"{number}.sock",
                    kv_tokens=cell.kv_tokens,
                    concurrency=self.engine.concurrency,
                    threads=self.engine.threads,
                    dtype=self.engine.dtype,
                    device=self.engine.device,
                    speculation=self.engine.speculation,
                    draft_model=self.engine.draft_model,
                    draft_tokens=self.engine.draft_tokens,
                    lower_tokens=self.engine.lower_tokens,
                    lower_folder=self.engine.lower_folder,
                )
                launched = launch_embedded(settings, engine_id=engine_id)
                engines[engine_id] = await stack.enter_async_context(launched)
            yield engines

    def _check(self) -> None:
        if not self.policies:
            raise ConfigError("policies: none is given; give at least one")
        for name, value in {"ratio": self.ratio, "time-scale": self.time_scale}.items():
            if not 0 < value < float("inf"):
                raise ConfigError(f"{name}: {value:g}; give a number above 0")
        if self.engines < 1:
            raise ConfigError(f"engines: {self.engines} are too few; give at least 1")

    def _of_seed(self, seed: int) -> Iterator[LiveCell]:
        workload = self.workload(seed)
        live = workload.concurrency or len(workload.programs)
        named = {"programs": str(len(workload.programs)), "concurrency": str(live)}
        working_set = working_set_tokens(workload, live)
        tokens = self.kv_tokens or round(working_set / self.ratio / self.engines)
        ratio = f"{working_set / tokens / self.engines:.2g}"
        for policy in dict.fromkeys(self.policies):
            policy_of(policy, workload)
            yield LiveCell(policy, workload, seed, tokens, {**named, RATIO: ratio})
        if self.references:
            endless = {**named, RATIO: ENDLESS, REFERENCE: ENDLESS_POOL}
            yield LiveCell(ON_AN_ENDLESS_POOL, workload, seed, _all_tokens(workload), endless)


def _all_tokens(workload: Workload) -> int:
    """A pool in which nothing is ever given up."""
    return sum(most_kv(plan).tokens for plan in workload.programs)


def _check_that_programs_fit(cell: LiveCell) -> None:
    for plan in cell.workload.programs:
        most = most_kv(plan).tokens
        if most > cell.kv_tokens:
            raise ConfigError(
                f"{cell.workload.name}: program {plan.id} (seed {cell.seed}) needs {most} tokens of KV, "
                f"and an engine has {cell.kv_tokens}; lower the ratio, or raise kv-tokens or the concurrency"
            )
