"""What a job leaves for later eyes: TensorBoard scalars and the reward curve as a picture."""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from sostenuto.errors import Unsupported
from sostenuto.runtime.jobs.events import Evaluated, JobEvent, StepTrained
from sostenuto.runtime.jobs.workshop import Say


@contextmanager
def tensorboard(folder: Path) -> Generator[Say]:
    """Write scalars of every step and evaluation under `folder`, which is made with the first of them."""
    try:
        from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingTypeStubs]
    except ModuleNotFoundError as error:
        raise Unsupported(f"jobs need {error.name}: pip install 'sostenuto[train]'") from error

    with ExitStack() as stack:

        @cache
        def writer() -> Any:  # noqa: ANN401 - the library has no types
            made: Any = SummaryWriter(str(folder))
            stack.callback(made.close)
            return made

        def say(event: JobEvent) -> None:
            if isinstance(event, StepTrained | Evaluated):
                for name, value in _scalars(event).items():
                    writer().add_scalar(name, value, global_step=event.step)

        yield say


def _scalars(event: StepTrained | Evaluated) -> dict[str, float]:
    if isinstance(event, StepTrained):
        return _of_step(event)
    how = "greedy" if event.temperature == 0 else "sampled"
    return {f"held_out/{how}": event.reward, "held_out/failed": event.failed}


def _of_step(event: StepTrained) -> dict[str, float]:
    report = event.report
    mismatch = {
        "mismatch/mean_abs_dlogp": report.mean_abs_dlogp,
        "mismatch/max_abs_dlogp": report.max_abs_dlogp,
        "mismatch/k3": report.mismatch_k3,
        "learn/teacher_kl": report.teacher_kl,
    }
    return {
        "reward/mean": event.reward,
        "reward/skipped_groups": event.skipped,
        "staleness/mean": event.staleness_mean,
        "staleness/max": event.staleness_max,
        "learn/loss": report.loss,
        "learn/grad_norm": report.grad_norm,
        "learn/rate": report.learning_rate,
        "learn/entropy": report.entropy,
        "learn/clip_share": report.clip_share,
        "time/wait_s": event.wait_s,
        "time/learn_s": event.learn_s,
        "time/publish_s": event.publish_s,
        "time/pause_s": event.pause_s,
        **{name: value for name, value in mismatch.items() if value is not None},
    }


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
        for greedy, label in ((False, "held-out, sampled"), (True, "held-out, greedy")):
            told = [e for e in self._held_out if (e.temperature == 0) == greedy]
            axes.plot([e.step for e in told], [e.reward for e in told], "o--", label=label)
        axes.set(xlabel="step", ylabel="mean reward", ylim=(-0.02, 1.02))
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
        figure.tight_layout()
        figure.savefig(path, dpi=120)
        plot.close(figure)
        return True
