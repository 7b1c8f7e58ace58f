"""What the engines of a run are seen to do, as values that cross the control socket."""

from typing import assert_never

from pydantic import BaseModel, ConfigDict

from sostenuto.runtime.crew import Crew
from sostenuto.runtime.dispatcher import Dispatcher
from sostenuto.runtime.fleet import Seen
from sostenuto.runtime.keeper import Keeper, Standing
from sostenuto.scheduler.gate import EngineState
from sostenuto.types import EngineId


class EngineView(BaseModel):
    """One engine as it stands.  None: not known."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    job: str = ""
    kind: str
    url: str = ""
    """Where it listens, of one that runs elsewhere."""
    state: str
    """joining, serving, updating, draining, slow, lost or quarantined."""
    reason: str = ""
    """Why it does not serve."""
    version: str = ""
    model: str = ""
    concurrency: int | None = None
    kv_tokens: int | None = None
    """The whole pool."""
    used_kv_tokens: int | None = None
    held_kv_tokens: int | None = None
    """Of these, by programs between turns."""
    running: int | None = None
    waiting: int | None = None
    hit_rate: float | None = None
    """Of prompt tokens between its last two reports."""
    token_s: float | None = None
    """Median time for a sampled token, over its last turns."""
    prefill_tokens_s: float | None = None
    guesses_right: float | None = None
    """Share of the guesses at next tokens since the last update of weights; None: there were none."""
    guesses_right_before: float | None = None
    """Between the two updates before."""
    draft_version: str = ""
    """Of the weights that guess."""
    restarts: int = 0


class Engines(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    engines: tuple[EngineView, ...]


def views_of(job: str, crew: Crew) -> list[EngineView]:
    """The job's engines, in the order in which they were added."""
    return [_view(job, keeper, crew.dispatcher) for keeper in crew.keepers]


def _view(job: str, keeper: Keeper, dispatcher: Dispatcher) -> EngineView:
    engine_id = keeper.source.id
    state, reason = _state(keeper, dispatcher, engine_id)
    view = EngineView(
        id=engine_id,
        job=job,
        kind=keeper.source.kind,
        url=keeper.source.url,
        state=state,
        reason=reason,
        version=str(dispatcher.serves(engine_id) or ""),
        restarts=keeper.restarts,
    )
    seen = dispatcher.fleet.seen(engine_id)
    return view if seen is None else _with_what_was_seen(view, seen)


def _state(keeper: Keeper, dispatcher: Dispatcher, engine_id: EngineId) -> tuple[str, str]:
    """The state, and why it is no better."""
    match keeper.standing:
        case Standing.MEMBER:
            return _in_the_gate(dispatcher, engine_id)
        case Standing.JOINING | Standing.LOST | Standing.DRAINING:
            return keeper.standing.value, keeper.reason
        case _:
            assert_never(keeper.standing)


def _in_the_gate(dispatcher: Dispatcher, engine_id: EngineId) -> tuple[str, str]:
    gate = dispatcher.scheduler.gate
    state, reason = gate.states().get(engine_id), gate.why_not(engine_id)
    if state is None or state is EngineState.QUARANTINED:
        return ("lost" if state is None else "quarantined"), reason
    if state is not EngineState.SERVING:
        return "updating", reason
    return ("slow" if reason else "serving"), reason


def _with_what_was_seen(view: EngineView, seen: Seen) -> EngineView:
    said = {
        "model": seen.facts.model,
        "concurrency": seen.facts.concurrency,
        "kv_tokens": seen.facts.kv_tokens,
    }
    measured = {
        "hit_rate": seen.hit_rate,
        "token_s": seen.token_s,
        "prefill_tokens_s": seen.prefill_tokens_s,
    }
    return view.model_copy(update=said | measured | _load(seen) | _guesses(seen))


def _load(seen: Seen) -> dict[str, int]:
    load = seen.load
    if load is None:
        return {}
    return {
        "used_kv_tokens": load.used_kv_tokens,
        "held_kv_tokens": load.held_kv_tokens,
        "running": load.running,
        "waiting": load.waiting,
    }


def _guesses(seen: Seen) -> dict[str, object]:
    told = seen.load and seen.load.speculation
    if told is None:
        return {}
    return {
        "guesses_right": told.since_update.right,
        "guesses_right_before": told.before_update.right,
        "draft_version": told.version or "",
    }
