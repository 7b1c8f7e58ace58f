"""What one engine is measured to do: prefill rate, pace of decoding, how many should decode together.

The cap on decoding is found from measured inter-token latency: of the batch sizes that were seen, the
smallest that yields nearly as many tokens a second as the best, and one size more so that a change for the
better is noticed.  Where that is the largest size that was seen, there is no cap.
"""

from bisect import bisect_left

_DEFAULT_PREFILL = 5000.0
_SMOOTHING = 0.1
_SIZES = (
    *(1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128),
    *(128 * 2**octave * eighths // 8 for octave in range(4) for eighths in range(9, 17)),
)
_ENOUGH = 0.95
"""The smallest batch that yields so much of what the best one does is the best to have."""
_SAMPLES = 12
"""Turns before a batch size is judged."""


class EngineRates:
    """Written with the cost of every turn, and whenever one begins or ends."""

    def __init__(self, prefill_tokens_s: float | None, concurrency: int) -> None:
        self._prefill = prefill_tokens_s or _DEFAULT_PREFILL
        self._knows_prefill = prefill_tokens_s is not None
        self._concurrency = concurrency
        self._yields: dict[int, tuple[float, int]] = {}
        """By batch size: tokens a second of all together, and from how many turns that is known."""
        self._cap = concurrency
        self._program_seconds = 0.0
        self._counted_s = 0.0
        self._fastest_itl_s = 0.0
        self._recent_itl_s = 0.0

    @property
    def prefill_tokens_s(self) -> float:
        return self._prefill

    @property
    def decode_cap(self) -> int:
        """How many programs should decode together; never more than the engine takes."""
        return self._cap

    @property
    def pace(self) -> float:
        """How fast one request decodes now, against the fastest that was seen here: above 0, up to 1."""
        return self._fastest_itl_s / self._recent_itl_s if self._recent_itl_s else 1.0

    def program_seconds(self, together: int, now_s: float) -> float:
        """Integral over time of how many decode; `together` did since it was last asked for."""
        self._program_seconds += together * (now_s - self._counted_s)
        self._counted_s = now_s
        return self._program_seconds

    def prefilled(self, tokens: int, took_s: float) -> None:
        """A request prefilled `tokens` in `took_s`."""
        if tokens < 64 or took_s <= 0:
            return
        rate, share = tokens / took_s, 1.0
        if self._knows_prefill:
            # One odd sample moves it by little.
            rate, share = min(max(rate, self._prefill / 4), self._prefill * 4), _SMOOTHING
        self._knows_prefill = True
        self._prefill += share * (rate - self._prefill)

    def decoded(self, tokens: int, took_s: float, together: float, *, judged: bool = True) -> None:
        """A request generated `tokens` in `took_s` while `together` requests decoded on average.

        `judged`: it counts for the cap, which is for times when KV is short.  What a large batch of small
        contexts yields at the start of a run says nothing about them.
        """
        if tokens < 2 or took_s <= 0:
            return
        itl_s = took_s / tokens
        self._recent_itl_s = _moved(self._recent_itl_s, itl_s)
        self._fastest_itl_s = min(self._fastest_itl_s or itl_s, self._recent_itl_s)
        if not judged:
            return
        size = _SIZES[min(bisect_left(_SIZES, together), len(_SIZES) - 1)]
        before, samples = self._yields.get(size, (0.0, 0))
        share = max(_SMOOTHING, 1.0 / (samples + 1))
        self._yields[size] = (before + share * (together / itl_s - before), samples + 1)
        if samples + 1 >= _SAMPLES:
            self._cap = self._knee()

    def _knee(self) -> int:
        judged = sorted((size, rate) for size, (rate, samples) in self._yields.items() if samples >= _SAMPLES)
        best_rate = max(rate for _, rate in judged)
        enough = next(size for size, rate in judged if rate >= _ENOUGH * best_rate)
        if enough == judged[-1][0]:
            return self._concurrency
        return min(self._concurrency, _SIZES[_SIZES.index(enough) + 1])


def _moved(before: float, seen: float) -> float:
    return before + _SMOOTHING * (seen - before) if before else seen
