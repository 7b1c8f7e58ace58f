"""Whole jobs with real processes, over models of a few parameters."""

import subprocess
import sys
from pathlib import Path

from sostenuto.records import Trajectory, validate
from sostenuto.runtime.config import RuntimeConfig, ToolServerSettings
from sostenuto.runtime.jobs.events import StepTrained
from sostenuto.runtime.jobs.job import RLJob
from sostenuto.runtime.journal import read_journal
from sostenuto.runtime.runtime import Runtime
from sostenuto.types import Purpose


def build_weights(folder: Path, seed: int = 1) -> Path:
    """Random ones for a folder that has the rest of a model."""
    command = [sys.executable, "-m", "sostenuto.trainer.build", "--folder", str(folder), "--seed", str(seed)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


async def train(folder: Path, job: RLJob) -> tuple[list[StepTrained], list[Trajectory]]:
    """Its steps, and the records of its programs."""
    config = RuntimeConfig(directory=folder, tool_server=ToolServerSettings(unsafe=True))
    async with Runtime(config) as runtime:
        handle = await runtime.submit(job)
        steps = [event async for event in handle.events() if isinstance(event, StepTrained)]
        result = await handle.result()
    assert result.ledger.closes
    assert (result.ledger.running, result.ledger.sealed) == (0, 0)
    with read_journal(folder / "journal.db") as reader:
        records = list(reader.trajectories(purpose=Purpose.TRAIN))
    for record in records:
        validate(record)
    return steps, records
