"""The runtime's side of the trainer process.  Loads no torch.

- The process lives exactly as long as the `async with` block; it also ends when this process dies.
- One call at a time; others wait for their turn.  Calls leave the event loop free.
- A cancelled call is still carried out by the process; its reply is dropped when it comes.
- A process that dies is a TrainerLost with its last words, for this call and every later one.
"""

import logging
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypeVar

import anyio
import msgspec
import numpy as np
from anyio.abc import ByteReceiveStream, Process, SocketStream, TaskGroup
from anyio.streams.buffered import BufferedByteReceiveStream
from anyio.streams.text import TextReceiveStream

from sostenuto.errors import ConfigError, RecordError, TrainerError, Unsupported
from sostenuto.records import Floats
from sostenuto.trainer.algorithms import SFT, Algorithm
from sostenuto.trainer.parts import Critic
from sostenuto.trainer.publication.manifest import Manifest
from sostenuto.trainer.reports import Exactness, ScorerFacts, StepReport, TrainerFacts
from sostenuto.trainer.samples import Sample
from sostenuto.trainer.settings import LearnerSettings, Schedule
from sostenuto.trainer.wire import (
    HEADER,
    Close,
    Command,
    Exact,
    Fit,
    Learn,
    Logprobs,
    Open,
    OpenScorer,
    Publish,
    Refused,
    Reply,
    Request,
    ResetOptimizer,
    Restore,
    Save,
    Score,
    Values,
    pack,
    sample_to_wire,
    unpack,
)
from sostenuto.types import Version

R = TypeVar("R")

_ERRORS = {kind.__name__: kind for kind in (ConfigError, RecordError, Unsupported, TrainerError)}
_GONE = (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError, anyio.ClosedResourceError)
_LAST_LINES = 20
_GRACE_S = 5.0
_GOODBYE_S = 1.0
"""A process that is busy longer leaves at once when its connection is closed."""

_log = logging.getLogger(__name__)


class TrainerLost(TrainerError):  # noqa: N818 - reads as the fact it states
    """The process has ended: whoever has a checkpoint may go on from it with another one."""

    killed = False
    """By a signal, so that it may do better the next time."""


