"""How per-token losses become one number: a weight for each sample's tokens, known before any forward.

The loss of a batch is the sum over samples and masked tokens of weight * token loss.  Weights are taken
over the *whole* batch, so that any cut into micro-batches gives the same gradient.

- token_mean: every masked token of the batch counts the same (DAPO, arXiv 2503.14476).
- sequence_mean: mean over trajectories of their token means (GRPO).  The sequences of one program count
  as one: a rewritten history is no second vote.
- sequence_sum: mean over trajectories of their token sums over a constant (Dr.GRPO, arXiv 2503.20783).
"""

from collections import Counter

from sostenuto.errors import RecordError
from sostenuto.trainer.parts import Aggregation
from sostenuto.trainer.samples import Sample


def token_weights(
    samples: list[Sample], aggregation: Aggregation, constant_tokens: int | None = None
) -> list[float]:
    """Weight of one masked token of each sample; `constant_tokens`: of sequence_sum.

    RecordError when the batch has no masked token.
    """
    total = sum(sample.masked_tokens for sample in samples)
    if not total:
        raise RecordError(f"batch of {len(samples)} samples: no token to train, every mask is empty")
    if aggregation == "token_mean":
        return [1.0 / total] * len(samples)
    # A sample without an origin stands for itself.
    owners = [sample.origin or f"#{index}" for index, sample in enumerate(samples)]
    tokens: Counter[str] = Counter()
    for owner, sample in zip(owners, samples, strict=True):
        tokens[owner] += sample.masked_tokens
    trajectories = sum(1 for count in tokens.values() if count)
    divisors = tokens if constant_tokens is None else dict.fromkeys(tokens, constant_tokens)
    return [1.0 / (trajectories * divisors[owner]) if tokens[owner] else 0.0 for owner in owners]
