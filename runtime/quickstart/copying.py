"""What the model copies before it is shown any text: random tokens, then spans of them again.

It learns to look up what followed a token earlier in its context.  Arguments and answers of tool
calls are such copies, and from demonstrations alone this is learnt much later.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from sostenuto.runtime.quickstart.recipe import CopyShape


def copy_batches(
    seed: int, batch: int, token_ids: NDArray[np.int32], shape: CopyShape
) -> Iterator[tuple[NDArray[np.int32], NDArray[np.bool_]]]:
    """Draw batches without end: tokens (batch, T) int32, all of `token_ids`, and what to learn of them.

    T = fresh + spans * span_tokens.  The mask (batch, T) is set where a token follows from what came before.
    """
    rng = np.random.default_rng([seed, 0xC0])
    learnt = np.zeros(shape.tokens, dtype=np.bool_)
    learnt[shape.fresh_tokens :].reshape(shape.spans, shape.span_tokens)[:, 1:] = True
    while True:
        fresh = np.stack([rng.choice(token_ids, shape.fresh_tokens, replace=False) for _ in range(batch)])
        starts = rng.integers(0, shape.fresh_tokens - shape.span_tokens + 1, (batch, shape.spans))
        places = (starts[:, :, None] + np.arange(shape.span_tokens)).reshape(batch, -1)
        again = np.take_along_axis(fresh, places, axis=1)
        yield np.concatenate([fresh, again], axis=1), np.broadcast_to(learnt, (batch, shape.tokens))
