"""What one engine is measured to do: prefill rate, time between tokens, how many should decode together."""

from bisect import bisect_left

_DEFAULT_PREFILL = 5000.0
_SMOOTHING = 0.1
_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_GAIN = 1.02
"""More programs decode together only while that yields so much more tokens a second."""
_SAMPLES = 8
"""Turns before a batch size is judged."""


class EngineRates:
    """Written with the cost of every turn."""

    def __init__(self, prefill_tokens_s: float | None, concurrency: int) -> None:
        self._prefill = prefill_tokens_s or _DEFAULT_PREFILL
        self._knows_prefill = prefill_tokens_s is not None
        self._concurrency = concurrency
        self._itl: dict[int, tuple[float, int]] = {}
        self._cap = concurrency
        self._fastest_itl_s = 0.0
        self._recent_itl_s = 0.0

    @property
    def prefill_tokens_s(self) -> float:
        return self._prefill

    @property
    def decode_cap(self) -> int:
        """How many programs should decode together; never more than the engine takes."""
        return self._cap

    def prefilled(self, tokens: int, took_s: float) -> None:
        """A request prefilled `tokens` in `took_s`."""
        if tokens < 64 or took_s <= 0:
            return
        rate = tokens / took_s
        share = _SMOOTHING if self._knows_prefill else 1.0
        self._knows_prefill = True
        self._prefill += share * (rate - self._prefill)

    def decoded(self, tokens: int, took_s: float, together: int) -> None:
        """A request generated `tokens` in `took_s` while `together` requests decoded."""
        if tokens < 2 or took_s <= 0:
            return
        itl_s = took_s / tokens
        self._recent_itl_s = _moved(self._recent_itl_s, itl_s, _SMOOTHING)
        self._fastest_itl_s = min(self._fastest_itl_s or itl_s, self._recent_itl_s)
        size = _SIZES[min(bisect_left(_SIZES, together), len(_SIZES) - 1)]
        before, samples = self._itl.get(size, (0.0, 0))
        share = max(_SMOOTHING, 1.0 / (samples + 1))
        self._itl[size] = (before + share * (took_s / tokens - before), samples + 1)
        if samples + 1 >= _SAMPLES:
            self._cap = self._knee()

    @property
    def pace(self) -> float:
        """How fast one request decodes now, against the fastest that was seen here: above 0, up to 1."""
        return self._fastest_itl_s / self._recent_itl_s if self._recent_itl_s else 1.0

    def itl_s(self, together: int) -> float:
        """Seconds between tokens at that batch size, as far as it is known; 0 before anything is."""
        known = [(abs(size - together), itl) for size, (itl, _) in self._itl.items()]
        return min(known)[1] if known else 0.0

    def _knee(self) -> int:
        """The size beyond which more requests were seen to yield no more tokens; without such, no cap."""
        judged = sorted(size for size, (_, samples) in self._itl.items() if samples >= _SAMPLES)
        best = judged[0]
        for size in judged[1:]:
            if size / self._itl[size][0] > _GAIN * best / self._itl[best][0]:
                best = size
        if best == judged[-1]:
            return self._concurrency
        # One size more than the best is left open, so that a change for the better is noticed.
        return min(self._concurrency, _SIZES[_SIZES.index(best) + 1])


def _moved(before: float, seen: float, share: float) -> float:
    return before + share * (seen - before) if before else seen
