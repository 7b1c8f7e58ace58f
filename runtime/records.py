"""Trajectories as bytes: msgpack, arrays as raw little-endian buffers."""

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
    experts: list[tuple[tuple[int, int, int], bytes] | None] | msgspec.UnsetType = msgspec.UNSET
    teacher: str | msgspec.UnsetType = msgspec.UNSET
    taught: list[_Taught | None] | msgspec.UnsetType = msgspec.UNSET
    history: str | msgspec.UnsetType = msgspec.UNSET
    turn_rewards: list[float] | msgspec.UnsetType = msgspec.UNSET


def encode_trajectory(trajectory: Trajectory) -> bytes:
    outcome = trajectory.outcome
    record = _Record(
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
    )
    return msgspec.msgpack.encode(record)


def decode_trajectory(data: bytes) -> Trajectory:
    """The record that was encoded, or RecordError."""
    try:
        record = msgspec.msgpack.decode(data, type=_Record)
    except msgspec.MsgspecError as error:
        raise RecordError(f"not the record of a trajectory: {error}") from error
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


def _pack_experts(experts: Experts | None) -> tuple[tuple[int, int, int], bytes] | None:
    if experts is None:
        return None
    tokens, layers, top_k = experts.shape
    return (tokens, layers, top_k), experts.astype("<i2").tobytes()


def _unpack_experts(packed: tuple[tuple[int, int, int], bytes] | None) -> Experts | None:
    if packed is None:
        return None
    shape, data = packed
    return np.frombuffer(data, "<i2").astype(np.int16).reshape(shape)


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
