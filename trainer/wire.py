"""What crosses between the runtime and the trainer process: frames over an inherited socket pair.

A frame is an 8-byte big-endian length and one msgpack message.  Requests are answered in order, one at a
time; a reply carries the id of its request, so that the reply to a cancelled call can be told apart and
dropped.
"""

import struct
from typing import Literal, TypeVar

import msgspec
import numpy as np

from sostenuto.records import Experts, Floats
from sostenuto.trainer.samples import Sample
from sostenuto.types import Version

HEADER = struct.Struct(">Q")
M = TypeVar("M")


class WireSample(msgspec.Struct, frozen=True):
    """A Sample; arrays as their bytes in native order (both ends are one machine)."""

    token_ids: bytes
    mask: bytes
    logprobs: bytes
    advantages: bytes
    version: Version | None
    origin: str
    rollout_logprobs: bytes | None
    experts: tuple[tuple[int, int, int], bytes] | None = None
    """Shape and numbers."""
    extras: dict[str, tuple[tuple[int, ...], bytes]] = msgspec.field(
        default_factory=dict[str, tuple[tuple[int, ...], bytes]]
    )
    """Shape and numbers."""
    teacher: str = ""


class Open(msgspec.Struct, frozen=True, tag=True):
    model_directory: str
    settings: bytes
    """LearnerSettings as JSON."""
    seed: int
    version: Version | None
    draft_directory: str | None = None
    """Of the engines' draft model."""
    reference_directory: str | None = None
    """Of the model that a KL is measured from."""
    teacher_directories: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Of the teachers that are models beside the policy, by name."""
    critic: bytes | None = None
    """Critic as JSON."""
    critic_directory: str | None = None
    """Of the critic's own model; None: the policy's."""


class Fit(msgspec.Struct, frozen=True, tag=True):
    samples: list[WireSample]
    algorithm: bytes
    """SFT as JSON."""


class Learn(msgspec.Struct, frozen=True, tag=True):
    samples: list[WireSample]
    algorithm: bytes
    """AnyAlgorithm as JSON."""


class Exact(msgspec.Struct, frozen=True, tag=True):
    samples: list[WireSample]


class Logprobs(msgspec.Struct, frozen=True, tag=True):
    samples: list[WireSample]
    temperature: float
    of: Literal["policy", "reference"] = "policy"


class Values(msgspec.Struct, frozen=True, tag=True):
    samples: list[WireSample]


class Publish(msgspec.Struct, frozen=True, tag=True):
    version: Version


class Save(msgspec.Struct, frozen=True, tag=True):
    root: str
    version: Version
    notes: dict[str, bytes] = msgspec.field(default_factory=dict[str, bytes])
    """Files that are to lie in it, by name."""


class Restore(msgspec.Struct, frozen=True, tag=True):
    path: str


class ResetOptimizer(msgspec.Struct, frozen=True, tag=True):
    schedule: bytes
    """Schedule as JSON."""


class OpenScorer(msgspec.Struct, frozen=True, tag=True):
    """Load a model that scores whole texts, in a process that trains nothing."""

    directory: str
    dtype: str
    device: str


class Score(msgspec.Struct, frozen=True, tag=True):
    texts: list[list[int]]


class Close(msgspec.Struct, frozen=True, tag=True):
    pass


Command = (
    Open
    | Fit
    | Learn
    | Exact
    | Logprobs
    | Values
    | Publish
    | Save
    | Restore
    | ResetOptimizer
    | OpenScorer
    | Score
    | Close
)


class Request(msgspec.Struct, frozen=True):
    id: int
    command: Command


class Done(msgspec.Struct, frozen=True, tag=True):
    result: msgspec.Raw
    """msgpack of what the command gives."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    error: str
    """Class in sostenuto.errors."""
    message: str


class Reply(msgspec.Struct, frozen=True):
    id: int
    answer: Done | Refused


def pack(message: Request | Reply) -> bytes:
    """One frame."""
    body = msgspec.msgpack.encode(message)
    return HEADER.pack(len(body)) + body


def unpack(body: bytes, kind: type[M]) -> M:
    """The message of one frame's body."""
    return msgspec.msgpack.decode(body, type=kind)


def sample_to_wire(sample: Sample) -> WireSample:
    rollout = sample.rollout_logprobs
    return WireSample(
        token_ids=sample.token_ids.astype(np.int32, copy=False).tobytes(),
        mask=sample.mask.astype(np.bool_, copy=False).tobytes(),
        logprobs=_bytes(sample.logprobs),
        advantages=_bytes(sample.advantages),
        version=sample.version,
        origin=sample.origin,
        rollout_logprobs=None if rollout is None else _bytes(rollout),
        experts=None if sample.experts is None else _experts_to_wire(sample.experts),
        extras={name: (known.shape, _bytes(known)) for name, known in sample.extras.items()},
        teacher=sample.teacher,
    )


def sample_from_wire(wire: WireSample) -> Sample:
    rollout = wire.rollout_logprobs
    return Sample(
        token_ids=np.frombuffer(wire.token_ids, dtype=np.int32),
        mask=np.frombuffer(wire.mask, dtype=np.bool_),
        logprobs=np.frombuffer(wire.logprobs, dtype=np.float32),
        advantages=np.frombuffer(wire.advantages, dtype=np.float32),
        version=wire.version,
        origin=wire.origin,
        rollout_logprobs=None if rollout is None else np.frombuffer(rollout, dtype=np.float32),
        experts=None if wire.experts is None else _experts_from_wire(*wire.experts),
        extras={
            name: np.frombuffer(known, dtype=np.float32).reshape(shape)
            for name, (shape, known) in wire.extras.items()
        },
        teacher=wire.teacher,
    )


def _bytes(floats: Floats) -> bytes:
    return floats.astype(np.float32, copy=False).tobytes()


def _experts_to_wire(experts: Experts) -> tuple[tuple[int, int, int], bytes]:
    tokens, layers, top_k = experts.shape
    return (tokens, layers, top_k), experts.astype(np.int16, copy=False).tobytes()


def _experts_from_wire(shape: tuple[int, int, int], data: bytes) -> Experts:
    return np.frombuffer(data, dtype=np.int16).reshape(shape)
