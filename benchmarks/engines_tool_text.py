"""Programs whose text is tool calls, and what an engine makes of them: what speculation is measured on.

The conversations are the storeroom's, each a few solved tasks as examples and then more of them, one
model call after the other with what the tool said in between.  Contexts follow the script, whatever was
sampled: two engines are asked for the same.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from time import process_time

from sostenuto.envs.declaration import declaration
from sostenuto.envs.storeroom.demonstrations import demonstrate_in_full
from sostenuto.envs.storeroom.environment import Storeroom
from sostenuto.envs.storeroom.world import training_tasks
from sostenuto.runtime.engines.embedded.core import Core
from sostenuto.runtime.engines.embedded.refusal import Refusal
from sostenuto.runtime.engines.wire import GenerateReply, GenerateRequest, Sampling
from sostenuto.runtime.rendering.choice import open_renderer
from sostenuto.runtime.rendering.demonstration import Demonstration, demonstrate
from sostenuto.runtime.rendering.folder import ModelFolder
from sostenuto.types import Message

_EXAMPLES = 3
TURNS_OF_A_TASK = 4
_TURN_TOKENS = 48
_FIRST_TOKENS = 16
"""Sampled before the clock starts: what guesses has computed the context, too."""


@dataclass(frozen=True, slots=True)
class Text:
    """Of one model's tokens."""

    stop_token_ids: tuple[int, ...]
    programs: tuple[tuple[list[int], ...], ...]
    """Of each program the context before each of its turns."""
    rendered: tuple[Demonstration, ...]
    """The whole conversations."""


def tool_text(folder: Path, programs: int, *, tasks: int, seed: int) -> Text:
    """`tasks` of each program come after its examples; a seed gives the same text."""
    renderer, worlds = open_renderer(ModelFolder.open(folder)), training_tasks(seed)
    tools = tuple(declared.tool.schema for declared in declaration(Storeroom).tools.values())
    rendered: list[Demonstration] = []
    for _ in range(programs):
        messages: list[Message] = []
        for task in islice(worlds, _EXAMPLES + tasks):
            messages += demonstrate_in_full(task)
        (one,) = demonstrate(renderer, messages, tools)
        rendered.append(one)
    contexts = tuple(tuple(islice(_contexts(one), _EXAMPLES * TURNS_OF_A_TASK, None)) for one in rendered)
    return Text(renderer.stop_token_ids, contexts, tuple(rendered))


def _contexts(rendered: Demonstration) -> Iterator[list[int]]:
    """What comes before each of the assistant's turns."""
    at = 0
    for is_turn, run in groupby(rendered.mask.tolist()):
        if is_turn:
            yield rendered.token_ids[:at].tolist()
        at += len(list(run))


@dataclass(frozen=True, slots=True)
class Sampled:
    """What came of all turns but the first tokens, and the processor time that it took."""

    turns: dict[str, list[int]]
    spent_s: float

    @property
    def rate(self) -> float:
        """Tokens a second; what tools say is computed on the way, too."""
        return sum(map(len, self.turns.values())) / self.spent_s


def sample(core: Core, text: Text, programs: Sequence[int], *, seed: int, temperature: float) -> Sampled:
    """Run these programs side by side; each one's first context is computed before the clock starts."""
    run = _Run(core, text, seed, temperature, {})
    for number in programs:
        run.submit(number, 0, tokens=_FIRST_TOKENS, goes_on=False)
    run.to_its_end()
    run.turns.clear()
    before_s = process_time()
    for number in programs:
        run.submit(number, 0, tokens=_TURN_TOKENS, goes_on=True)
    run.to_its_end()
    spent_s = process_time() - before_s
    for number in programs:
        core.release(f"{number}")
    return Sampled(run.turns, spent_s)


@dataclass(frozen=True, slots=True)
class _Run:
    core: Core
    text: Text
    seed: int
    temperature: float
    turns: dict[str, list[int]]

    def submit(self, number: int, turn: int, *, tokens: int, goes_on: bool) -> None:
        def answered(reply: GenerateReply | Refusal) -> None:
            assert isinstance(reply, GenerateReply), reply
            self.turns[name] = reply.token_ids
            if goes_on and turn + 1 < len(self.text.programs[number]):
                self.submit(number, turn + 1, tokens=tokens, goes_on=True)

        name = f"{number}-{turn}"
        sampling = Sampling(
            seed=self.seed, temperature=self.temperature, stop_token_ids=self.text.stop_token_ids
        )
        request = GenerateRequest(
            request_id=name, program_id=f"{number}", token_ids=self.text.programs[number][turn],
            max_new_tokens=tokens, sampling=sampling,
        )  # fmt: skip
        self.core.submit(request, answered)

    def to_its_end(self) -> None:
        while self.core.busy:
            self.core.step()
