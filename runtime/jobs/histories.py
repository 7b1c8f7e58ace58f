"""Histories to continue, out of the records of a run or of conversations in a file, as tokens.

Before a turn of a record stands exactly what stood there when it was sampled.  A conversation is rendered as
it would be for a policy that comes to that turn.  Blocking.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, JsonValue, ValidationError

from sostenuto.envs.declaration import declaration
from sostenuto.errors import ConfigError, SostenutoError
from sostenuto.records import Producer, Trajectory
from sostenuto.records import Sequence as Spans
from sostenuto.runtime.gateway.bodies import tool_of
from sostenuto.runtime.gateway.dialects.chat import ToolBody
from sostenuto.runtime.gateway.dialects.openai import MessageBody, messages_of
from sostenuto.runtime.jobs.job import RLJob
from sostenuto.runtime.jobs.prefixes import Prefixes
from sostenuto.runtime.journal import read_journal
from sostenuto.runtime.program import History
from sostenuto.runtime.rendering.renderer import Piece, Renderer
from sostenuto.tools.wire import ToolSchema
from sostenuto.types import OutcomeKind

_UNUSABLE = (OutcomeKind.FAILED, OutcomeKind.CANCELLED)


class _Conversation(BaseModel):
    messages: Annotated[list[MessageBody], Field(min_length=1)]
    tools: list[ToolBody] | None = None
    """None: those of the job's environment."""
    task: dict[str, JsonValue] = {}


def load_histories(job: RLJob, prefixes: Prefixes, renderer: Renderer) -> tuple[History, ...]:
    """All that have room for a turn; ConfigError when there is none, or the source cannot be read."""
    if prefixes.run is not None:
        found = _of_run(prefixes.run, prefixes)
    else:
        assert prefixes.conversations is not None, "Prefixes says so"
        tools = tuple(declared.tool.schema for declared in declaration(job.env).tools.values())
        found = _of_file(prefixes.conversations, prefixes, renderer, tools)
    most = job.limits.total_tokens
    histories = tuple(history for history in found if most is None or history.tokens < most)
    if not histories:
        raise ConfigError(
            f"{prefixes.where}: it has no turn from the {prefixes.from_turn}. on with a history below "
            f"limits.total_tokens ({most}); give from_turn = 1, a higher limit, or another source"
        )
    return histories


def _of_run(run: Path, prefixes: Prefixes) -> Iterator[History]:
    with read_journal(run / "journal.db") as journal:
        for record in journal.trajectories():
            if record.outcome is None or record.outcome.kind not in _UNUSABLE:
                yield from _of_record(record, prefixes)


def _of_record(record: Trajectory, prefixes: Prefixes) -> Iterator[History]:
    for branch, sequence in enumerate(record.sequences):
        name = f"{record.program_id}.{branch}" if branch else record.program_id
        for turn, begin in enumerate(_turns(sequence), 1):
            # In a branch the history holds turns of the branch before.
            if turn >= prefixes.from_turn or branch:
                pieces = tuple(Piece(span.producer, span.token_ids.tolist()) for span in sequence[:begin])
                yield History(f"history:{prefixes.run}:{name}/{turn}", pieces, prefixes.teacher)


def _turns(sequence: Spans) -> list[int]:
    """Where turns begin that were sampled in this sequence; one in several parts begins once."""
    sampled = [span.producer is Producer.POLICY and bool(span.mask.any()) for span in sequence]
    return [at for at in range(1, len(sampled)) if sampled[at] and not sampled[at - 1]]


def _of_file(
    file: Path, prefixes: Prefixes, renderer: Renderer, tools: tuple[ToolSchema, ...]
) -> Iterator[History]:
    for number, line in _lines(file):
        where = f"{prefixes.where}: line {number}"
        try:
            read = _Conversation.model_validate_json(line)
            own = tools if read.tools is None else _tools_of(read.tools)
            for turn, begin in enumerate(_answers(read), 1):
                if turn >= prefixes.from_turn:
                    pieces = tuple(renderer.start(messages_of(read.messages[:begin]), own))
                    name = f"history:{file}:{number}/{turn}"
                    yield History(name, pieces, prefixes.teacher, read.task)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "the whole"
            raise ConfigError(f"{where}: {place}: {first['msg']}") from error
        except SostenutoError as error:
            raise ConfigError(f"{where}: {error}") from error


def _answers(read: _Conversation) -> list[int]:
    """Where the assistant's turns begin."""
    roles = [message.role for message in read.messages]
    return [at for at in range(1, len(roles)) if roles[at] == "assistant" and roles[at - 1] != "assistant"]


def _tools_of(bodies: list[ToolBody]) -> tuple[ToolSchema, ...]:
    return tuple(tool_of(body.function, f"tools.{at}.function") for at, body in enumerate(bodies))


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    try:
        with file.open(encoding="utf-8") as lines:
            yield from ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prefixes: {file}: {error}; give a file of JSON lines in UTF-8") from error
