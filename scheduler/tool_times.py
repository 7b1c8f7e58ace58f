"""How long tools take, learned from their calls: at which rate a call of a given age comes back.

The rate is the Gittins index of the call: the best ratio, over all times t for which its KV could be held,

    P(back within t) / E[seconds held until it is back or t has passed]

so that a tool which never takes less than five seconds is not taken for one that never returns.  Where the
hazard only falls with age, as it does over all tools together, the index is the hazard.

Hazards are kept per tool in octaves of age, (returns + w) / (seconds spent in the octave + w / prior), with
counts that decay, so that a tool which has changed is learned anew.  The prior is `0.6 / (age + 0.5)`, the
shape of 432,510 tool calls of coding sessions (TraceLab, arXiv 2606.30560: median 0.3 s, mean 18.4 s, 4 % of
the calls over a minute).  The index: Gittins, J. R. Stat. Soc. B 41 (1979) 148.
"""

from dataclasses import dataclass, field
from math import exp, frexp

OCTAVES = 18
_FIRST_S = 0.125
"""The first octave ends here; each other one is twice as long as the one before."""
_PRIOR_WEIGHT = 4.0
_RENEWED_AFTER = 1.02
"""Rates are worked out anew when the calls have grown by this factor."""
_DECAY_CALLS = 1000.0
"""After so many calls of a tool, an old one counts for 1/e."""

EDGES_S = tuple(_FIRST_S * 2**k for k in range(OCTAVES - 1))
"""Where octaves end; the last one has no end."""


def octave_of(age_s: float) -> int:
    """Index of the octave that `age_s` falls into."""
    if age_s < _FIRST_S:
        return 0
    return min(frexp(age_s / _FIRST_S)[1], OCTAVES - 1)


_LENGTHS_S = (_FIRST_S, *EDGES_S[:-1], 16 * EDGES_S[-1])


def _prior(octave: int) -> float:
    begin_s = 0.0 if octave == 0 else EDGES_S[octave - 1]
    middle_s = begin_s * 1.5 if octave else _FIRST_S / 2
    return 0.6 / (middle_s + 0.5)


_PRIORS = tuple(_prior(octave) for octave in range(OCTAVES))


@dataclass(slots=True)
class _Tool:
    returns: list[float] = field(default_factory=lambda: [_PRIOR_WEIGHT] * OCTAVES)
    spent_s: list[float] = field(default_factory=lambda: [_PRIOR_WEIGHT / prior for prior in _PRIORS])
    rates: list[float] | None = None
    """Index by octave."""
    calls: int = 0
    mean_s: float = 0.0
    """Of its calls, the last ones counting most."""
    renewed_at: int = 0
    """How many calls had been seen when the rates were worked out."""
    weight: float = 1.0
    """Of the next call: it grows, which is the same as old ones decaying."""


class ToolTimes:
    """Written with every returned call; read when KV has to be given up."""

    def __init__(self) -> None:
        self._tools: dict[str, _Tool] = {}

    def learn(self, tool: str, took_s: float) -> None:
        """A call of `tool` took `took_s` seconds."""
        known = self._tools.get(tool)
        if known is None:
            known = self._tools[tool] = _Tool()
        last, weight = octave_of(took_s), known.weight
        begin_s = 0.0
        for octave in range(last):
            known.spent_s[octave] += weight * (EDGES_S[octave] - begin_s)
            begin_s = EDGES_S[octave]
        known.spent_s[last] += weight * (took_s - begin_s)
        known.returns[last] += weight
        known.calls += 1
        known.mean_s += (took_s - known.mean_s) / min(known.calls, _DECAY_CALLS)
        known.weight *= 1.0 + 1.0 / _DECAY_CALLS
        if known.weight > 1e6:
            _rescale(known)

    def mean_s(self, tool: str) -> float:
        """Of its calls; 0 for a tool that was never called."""
        known = self._tools.get(tool)
        return known.mean_s if known else 0.0

    def rate(self, tool: str, octave: int) -> float:
        """Index, per second, of a call of `tool` whose age is in `octave`."""
        known = self._tools.get(tool)
        if known is None:
            return _PRIORS[octave]
        if known.rates is None or known.calls > known.renewed_at * _RENEWED_AFTER:
            known.renewed_at = known.calls
            known.rates = _indices([r / s for r, s in zip(known.returns, known.spent_s, strict=True)])
        return known.rates[octave]


def _indices(hazards: list[float]) -> list[float]:
    """Index at the beginning of each octave."""
    ended = [1.0 - exp(-hazard * length) for hazard, length in zip(hazards, _LENGTHS_S, strict=True)]
    return [_index(hazards, ended, octave) for octave in range(OCTAVES)]


def _index(hazards: list[float], ended: list[float], octave: int) -> float:
    left, held_s, best = 1.0, 0.0, 0.0
    for later in range(octave, OCTAVES):
        held_s += left * ended[later] / hazards[later]
        left *= 1.0 - ended[later]
        best = max(best, (1.0 - left) / held_s)
    return best


def _rescale(tool: _Tool) -> None:
    for counts in (tool.returns, tool.spent_s):
        counts[:] = [count / tool.weight for count in counts]
    tool.weight = 1.0
