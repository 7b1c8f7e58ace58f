"""How many tokens to draft for each request of a batch."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one forward pass by tokens fed: measured at a few, straight lines between them."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def __call__(self, tokens: int) -> float:
        """Beyond the last point the last line goes on."""
        if len(self.tokens) == 1:
            return self.seconds[0]
        right = min(max(bisect_left(self.tokens, tokens), 1), len(self.tokens) - 1)
        (x0, x1), (y0, y1) = self.tokens[right - 1 : right + 1], self.seconds[right - 1 : right + 1]
        return y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)


def measure(run: Callable[[int], None], points: Sequence[int], now_s: Callable[[], float]) -> StepCost:
    """The least of three runs at each of `points`, never less than at fewer tokens."""
    seconds: list[float] = []
    run(points[0])
    for tokens in points:
        took: list[float] = []
        for _ in range(3):
            began_s = now_s()
            run(tokens)
            took.append(now_s() - began_s)
        seconds.append(max(min(took), seconds[-1] if seconds else 0.0))
    return StepCost(tuple(points), tuple(seconds))


def best_lengths(
    chances: Sequence[float],
    most: Sequence[int],
    rows: int,
    step_s: Callable[[int], float],
    draft_s: float,
    spare: int,
) -> list[int]:
    """Drafted tokens for each request, so that the most tokens come out of a second.

    `rows` requests decode in the step; the j-th guess of a request with chance p adds p^j tokens
    (Leviathan et al. 2023, section 3), and costs its place in the pass and `draft_s`.  At most `spare`
    guesses in all, `most[i]` for request i.
    """
    gains = sorted(
        ((chance**j, -j, i) for i, chance in enumerate(chances) for j in range(1, most[i] + 1)), reverse=True
    )
    tokens, best, best_rate = float(rows), 0, rows / step_s(rows)
    for count, (gain, _, _) in enumerate(gains[:spare], 1):
        tokens += gain
        rate = tokens / (step_s(rows + count) + count * draft_s)
        if rate > best_rate:
            best, best_rate = count, rate
    lengths = [0] * len(chances)
    for _, _, i in gains[:best]:
        lengths[i] += 1
    return lengths
