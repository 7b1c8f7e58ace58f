"""The parts that methods are made of, as a user sets them; `algorithms` puts them together."""

from collections.abc import Mapping
from typing import Literal, Self, cast, get_args

from pydantic import BaseModel, Field, model_validator

from sostenuto.trainer.settings import Schedule

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum"]
Level = Literal["token", "sequence", "geometric"]
"""What a ratio is of: one token; all of a sequence, as their product or as its geometric mean."""


class Part(BaseModel, frozen=True, extra="forbid"):
    pass


def part_of(choices: object, given: Mapping[str, object], default: object) -> Part:
    """The one of `choices` (a union) that a table describes: what it leaves out is as in `default`.

    ValueError for a kind that is none of them, ValidationError as the part says.
    """
    kinds = {str(choice.model_fields["kind"].default): choice for choice in _parts(choices)}
    usual = cast("dict[str, object]", default.model_dump()) if isinstance(default, Part) else {}
    kind = str(given.get("kind", usual.get("kind", "")))
    if kind not in kinds:
        raise ValueError(f"kind: {kind!r} is none of {', '.join(kinds)}")
    return kinds[kind].model_validate({**(usual if usual.get("kind") == kind else {}), **given})


def _parts(choices: object) -> list[type[Part]]:
    return [one for one in get_args(choices) if isinstance(one, type) and issubclass(one, Part)]


# ---- advantages ----


class GroupRelative(Part, frozen=True):
    """The reward against the mean of its group (GRPO, arXiv 2402.03300)."""

    kind: Literal["group_relative"] = "group_relative"

    normalize_std: bool = True
    """Divide by the group's population standard deviation.  Dr.GRPO (arXiv 2503.20783) does not."""


class LeaveOneOut(Part, frozen=True):
    """The reward against the mean of the others of its group (RLOO, arXiv 2402.14740)."""

    kind: Literal["leave_one_out"] = "leave_one_out"


class BatchNormalized(Part, frozen=True):
    """The reward against the mean of the batch, over its deviation (REINFORCE++, arXiv 2501.03262)."""

    kind: Literal["batch_normalized"] = "batch_normalized"

    baseline: Literal["none", "group"] = "none"
    """group: the group's mean is subtracted first, and the batch's deviation divides."""


class Return(Part, frozen=True):
    """The reward itself, less a number that is always the same."""

    kind: Literal["return"] = "return"

    baseline: float = 0.0


class TurnReturn(Part, frozen=True):
    """What a turn and those after it earned, against the others of its group at the same turn.

    A member that had ended by then is compared by its last turn.  Where an environment gives no rewards by
    turn, all of the reward comes with the last one; without a discount this is then `group_relative`.
    """

    kind: Literal["turn_return"] = "turn_return"

    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount for each turn."""

    normalize_std: bool = True
    """Divide by the population standard deviation of what is compared."""


class NoReward(Part, frozen=True):
    """Zero, whatever the reward is or whether there is one: all that is learnt comes from a teacher."""

    kind: Literal["no_reward"] = "no_reward"


class GAE(Part, frozen=True):
    """What came of a token against what a critic had expected before it, arXiv 1506.02438.

    A step goes from one trained token to the next: what the environment says between two turns is part of it
    and has no value of its own.  The reward comes with the last trained token.
    """

    kind: Literal["gae"] = "gae"

    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount for each trained token."""

    lambda_: float = Field(default=1.0, ge=0, le=1)
    """1: the whole return, unbiased whatever the critic says.  Less trusts the critic's later values more."""

    whiten: bool = True
    """Less their mean and over their deviation, over the trained tokens of a batch; 0 without a spread."""


Advantage = GroupRelative | LeaveOneOut | BatchNormalized | Return | TurnReturn | GAE | NoReward


# ---- critics ----


class _Critic(Part, frozen=True):
    clip: float | None = Field(default=0.2, gt=0)
    """A value is worth learning until it has moved so far from the batch's beginning; None: no bound."""

    warmup_steps: int = Field(default=0, ge=0)
    """Batches, at the beginning, from which the critic alone learns; the policy stays as it is."""


class CriticHead(_Critic, frozen=True):
    """A value head on the policy's last hidden states: no second model, and no second forward."""

    kind: Literal["head"] = "head"

    schedule: Schedule = Schedule(learning_rate=1e-2)
    """Of the head's own optimizer."""

    coefficient: float = Field(default=0.0, ge=0)
    """Weight of the value loss in the gradient of the policy's own layers.

    0: the head reads the states and changes nothing in them.  What a critic has not understood then cannot
    move the policy, and the policy's gradient is that of its objective alone.
    """


class CriticModel(_Critic, frozen=True):
    """A model of its own, with a value head, all of it learnt."""

    kind: Literal["model"] = "model"

    schedule: Schedule = Schedule(learning_rate=5e-4)
    """Of its own optimizer."""


Critic = CriticHead | CriticModel


# ---- a teacher ----


class Teaching(Part, frozen=True):
    """What a teacher says of each trained token, in the contexts that the student made itself.

    Generalized on-policy distillation, arXiv 2306.13649; with several teachers arXiv 2601.02780.
    """

    signal: Literal["sampled", "distribution"] = "sampled"
    """sampled: log p teacher - log p student of the sampled token, without gradient, is added to the token's
    advantage.  distribution: KL(student || teacher) over the vocabulary is added to the token's loss."""

    coefficient: float = Field(default=1.0, gt=0)
    """What it is multiplied with before it is added."""

    bound: float | None = Field(default=None, gt=0)
    """sampled: at most so many nats either way; None: whatever it is."""

    top_k: int | None = Field(default=None, ge=1)
    """distribution: over the teacher's k likeliest tokens and the rest as one; None: over all, which needs
    the teacher in the trainer."""

    @model_validator(mode="after")
    def _fits_its_signal(self) -> Self:
        if self.bound is not None and self.signal != "sampled":
            raise ValueError('teaching: bound is for signal = "sampled"; leave it out')
        if self.top_k is not None and self.signal != "distribution":
            raise ValueError('teaching: top_k is for signal = "distribution"; give that, or leave it out')
        return self


