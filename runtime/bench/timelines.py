"""Plots over time: the life of one program, and what a fleet held, under each policy."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sostenuto.runtime.bench.drawing import PHASES, drawn, new_figure
from sostenuto.runtime.bench.plots import Ink
from sostenuto.runtime.bench.summary import program_ended
from sostenuto.runtime.simulation.results import ProgramResult, RunResult, Series
from sostenuto.types import ProgramId

FloatArray = NDArray[np.float64]

_POINTS = 600


def program_to_show(runs: Sequence[RunResult]) -> ProgramId | None:
    """Of the programs that have a timeline in every run: one slower than nine in ten of the first run."""
    told = [{p.id for p in run.programs if p.stretches and program_ended(p)} for run in runs]
    common = set[ProgramId].intersection(*told) if told else set[ProgramId]()
    ranked = sorted((p.completion_s, p.id) for p in runs[0].programs if p.id in common) if runs else []
    return ranked[(len(ranked) * 9) // 10][1] if ranked else None


@drawn
def program_timeline(runs: Mapping[str, RunResult], program_id: ProgramId) -> Any:  # noqa: ANN401
    """The phases of one program from its submission on, one line for each policy."""
    figure, axes = new_figure(11.0, 1.1 + 0.42 * len(runs))
    lives = [_program(run, program_id) for run in runs.values()]
    for phase, (label, colour) in PHASES.items():
        spans = [
            (at, s.start_s - life.submitted_s, s.end_s - s.start_s)
            for at, life in enumerate(lives)
            for s in life.stretches
            if s.what == phase
        ]
        for at in sorted({at for at, _, _ in spans}):
            bars = [(start_s, length_s) for line, start_s, length_s in spans if line == at]
            axes.broken_barh(bars, (at - 0.31, 0.62), color=colour, linewidth=0)
        if spans:
            axes.barh([0], [0], color=colour, label=label)
    axes.set_yticks(range(len(runs)), list(runs))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set(xlabel="seconds since its submission", xlim=(0, None))
    axes.figure.legend(loc="outside upper left", ncols=7)
    return figure


def has_series(run: RunResult) -> bool:
    return any(engine.used_tokens for engine in run.engines)


@drawn
def fleet_timeline(runs: Mapping[str, RunResult], ink: Ink) -> Any:  # noqa: ANN401
    """KV in use, programs that decode, programs that wait: over time, a line for each policy.  No legend."""
    figure, (used, decoding, waiting) = new_figure(11.0, 5.4, nrows=3, sharex=True)
    for label, run in runs.items():
        times_s = np.linspace(0, run.makespan_s, _POINTS)
        line = ink.line(label) | {"linewidth": 1.1}
        held = _summed([engine.used_tokens for engine in run.engines], times_s)
        used.plot(times_s, held / 1000, **line)
        decoding.plot(times_s, _summed([engine.decoding for engine in run.engines], times_s), **line)
        waiting.plot(times_s, _summed([run.waiting], times_s), **line)
    used.set(title="KV in use by requests that run (thousand tokens)", ylim=(0, None))
    decoding.set(title="programs that decode", ylim=(0, None))
    waiting.set(title="programs that wait for an engine", xlabel="time (s)", ylim=(0, None), xlim=(0, None))
    return figure


def _summed(many: Sequence[Series], times_s: FloatArray) -> FloatArray:
    return np.sum([np.zeros(len(times_s)), *(_values(series, times_s) for series in many)], axis=0)


def _values(series: Series, times_s: FloatArray) -> FloatArray:
    """Of a step function; 0 before its first step."""
    if not series:
        return np.zeros(len(times_s))
    steps = np.array(series)
    at = np.searchsorted(steps[:, 0], times_s, side="right") - 1
    return np.where(at < 0, 0.0, steps[np.maximum(at, 0), 1])


def _program(run: RunResult, program_id: ProgramId) -> ProgramResult:
    return next(program for program in run.programs if program.id == program_id)
