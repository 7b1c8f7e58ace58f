"""The quickstart's warm start: copying, then demonstrations until what was measured opens the gate."""

from collections.abc import Iterator
from itertools import islice

import numpy as np
from tokenizers import Tokenizer

from sostenuto.envs.declaration import declaration
from sostenuto.envs.storeroom.demonstrations import answers_to_check, lessons_to_check, warm_start
from sostenuto.envs.storeroom.environment import Storeroom
from sostenuto.runtime.jobs.events import WarmStartChecked, WarmStartStep
from sostenuto.runtime.jobs.workshop import Say
from sostenuto.runtime.quickstart.copying import copy_batches
from sostenuto.runtime.quickstart.recipe import Copying, Demonstrating, Gate, Recipe
from sostenuto.runtime.quickstart.tokenizer import copyable_ids
from sostenuto.runtime.rendering.demonstration import demonstrate
from sostenuto.runtime.rendering.folder import ModelFolder
from sostenuto.runtime.rendering.renderer import Renderer
from sostenuto.trainer.client import TrainerClient
from sostenuto.trainer.samples import Sample, demonstration
from sostenuto.types import Message


class WarmStarter:
    """One warm start.  The trainer holds the model and is spoken to by nobody else meanwhile."""

    def __init__(
        self, recipe: Recipe, folder: ModelFolder, renderer: Renderer, trainer: TrainerClient, seed: int
    ) -> None:
        self._recipe = recipe
        self._folder = folder
        self._renderer = renderer
        self._trainer = trainer
        self._seed = seed
        self._tools = tuple(declared.tool.schema for declared in declaration(Storeroom).tools.values())

    async def run(self, say: Say) -> WarmStartChecked:
        """Copy, imitate, and return what the last look at the gate has shown, open or not."""
        await self._copy(self._recipe.copying, say)
        return await self._imitate(self._recipe.demonstrating, say)

    async def _copy(self, plan: Copying, say: Say) -> None:
        await self._trainer.reset_optimizer(plan.schedule)
        ids = copyable_ids(Tokenizer.from_str(self._folder.tokenizer_json))
        batches = copy_batches(self._seed, plan.batch, ids, plan.shape)
        for step, (tokens, masks) in enumerate(islice(batches, plan.steps), 1):
            rows = zip(tokens, masks, strict=True)
            report = await self._trainer.fit([demonstration(row, mask) for row, mask in rows])
            say(WarmStartStep("copying", step, plan.steps, report))

    async def _imitate(self, plan: Demonstrating, say: Say) -> WarmStartChecked:
        await self._trainer.reset_optimizer(plan.schedule)
        shown = self._demonstrations(plan)
        for step in range(1, plan.most_steps + 1):
            report = await self._trainer.fit(list(islice(shown, plan.batch)))
            say(WarmStartStep("demonstrations", step, plan.steps, report))
            if step >= plan.steps and (step - plan.steps) % plan.check_every == 0:
                checked = await self._check(plan.gate, step)
                say(checked)
                if checked.passed:
                    return checked
        checked = await self._check(plan.gate, plan.most_steps)
        say(checked)
        return checked

    async def _check(self, gate: Gate, step: int) -> WarmStartChecked:
        lessons = [self._sample(shown) for shown in lessons_to_check(gate.lessons, self._seed)]
        answers = [
            _last_turn_only(self._sample(shown)) for shown in answers_to_check(gate.answers, self._seed)
        ]
        lessons_exact = (await self._trainer.exact(lessons)).exact_share
        answers_exact = (await self._trainer.exact(answers)).exact_share
        return WarmStartChecked(
            step=step,
            lessons_exact=lessons_exact,
            answers_exact=answers_exact,
            passed=lessons_exact >= gate.lessons_exact and answers_exact >= gate.answers_exact,
        )

    def _demonstrations(self, plan: Demonstrating) -> Iterator[Sample]:
        conversations = warm_start(
            self._seed,
            plan.steps * plan.batch,
            lessons_at_start=plan.lessons_at_start,
            lessons_at_end=plan.lessons_at_end,
        )
        return (self._sample(shown) for shown in conversations)

    def _sample(self, messages: list[Message]) -> Sample:
        (shown,) = demonstrate(self._renderer, messages, self._tools)
        return demonstration(shown.token_ids, shown.mask)


def _last_turn_only(sample: Sample) -> Sample:
    """The same conversation with nothing but its last assistant turn to learn."""
    begins = np.flatnonzero(np.diff(sample.mask.astype(np.int8), prepend=0) == 1)
    mask = sample.mask.copy()
    mask[: begins[-1]] = False
    return demonstration(sample.token_ids, mask)
