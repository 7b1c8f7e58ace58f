"""Held-out tasks before and after training, as readable text from a run's journal.

    python -m benchmarks.transcripts RUN MODEL --tasks 5 > docs/smollm2-trajectories.md

Every text is decoded from the recorded tokens, special tokens included; nothing is left out but the
system message, which is the same in all.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from tokenizers import Tokenizer

from sostenuto.records import Producer, Span, Trajectory
from sostenuto.runtime.journal import read_journal
from sostenuto.runtime.run_directory import RunDirectory
from sostenuto.types import Purpose

_PROGRAM = re.compile(r".*-(?P<step>\d+)-eval1-(?P<task>\d+)")
"""Ids of the first round of an evaluation, which is the one that samples."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Show held-out tasks before and after training.")
    parser.add_argument("run", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tasks", type=int, default=5, help="the first so many")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    for line in transcripts(arguments.run, tokenizer, arguments.tasks):
        sys.stdout.write(line + "\n")


def transcripts(run: Path, tokenizer: Tokenizer, tasks: int) -> Iterator[str]:
    """Lines of Markdown: each of the first tasks at the first and at the last evaluation."""
    with read_journal(RunDirectory(run).journal) as journal:
        found = {place: t for t in journal.trajectories(purpose=Purpose.EVALUATE) if (place := _place(t))}
    steps = sorted({step for step, _ in found})
    for task in sorted({task for _, task in found})[:tasks]:
        yield f"## Held-out task {task + 1}\n"
        for step in dict.fromkeys((steps[0], steps[-1])):
            yield from _transcript(found[step, task], f"After {step} steps of reinforcement", tokenizer)


def _place(trajectory: Trajectory) -> tuple[int, int] | None:
    match = _PROGRAM.fullmatch(trajectory.program_id)
    return (int(match["step"]), int(match["task"])) if match else None


def _transcript(trajectory: Trajectory, title: str, tokenizer: Tokenizer) -> Iterator[str]:
    yield f"### {title}: reward {trajectory.reward:g}\n"
    yield (
        f"{trajectory.stop_reason}; version {trajectory.oldest_version}; "
        f"{trajectory.trained_tokens} sampled tokens of {sum(map(len, trajectory.spans()))}\n"
    )
    for sequence in trajectory.sequences:
        yield "```text"
        for producer, text in _parts(sequence, tokenizer):
            yield f"[{producer}] {text}"
        yield "```\n"


def _parts(sequence: tuple[Span, ...], tokenizer: Tokenizer) -> Iterator[tuple[Producer, str]]:
    """What each side wrote, from the user's message on; the template's line ends are not shown."""
    begun = False
    for producer, spans in groupby(sequence, key=lambda span: span.producer):
        begun = begun or producer is Producer.USER
        ids = [int(id_) for span in spans for id_ in span.token_ids]
        text = tokenizer.decode(ids, skip_special_tokens=False).strip("\n")
        if begun and text:
            yield producer, text


if __name__ == "__main__":
    main()
