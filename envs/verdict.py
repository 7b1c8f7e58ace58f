"""What a reward function returned, read strictly: a reward is a finite number or it is a failure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import cast

from sostenuto.envs.later import Later
from sostenuto.errors import EnvironmentFailure


@dataclass(frozen=True, slots=True)
class Verdict:
    """A reward and the metrics beside it, all finite.

    `value`: None where it comes later.  `turns`: how the reward came about, turn by turn; empty where only
    the whole was told.
    """

    value: float | None
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    turns: tuple[float, ...] = ()


def read_verdict(returned: object, doing: str, *, turns: int | None = None) -> Verdict:
    """A number, a mapping of numbers with "reward" or "turns", or Later; all else is an EnvironmentFailure.

    `turns`: how many the episode had, each of which "turns" has a reward for; None: nobody knows.
    """
    if isinstance(returned, Later):
        metrics = {name: _finite(value, f"{doing}: {name!r}") for name, value in returned.metrics.items()}
        return Verdict(None, metrics)
    if not isinstance(returned, Mapping):
        return Verdict(_finite(returned, doing))
    told = {str(name): value for name, value in cast("Mapping[object, object]", returned).items()}
    by_turn = _by_turn(told.pop("turns"), doing, turns) if "turns" in told else ()
    metrics = {name: _finite(value, f"{doing}: {name!r}") for name, value in told.items()}
    if by_turn:
        whole = metrics.setdefault("reward", math.fsum(by_turn))
        if not math.isclose(whole, math.fsum(by_turn), rel_tol=1e-6, abs_tol=1e-6):
            raise EnvironmentFailure(
                f"{doing}: the reward is {whole}, its turns come to {math.fsum(by_turn)}; leave 'reward' out"
            )
    if "reward" not in metrics:
        raise EnvironmentFailure(f"{doing}: its metrics have no 'reward', only {sorted(metrics)}")
    return Verdict(metrics.pop("reward"), metrics, by_turn)


def _by_turn(value: object, doing: str, turns: int | None) -> tuple[float, ...]:
    if turns is None:
        raise EnvironmentFailure(f"{doing}: returned 'turns'; an agent's turns are its own, return 'reward'")
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise EnvironmentFailure(f"{doing}: 'turns' is {value!r:.80}; return one number for each turn")
    rewards = [_finite(one, f"{doing}: 'turns'") for one in cast("Sequence[object]", value)]
    if len(rewards) != turns:
        raise EnvironmentFailure(
            f"{doing}: 'turns' has {len(rewards)} rewards, the episode {turns} turns (episode.turns); "
            "return one number for each"
        )
    return tuple(rewards)


def _finite(value: object, doing: str) -> float:
    if not isinstance(value, Real):
        raise EnvironmentFailure(f"{doing}: returned {value!r:.80}; return a finite float")
    number = float(value)
    if not math.isfinite(number):
        raise EnvironmentFailure(f"{doing}: returned {number}; a reward must be finite")
    return number
