"""Trajectories as bytes: msgpack, arrays as raw little-endian buffers.

Of a long one the arrays can be taken out, so that they lie elsewhere.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace

import msgspec
import numpy as np

from sostenuto.errors import Blame, RecordError
from sostenuto.records import Experts, Producer, Span, Taught, Trajectory, VersionSpan
from sostenuto.types import GroupId, Outcome, OutcomeKind, ProgramId, Purpose, StopReason, Usage, Version


class _Span(msgspec.Struct, array_like=True):
    producer: str
    token_ids: bytes
    logprobs: bytes
    mask: bytes
    versions: list[tuple[int, int, int, int]]
    started_s: float
    ended_s: float


class _Taught(msgspec.Struct, array_like=True):
    version: str
    logprobs: bytes
    top_k: int
    """0: none."""
    top_ids: bytes
    top_logprobs: bytes


class _Experts(msgspec.Struct, array_like=True):
    shape: tuple[int, int, int]
    numbers: bytes


class _Record(msgspec.Struct):
    program_id: str
    group_id: str
    task_id: str
    purpose: str
    sequences: list[list[_Span]]
    reward: float | None
    stop_reason: str
    usage: dict[str, float]
    outcome: tuple[str, str, str | None] | None
    metrics: dict[str, float]
    experts: list[_Experts | None] | msgspec.UnsetType = msgspec.UNSET
    teacher: str | msgspec.UnsetType = msgspec.UNSET
    taught: list[_Taught | None] | msgspec.UnsetType = msgspec.UNSET
    history: str | msgspec.UnsetType = msgspec.UNSET
    turn_rewards: list[float] | msgspec.UnsetType = msgspec.UNSET
    roles: list[str] | msgspec.UnsetType = msgspec.UNSET


class _Hollow(msgspec.Struct):
    """A record without its arrays."""

    record: _Record
    lengths: dict[str, list[int]]
    """In bytes, of the pieces of each array in their order."""


_ARRAYS = {
    "token_ids": "I32",
    "logprobs": "F32",
    "mask": "BOOL",
    "experts": "I16",
    "taught_logprobs": "F32",
    "top_ids": "I32",
    "top_logprobs": "F32",
}
"""By name, with the type as safetensors calls it."""


def encode_trajectory(trajectory: Trajectory) -> bytes:
    return msgspec.msgpack.encode(_record_of(trajectory))


def array_bytes(trajectory: Trajectory) -> int:
    """What its arrays take, without those of one number a token that a teacher said."""
    tokens = sum(len(span.token_ids) for span in trajectory.spans())
    experts = sum(2 * experts.size for experts in trajectory.experts if experts is not None)
    likeliest = (taught.top_ids for taught in trajectory.taught if taught is not None)
    return 9 * tokens + experts + sum(8 * top_ids.size for top_ids in likeliest if top_ids is not None)


def split_trajectory(trajectory: Trajectory) -> tuple[bytes, dict[str, tuple[str, bytes]]]:
    """The record without its arrays, and those: by name, each with its type and its bytes."""
    record, pieces = _record_of(trajectory), defaultdict[str, list[bytes]](list)
    for place, attribute, name in _places(record):
        pieces[name].append(getattr(place, attribute))
        setattr(place, attribute, b"")
    hollow = _Hollow(record, {name: [len(piece) for piece in found] for name, found in pieces.items()})
    arrays = {name: (_ARRAYS[name], b"".join(found)) for name, found in pieces.items()}
    return msgspec.msgpack.encode(hollow), arrays


def join_trajectory(data: bytes, arrays: Mapping[str, bytes]) -> Trajectory:
    """What was split, or RecordError when the arrays are not those of the record."""
    try:
        hollow = msgspec.msgpack.decode(data, type=_Hollow)
    except msgspec.MsgspecError as error:
        raise RecordError(f"not the record of a trajectory: {error}") from error
    pieces = {name: _cut(arrays, name, lengths) for name, lengths in hollow.lengths.items()}
    for place, attribute, name in _places(hollow.record):
        setattr(place, attribute, next(pieces[name]))
    return _trajectory_of(hollow.record)


def _places(record: _Record) -> Iterator[tuple[msgspec.Struct, str, str]]:
    """Where its arrays are: in what, under which attribute; and the name of that which they are part of."""
    for sequence in record.sequences:
        for span in sequence:
            yield from ((span, name, name) for name in ("token_ids", "logprobs", "mask"))
    for experts in record.experts or ():
        if experts is not None:
            yield experts, "numbers", "experts"
    for taught in record.taught or ():
        if taught is not None:
            yield taught, "logprobs", "taught_logprobs"
            yield from ((taught, name, name) for name in ("top_ids", "top_logprobs"))


def _cut(arrays: Mapping[str, bytes], name: str, lengths: list[int]) -> Iterator[bytes]:
    whole, start = arrays.get(name, b""), 0
    if len(whole) != sum(lengths):
        raise RecordError(f"array {name!r} has {len(whole)} bytes, its record has {sum(lengths)}")
    pieces: list[bytes] = []
    for length in lengths:
        pieces.append(whole[start : start + length])
        start += length
    return iter(pieces)


def _record_of(trajectory: Trajectory) -> _Record:
    outcome = trajectory.outcome
    return _Record(
        program_id=trajectory.program_id,
        group_id=trajectory.group_id,
        task_id=trajectory.task_id,
        purpose=trajectory.purpose,
        sequences=[[_pack(span) for span in sequence] for sequence in trajectory.sequences],
        reward=trajectory.reward,
        stop_reason=trajectory.stop_reason,
        usage=asdict(trajectory.usage),
        outcome=(outcome.kind, outcome.reason, outcome.blame) if outcome else None,
        metrics=trajectory.metrics,
        experts=[_pack_experts(part) for part in trajectory.experts] or msgspec.UNSET,
        teacher=trajectory.teacher or msgspec.UNSET,
        taught=[_pack_taught(part) for part in trajectory.taught] or msgspec.UNSET,
        history=trajectory.history or msgspec.UNSET,
        turn_rewards=list(trajectory.turn_rewards) or msgspec.UNSET,
        roles=list(trajectory.roles) or msgspec.UNSET,
    )


def decode_trajectory(data: bytes) -> Trajectory:
    """The record that was encoded, or RecordError."""
    try:
        record = msgspec.msgpack.decode(data, type=_Record)
    except msgspec.MsgspecError as error:
        raise RecordError(f"not the record of a trajectory: {error}") from error
    return _trajectory_of(record)


def _trajectory_of(record: _Record) -> Trajectory:
    return Trajectory(
        program_id=ProgramId(record.program_id),
        group_id=GroupId(record.group_id),
        task_id=record.task_id,
        purpose=Purpose(record.purpose),
        sequences=tuple(tuple(_unpack(span) for span in sequence) for sequence in record.sequences),
        reward=record.reward,
        stop_reason=StopReason(record.stop_reason),
        usage=_usage(record.usage),
        outcome=_outcome(record.outcome),
        metrics=record.metrics,
        experts=tuple(map(_unpack_experts, record.experts or ())),
        teacher=record.teacher or "",
        taught=tuple(map(_unpack_taught, record.taught or ())),
        history=record.history or "",
        turn_rewards=tuple(record.turn_rewards or ()),
        roles=tuple(record.roles or ()),
    )


def _usage(values: dict[str, float]) -> Usage:
    whole = {name for name in values if name.endswith("_tokens")}
    counts = {name: int(values[name]) for name in whole}
    times = {name: value for name, value in values.items() if name not in whole}
    return replace(Usage(), **counts, **times)


def _outcome(packed: tuple[str, str, str | None] | None) -> Outcome | None:
    if packed is None:
        return None
    kind, reason, blame = packed
    return Outcome(OutcomeKind(kind), reason, Blame(blame) if blame else None)


def _pack_experts(experts: Experts | None) -> _Experts | None:
    if experts is None:
        return None
    tokens, layers, top_k = experts.shape
    return _Experts((tokens, layers, top_k), experts.astype("<i2").tobytes())


def _unpack_experts(packed: _Experts | None) -> Experts | None:
    if packed is None:
        return None
    return np.frombuffer(packed.numbers, "<i2").astype(np.int16).reshape(packed.shape)


def _pack_taught(taught: Taught | None) -> _Taught | None:
    if taught is None:
        return None
    logprobs, ids, top = taught.logprobs.astype("<f4").tobytes(), taught.top_ids, taught.top_logprobs
    if ids is None or top is None:
        return _Taught(taught.version, logprobs, 0, b"", b"")
    return _Taught(
        taught.version, logprobs, ids.shape[1], ids.astype("<i4").tobytes(), top.astype("<f4").tobytes()
    )


def _unpack_taught(packed: _Taught | None) -> Taught | None:
    if packed is None:
        return None
    logprobs = np.frombuffer(packed.logprobs, "<f4").astype(np.float32)
    if not packed.top_k:
        return Taught(packed.version, logprobs)
    shape = (len(logprobs), packed.top_k)
    ids = np.frombuffer(packed.top_ids, "<i4").astype(np.int32).reshape(shape)
    top = np.frombuffer(packed.top_logprobs, "<f4").astype(np.float32).reshape(shape)
    return Taught(packed.version, logprobs, ids, top)


def _pack(span: Span) -> _Span:
    return _Span(
        producer=span.producer,
        token_ids=span.token_ids.astype("<i4").tobytes(),
        logprobs=span.logprobs.astype("<f4").tobytes(),
        mask=span.mask.astype(np.uint8).tobytes(),
        versions=[(v.version.epoch, v.version.number, v.start, v.end) for v in span.versions],
        started_s=span.started_s,
        ended_s=span.ended_s,
    )


def _unpack(packed: _Span) -> Span:
    return Span(
        producer=Producer(packed.producer),
        token_ids=np.frombuffer(packed.token_ids, "<i4").astype(np.int32),
        logprobs=np.frombuffer(packed.logprobs, "<f4").astype(np.float32),
        mask=np.frombuffer(packed.mask, np.uint8).astype(np.bool_),
        versions=tuple(VersionSpan(Version(e, n), start, end) for e, n, start, end in packed.versions),
        started_s=packed.started_s,
        ended_s=packed.ended_s,
    )