class TrainerClient:
    """Starts a trainer process with `threads` threads and speaks to it."""

    def __init__(self, *, threads: int = 1, processes: int = 1) -> None:
        """`processes` share the model and each batch; `threads` are of each."""
        for name, value in (("threads", threads), ("processes", processes)):
            if value < 1:
                raise ConfigError(f"trainer: {name} must be at least 1, not {value}")
        self._threads = threads
        self._processes = processes
        self._turn = anyio.Lock()
        self._words: deque[str] = deque(maxlen=_LAST_LINES)
        self._requests = 0
        self._lost: str | None = None

    async def __aenter__(self) -> Self:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = await _launch(theirs.fileno(), self._threads, self._processes)
            self._stream = await SocketStream.from_socket(ours)
        except BaseException:
            ours.close()  # a process that did start ends with its connection
            raise
        self._reader = BufferedByteReceiveStream(self._stream)
        self._silent = anyio.Event()
        self._group: TaskGroup = anyio.create_task_group()
        await self._group.__aenter__()
        self._group.start_soon(self._listen)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await self.close()
            # Its other processes end with it, a moment later, and hold the pipe until then.
            with anyio.move_on_after(_GRACE_S):
                await self._silent.wait()
        self._group.cancel_scope.cancel()
        await self._group.__aexit__(kind, error, trace)
        with anyio.CancelScope(shield=True):
            await self._stderr.aclose()

    @property
    def _stderr(self) -> ByteReceiveStream:
        assert self._process.stderr is not None
        return self._process.stderr

    @property
    def pid(self) -> int:
        return self._process.pid

    async def open(  # noqa: PLR0913 - one keyword for each model beside the policy
        self,
        model_directory: str | Path,
        settings: LearnerSettings,
        *,
        seed: int,
        version: Version | None = None,
        draft: Path | None = None,
        reference: Path | None = None,
        teachers: Mapping[str, Path] | None = None,
        critic: Critic | None = None,
        critic_directory: Path | None = None,
    ) -> TrainerFacts:
        """Load a Hugging Face folder.  `version` is what its weights are known by, if they are.

        `draft`: the folder of the engines' draft model, if they have one.  `reference`: of the model that a
        KL is measured from.  `teachers`: of those that score in the trainer, by name.  `critic`: as the
        method has it; `critic_directory`: of a model of its own, which else begins as the policy.
        """
        opened = Open(
            _absolute(model_directory),
            _json(settings),
            seed,
            version,
            draft_directory=draft and _absolute(draft),
            reference_directory=reference and _absolute(reference),
            teacher_directories={name: _absolute(folder) for name, folder in (teachers or {}).items()},
            critic=critic and _json(critic),
            critic_directory=critic_directory and _absolute(critic_directory),
        )
        return await self._ask(opened, TrainerFacts)

    async def fit(self, samples: list[Sample], algorithm: SFT | None = None) -> StepReport:
        """One supervised step on the masked tokens of the samples."""
        wire = [sample_to_wire(sample) for sample in samples]
        return await self._ask(Fit(wire, _json(algorithm or SFT())), StepReport)

    async def learn(self, samples: list[Sample], algorithm: Algorithm) -> StepReport:
        """What the method makes of a batch.  RecordError for samples without behaviour log-probabilities."""
        wire = [sample_to_wire(sample) for sample in samples]
        return await self._ask(Learn(wire, _json(algorithm)), StepReport)

    async def exact(self, samples: list[Sample]) -> Exactness:
        """How many samples the model would copy greedily, teacher forced."""
        return await self._ask(Exact([sample_to_wire(sample) for sample in samples]), Exactness)

    async def logprobs(
        self,
        samples: list[Sample],
        temperature: float = 1.0,
        *,
        of: Literal["policy", "reference"] = "policy",
    ) -> list[Floats]:
        """(T,) for each sample under the present weights, or the reference's; NaN where nothing is masked."""
        wire = [sample_to_wire(sample) for sample in samples]
        found = await self._ask(Logprobs(wire, temperature, of), list[bytes])
        return [np.frombuffer(array, dtype=np.float32) for array in found]

    async def values(self, samples: list[Sample]) -> list[Floats]:
        """(T,) for each sample: what the critic says stands before each trained token, NaN elsewhere."""
        wire = [sample_to_wire(sample) for sample in samples]
        found = await self._ask(Values(wire), list[bytes])
        return [np.frombuffer(array, dtype=np.float32) for array in found]

    async def open_scorer(self, directory: str | Path, *, dtype: str, device: str) -> ScorerFacts:
        """Load a model that scores whole texts; this process then trains nothing."""
        return await self._ask(OpenScorer(_absolute(directory), dtype, device), ScorerFacts)

    async def scores(self, texts: list[list[int]]) -> list[list[float]]:
        """The outputs of that model for each text, one for each of its labels."""
        return await self._ask(Score(texts), list[list[float]])

    async def publish(self, version: Version) -> Manifest:
        """Write the weights where engines map them, and call them `version` from now on."""
        return Manifest.model_validate_json(await self._ask(Publish(version), bytes))

    async def save(
        self, root: str | Path, version: Version, *, notes: Mapping[str, bytes] | None = None
    ) -> Path:
        """Write a complete checkpoint folder under `root`, with `notes` as files in it; return its path."""
        return Path(await self._ask(Save(_absolute(root), version, dict(notes or {})), str))

    async def restore(self, path: str | Path) -> TrainerFacts:
        """Go on, bit for bit, where the checkpoint folder was saved.

        ConfigError for one that is not as it was written, or of another model; nothing has changed then.
        """
        return await self._ask(Restore(_absolute(path)), TrainerFacts)

    async def reset_optimizer(self, schedule: Schedule) -> TrainerFacts:
        """Forget the moments and start another schedule; the weights stay."""
        return await self._ask(ResetOptimizer(_json(schedule)), TrainerFacts)

    async def until_lost(self) -> None:
        """Wait for the end of the process, which is a TrainerLost."""
        await self._process.wait()
        raise await self._mourn()

    async def close(self) -> None:
        """End the process: by request, then by signal.  Idempotent; leaving the block does it."""
        with anyio.move_on_after(_GOODBYE_S):
            await self._say_goodbye()
        await self._stream.aclose()
        for end in (self._process.terminate, self._process.kill):
            with anyio.move_on_after(_GRACE_S):
                await self._process.wait()
                break
            end()
        self._lost = self._lost or "it was closed"

    async def _say_goodbye(self) -> None:
        try:
            await self._ask(Close(), type(None))
        except TrainerError:
            return  # gone already

    async def _ask(self, command: Command, kind: type[R]) -> R:
        async with self._turn:
            if self._lost:
                raise TrainerLost(f"the trainer process is gone: {self._lost}")
            self._requests += 1
            try:
                await self._send(pack(Request(self._requests, command)))
                reply = await self._receive(self._requests)
            except _GONE as error:
                raise await self._mourn() from error
        if isinstance(reply.answer, Refused):
            raise _ERRORS[reply.answer.error](reply.answer.message)
        return msgspec.msgpack.decode(reply.answer.result, type=kind)

    async def _send(self, frame: bytes) -> None:
        sent = False
        try:
            await self._stream.send(frame)
            sent = True
        finally:
            if not sent:
                # Half a frame may be on its way: nothing that follows could be understood.
                self._lost = self._lost or "a call was cancelled while it was being sent"

    async def _receive(self, request_id: int) -> Reply:
        while True:
            header = await self._reader.receive_exactly(HEADER.size)
            reply = unpack(await self._reader.receive_exactly(HEADER.unpack(header)[0]), Reply)
            if reply.id == request_id:
                return reply

    async def _mourn(self) -> TrainerError:
        with anyio.move_on_after(_GRACE_S):
            await self._process.wait()
            await self._silent.wait()
        words = "\n".join(self._words) or "it said nothing"
        self._lost = f"exit code {self._process.returncode}; its last words:\n{words}"
        lost = TrainerLost(f"the trainer process ended: {self._lost}")
        lost.killed = (self._process.returncode or 0) < 0
        return lost

    async def _listen(self) -> None:
        """Keep and log what the process says, until it has ended."""
        rest = ""
        async for text in TextReceiveStream(self._stderr, errors="replace"):
            *lines, rest = (rest + text).split("\n")
            for line in lines:
                self._words.append(line)
                _log.warning("trainer: %s", line)
        self._silent.set()


async def _launch(descriptor: int, threads: int, processes: int) -> Process:
    environment = {
        **os.environ,
        # Threads that wait must not burn the core that others need; torch reads these when it loads.
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        # Ranks are on this machine, and talk to nobody else.
        "GLOO_SOCKET_IFNAME": "lo",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    return await anyio.open_process(
        [sys.executable, "-m", "sostenuto.trainer.process", str(descriptor), "--processes", str(processes)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment,
        pass_fds=(descriptor,),
        # Ctrl-C in a terminal is the runtime's to handle; it closes this process.
        start_new_session=True,
    )


def _json(settings: LearnerSettings | Algorithm | SFT | Schedule | Critic) -> bytes:
    return settings.model_dump_json().encode()


def _absolute(path: str | Path) -> str:
    # The process has our working directory; a name that does not depend on it also reads better in errors.
    return str(Path(path).absolute())
