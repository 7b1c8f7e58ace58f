"""Live programs as traces: what a finished record says of its turns, and a file that they are added to."""

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import pairwise, takewhile
from pathlib import Path

from sostenuto.errors import ConfigError
from sostenuto.records import Producer, Span, Trajectory
from sostenuto.runtime.simulation.plan import Plan
from sostenuto.runtime.simulation.traces.native import (
    BLOCK_TOKENS,
    Header,
    ProgramLine,
    header_text,
    line_text,
)
from sostenuto.runtime.simulation.traces.reading import UNNAMED_TOOL, Call, parsed_json, turns_of


class TraceRecorder:
    """Adds one line to a trace of our own format for each program that has finished."""

    def __init__(self, path: Path, *, name: str = "recorded") -> None:
        """Begin the file, or go on with one; ConfigError when it is something else."""
        self._path = path
        if path.exists() and path.stat().st_size:
            _drop_torn_end(path)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(header_text(Header(name=name)), encoding="utf-8")

    def record(self, trajectory: Trajectory) -> None:
        """A program for which no engine sampled anything leaves no line."""
        plan = plan_of(trajectory)
        if plan is None:
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line_text(ProgramLine.of(plan, _prompt_blocks(trajectory))))


def plan_of(trajectory: Trajectory, *, tools: Sequence[str] = (), group_size: int = 1) -> Plan | None:
    """The program as it could be simulated: tokens and tool seconds of each turn.

    None when nothing was sampled.  `tools`: what was called after each turn, where that is known.  Times
    are the run's clock.  Tool times contain the tool server's queue; the time to prepare contains scoring,
    which a record does not tell apart.
    """
    calls = [
        Call(
            call.prompt_tokens, call.output_tokens, call.wait_s, tools[i] if i < len(tools) else UNNAMED_TOOL
        )
        for i, call in enumerate(_calls(trajectory))
    ]
    if not calls:
        return None
    begun_s = next(trajectory.spans()).started_s
    return Plan(
        id=trajectory.program_id,
        group=trajectory.group_id,
        group_size=group_size,
        shared=(),
        prompt_tokens=calls[0].prompt_tokens,
        turns=turns_of(calls),
        arrival_s=begun_s - trajectory.usage.environment_s,
        prepare_s=trajectory.usage.environment_s,
    )


def _calls(trajectory: Trajectory) -> Iterator[Call]:
    sampled = list(_sampled(trajectory))
    for (prompt_tokens, span, _), (_, _, returned_s) in pairwise(sampled):
        yield Call(prompt_tokens, len(span), max(0.0, returned_s - span.ended_s))
    if sampled:
        prompt_tokens, span, _ = sampled[-1]
        yield Call(prompt_tokens, len(span))


def _sampled(trajectory: Trajectory) -> Iterator[tuple[int, Span, float]]:
    """Each turn: the length of its prompt, what was sampled, when the prompt was complete."""
    for sequence in trajectory.sequences:
        tokens, complete_s = 0, 0.0
        for span in sequence:
            if _was_sampled(span):
                yield tokens, span, complete_s
            complete_s = max(complete_s, span.ended_s)
            tokens += len(span)


def _was_sampled(span: Span) -> bool:
    """A policy's span without a mask was sampled in another sequence, and is context here."""
    return span.producer is Producer.POLICY and bool(span.mask.any())


def _prompt_blocks(trajectory: Trajectory) -> list[str]:
    """A hash of each whole block of the first prompt, together with all before it."""
    first = takewhile(lambda span: not _was_sampled(span), trajectory.sequences[0])
    ids = [token for span in first for token in span.token_ids.tolist()]
    blocks: list[str] = []
    digest = blake2b(digest_size=8)
    for end in range(BLOCK_TOKENS, len(ids), BLOCK_TOKENS):
        digest.update(repr(ids[end - BLOCK_TOKENS : end]).encode())
        blocks.append(digest.hexdigest())
    return blocks


def _drop_torn_end(path: Path) -> None:
    """What a crash left of a last line would be in the middle of the file from now on."""
    with path.open("r+b") as file:
        data = file.read()
        first, _, _ = data.partition(b"\n")
        try:
            parsed_json(Header, first.decode(), f"{path}:1")
        except (ConfigError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{path}: not a trace that can be added to ({error}); give another path"
            ) from error
        if not data.endswith(b"\n"):
            file.truncate(data.rfind(b"\n") + 1)
