"""Where scalars go: TensorBoard, Weights & Biases, MLflow, each behind one small interface.

- A tracker that is not installed is a clear error before the job starts.
- Trackers that may wait for a server have a thread; what they raise is logged once and ends no job.
"""

import logging
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol

from sostenuto.errors import Unsupported
from sostenuto.runtime.jobs.events import JobEvent
from sostenuto.runtime.jobs.workshop import Say
from sostenuto.runtime.seeing.scalars import scalars_of

TrackerName = Literal["tensorboard", "wandb", "mlflow"]

_PACKAGES = {"tensorboard": "sostenuto[train]", "wandb": "wandb", "mlflow": "mlflow-skinny"}
_log = logging.getLogger(__name__)


class Tracker(Protocol):
    """Blocking; one thread calls it."""

    def log(self, scalars: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Under `folder`, which is made with the first scalar."""

    def __init__(self, library: Any, folder: Path) -> None:  # noqa: ANN401 - it has no types
        @cache
        def writer() -> Any:  # noqa: ANN401
            self._made = library.SummaryWriter(str(folder))
            return self._made

        self._writer: Callable[[], Any] = writer
        self._made: Any = None

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._writer().add_scalar(name, value, global_step=step)

    def close(self) -> None:
        if self._made is not None:
            self._made.close()


class Wandb:
    """A run of Weights & Biases; where it goes is WANDB_MODE's and WANDB_PROJECT's to say."""

    def __init__(self, library: Any, folder: Path) -> None:  # noqa: ANN401 - its types are partial
        self._run = library.init(dir=str(folder), name=folder.name)
        # Evaluations beside training come late; its own step only goes up.
        self._run.define_metric("*", step_metric="step")

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self._run.log({"step": step, **scalars})

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of MLflow; where it goes is MLFLOW_TRACKING_URI's and MLFLOW_EXPERIMENT_NAME's to say."""

    def __init__(self, library: Any, folder: Path) -> None:  # noqa: ANN401 - its types are partial
        self._library = library
        self._id: str = library.start_run(run_name=folder.name).info.run_id

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self._library.log_metrics(dict(scalars), step=step, run_id=self._id)

    def close(self) -> None:
        self._library.end_run()


class _InThread:
    """A tracker whose calls never hold up who logs."""

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        self._name = name
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._tracker = self._thread.submit(make).result()
        self._has_failed = False

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self._thread.submit(self._try, lambda: self._tracker.log(scalars, step))

    def close(self) -> None:
        self._thread.submit(self._try, self._tracker.close)
        self._thread.shutdown()

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - whatever a library raises, training is not its to end
            if not self._has_failed:
                _log.warning("%s: %s: %s; the job goes on without", self._name, type(error).__name__, error)
            self._has_failed = True


@contextmanager
def trackers(names: tuple[TrackerName, ...], run: Path) -> Generator[Say]:
    """Log the scalars of what a job says; `run` is its directory.  Unsupported for one not installed."""
    with ExitStack() as stack:
        opened = [_open(name, run) for name in dict.fromkeys(names)]
        for tracker in opened:
            stack.callback(tracker.close)

        def say(event: JobEvent) -> None:
            told = scalars_of(event)
            if told is not None:
                step, scalars = told
                for tracker in opened:
                    tracker.log(scalars, step)

        yield say


def _open(name: TrackerName, run: Path) -> Tracker:
    library = _library("tensorboardX" if name == "tensorboard" else name, name)
    if name == "tensorboard":
        return TensorBoard(library, run / "tensorboard")
    kind = Wandb if name == "wandb" else MLflow
    return _InThread(name, lambda: kind(library, run))


def _library(module: str, name: str) -> Any:  # noqa: ANN401 - any of them
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise Unsupported(
            f"trackers: {name} needs {error.name}: pip install '{_PACKAGES[name]}', or leave it out"
        ) from error
