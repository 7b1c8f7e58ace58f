"""The quickstart under kill -9: it learns as one that nothing befalls."""

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figure import Tell
from benchmarks.recovery_audit import result
from benchmarks.recovery_torture import Torture, open_folder
from sostenuto.runtime.quickstart.recipe import Recipe
from sostenuto.runtime.remembered import QuickstartAsked, remember

_SEED = 1
"""Of the warm-started model."""


@dataclass(frozen=True, slots=True)
class Quickstart:
    """From its warm-started model on."""

    model: Path

    @property
    def root(self) -> str:
        return f"quickstart-{_SEED}"

    @property
    def steps(self) -> int:
        return Recipe().reinforcing.steps

    @property
    def whole_batches(self) -> int | None:
        return None

    def begin(self, folder: Path) -> list[str]:
        """As if it had been killed after its warm start."""
        run = folder / "run"
        shutil.copytree(self.model, run / "models" / f"warm-{_SEED}" / self.model.name)
        remember(run, QuickstartAsked(seed=_SEED))
        return ["resume", str(run)]


async def measure_quickstart(tell: Tell, model: Path, *, kills: int, seed: int) -> None:
    """One quickstart, killed so often if it lasts that long."""
    torture = Torture(Quickstart(model), random.Random(seed), longest_s=45.0)
    with open_folder() as folder:
        await torture.run_job(folder / "quickstart", kills)
        told = result(folder / "quickstart" / "run")
    last = {evaluation["temperature"]: evaluation["reward"] for evaluation in told["evaluations"]}
    tell("quickstart_sampled", last[1.0], "share of tasks", ">= 0.9")
    tell("quickstart_greedy", last[0.0], "share of tasks", ">= 0.9")
    torture.tell(tell, "quickstart_")
