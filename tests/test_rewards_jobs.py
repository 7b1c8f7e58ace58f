"""Rewards of whole jobs that come from elsewhere than `reward`, with a tiny real model."""

from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest

from fakes_training import ParityLater, numbers
from real_jobs import build_weights
from scripted import TINY, children, write_tokenizer_folder
from sostenuto.errors import ConfigError
from sostenuto.runtime.config import RuntimeConfig
from sostenuto.runtime.jobs.events import RewardAwaited, StepTrained
from sostenuto.runtime.jobs.finished import Finished
from sostenuto.runtime.jobs.job import RLJob
from sostenuto.runtime.jobs.rewarding import GroupRewards, LateRewards
from sostenuto.runtime.runtime import Runtime
from sostenuto.trainer.algorithms import GRPO
from sostenuto.types import Limits


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tokenizer_folder(tmp_path_factory.mktemp("model"), TINY)
    return build_weights(folder)


def by_length(members: Sequence[Finished]) -> list[float]:
    """Blocking, as a function of a user's may be: how many of the group say no more than this one."""
    lengths = [member.metrics["length"] for member in members]
    assert [len(member.answer) for member in members] == lengths
    assert all(member.reward == 0.25 for member in members)
    return [float(sum(other <= length for other in lengths)) for length in lengths]


async def test_programs_wait_for_late_rewards_and_groups_are_then_ranked(tmp_path: Path, model: Path):
    before = children()
    job = RLJob(
        env=ParityLater, model=model, tasks=numbers(64), steps=2, groups_per_step=2,
        algorithm=GRPO(group_size=4, zero_spread="keep"), limits=Limits(turns=2, turn_tokens=6),
        late_rewards=LateRewards(deadline_s=300), group_rewards=GroupRewards(by_length),
    )  # fmt: skip
    async with Runtime(RuntimeConfig(directory=tmp_path)) as runtime:
        handle = await runtime.submit(job)

        async def give() -> None:
            async for event in handle.events():
                if isinstance(event, RewardAwaited):
                    runtime.reward(event.program, 0.25, metrics={"taste": 1.0})

        async with anyio.create_task_group() as group:
            group.start_soon(give)
        result = await handle.result()
        with pytest.raises(ConfigError, match="no program of that id"):
            runtime.reward("job-000000-0", 1.0)
        assert runtime.awaiting_rewards == ()
        steps = [event async for event in handle.events() if isinstance(event, StepTrained)]
    assert result.ledger.closes
    assert result.ledger.outcomes["trained"] == 2 * 2 * 4
    # Ranks of four are 1 to 4, and never 0.25.
    assert all(1 <= step.reward <= 4 for step in steps)
    assert children() == before
