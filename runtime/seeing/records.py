"""What a job leaves for later eyes: the reward curve as a picture."""

from pathlib import Path
from typing import Any

from sostenuto.runtime.jobs.events import Evaluated, JobEvent, StepTrained


class Curve:
    """Rewards by step and held-out success, drawn at the end."""

    def __init__(self) -> None:
        self._steps: list[StepTrained] = []
        self._held_out: list[Evaluated] = []

    def say(self, event: JobEvent) -> None:
        match event:
            case StepTrained():
                self._steps.append(event)
            case Evaluated():
                self._held_out.append(event)
            case _:
                pass

    def _by_label(self) -> dict[str, list[Evaluated]]:
        by: dict[str, list[Evaluated]] = {}
        for told in self._held_out:
            how = "greedy" if told.temperature == 0 else "sampled"
            by.setdefault(" ".join(filter(None, (f"held-out, {how}", told.environment))), []).append(told)
        return by

    def draw(self, path: Path) -> bool:
        """Write a PNG; False when there was nothing to draw."""
        if not self._steps:
            return False
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot as plt

        plot: Any = plt
        figure, axes = plot.subplots(figsize=(7, 4))
        axes.plot([s.step for s in self._steps], [s.reward for s in self._steps], label="batch, sampled")
        for label, told in self._by_label().items():
            axes.plot([e.step for e in told], [e.reward for e in told], "o--", label=label)
        axes.set(xlabel="step", ylabel="mean reward", ylim=(-0.02, 1.02))
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
        figure.tight_layout()
        figure.savefig(path, dpi=120)
        plot.close(figure)
        return True