# ---- losses ----


class PolicyGradient(Part, frozen=True):
    """-A log p."""

    kind: Literal["policy_gradient"] = "policy_gradient"


class PPOClip(Part, frozen=True):
    """-min(r A, clip(r) A), arXiv 1707.06347, with two bounds of their own (DAPO, arXiv 2503.14476)."""

    kind: Literal["ppo_clip"] = "ppo_clip"

    low: float = Field(default=0.2, ge=0, lt=1)
    """The ratio may fall to 1 - low before a bad choice stops being pushed down."""

    high: float = Field(default=0.28, ge=0)
    """The ratio may rise to 1 + high before a good choice stops being pushed up."""

    dual: float | None = Field(default=None, gt=1)
    """The loss of a bad choice is at most so many times its advantage (arXiv 1912.09729); None: no bound."""


class GSPOClip(Part, frozen=True):
    """PPO's clip of one ratio for each sequence: exp of the mean log ratio (GSPO, arXiv 2507.18071)."""

    kind: Literal["gspo_clip"] = "gspo_clip"

    low: float = Field(default=3e-4, ge=0, lt=1)
    high: float = Field(default=4e-4, ge=0)


class CISPOWeight(Part, frozen=True):
    """-clip(r) A log p, no gradient through the clipped ratio (MiniMax-M1, arXiv 2506.13585)."""

    kind: Literal["cispo"] = "cispo"

    low: float = Field(default=1.0, ge=0, le=1)
    """1: the weight has no lower bound."""

    high: float = Field(default=0.28, ge=0)


class SAPOGate(Part, frozen=True):
    """-(4 / t) sigmoid(t (r - 1)) A: a gate that closes softly, arXiv 2511.20347."""

    kind: Literal["sapo"] = "sapo"

    positive: float = Field(default=1.0, gt=0)
    """t of good choices."""

    negative: float = Field(default=1.05, gt=0)
    """t of bad ones; more closes sooner."""


PolicyLoss = PolicyGradient | PPOClip | GSPOClip | CISPOWeight | SAPOGate


# ---- corrections ----


class TIS(Part, frozen=True):
    """Truncated importance sampling: weight exp(log p proximal - log p engine), clamped."""

    kind: Literal["tis"] = "tis"

    low: float = Field(default=0.0, ge=0)
    high: float = Field(default=2.0, ge=1)
    level: Level = "token"

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > 1:
            raise ValueError(f"correction: low {self.low} is above 1, so equal engines would be reweighted")
        return self


class IcePop(Part, frozen=True):
    """The same weight, and 0 where it is out of bounds."""

    kind: Literal["icepop"] = "icepop"

    low: float = Field(default=0.5, ge=0, le=1)
    high: float = Field(default=5.0, ge=1)
    level: Level = "token"


Correction = TIS | IcePop


class Rejection(Part, frozen=True):
    """Leave out what the engine sampled too differently; the loss's denominator still counts it.

    By an estimate of KL(engine || proximal) from d = log p proximal - log p engine: k1 = -d, k2 = d^2 / 2,
    k3 = exp(d) - 1 - d.
    """

    estimator: Literal["k1", "k2", "k3"] = "k3"

    low: float | None = None
    """Of k1 alone, which may be negative; None: no bound."""

    high: float = Field(gt=0)

    level: Literal["token", "sequence"] = "sequence"
    """sequence: by the mean over its tokens, and all of it goes; of k1 that is the geometric mean's log."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low is not None and self.low > 0:
            raise ValueError(f"rejection: low {self.low} is above 0, so equal engines would be rejected")
        return self


# ---- the distance to a reference ----


class KL(Part, frozen=True):
    """A price on the distance from a reference model, which is loaded beside the policy."""

    coefficient: float = Field(gt=0)

    estimator: Literal["k1", "k2", "k3", "exact"] = "k2"
    """From d = log p policy - log p reference at the sampled token: k1 = d, k2 = d^2 / 2,
    k3 = exp(-d) - 1 + d; or over the vocabulary.

    In the loss k2 has the gradient of the KL on the policy's own samples, k1 is weighed by the ratio to
    have it; k3 has another gradient and is for rewards alone.
    """

    place: Literal["loss", "reward"] = "loss"
    """reward: its sum over the trained tokens is taken off the trajectory's reward."""

    top_k: int | None = Field(default=None, ge=1)
    """exact: over the policy's k likeliest tokens and the rest as one; None: over all."""

    @model_validator(mode="after")
    def _fits_its_place(self) -> Self:
        if self.place == "reward" and self.estimator == "exact":
            raise ValueError('kl: exact is for place = "loss"; in a reward take k1, k2 or k3')
        if self.place == "loss" and self.estimator == "k3":
            raise ValueError(
                "kl: k3 as a loss does not have the gradient of the KL; take k2, k1 or exact, "
                'or place = "reward"'
            )
        if self.top_k is not None and self.estimator != "exact":
            raise ValueError(f'kl: top_k is for estimator = "exact", not {self.estimator!r}')
        return self
