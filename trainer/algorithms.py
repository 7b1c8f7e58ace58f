"""The methods, each a flat recipe over the parts of `parts`.

A recipe is a set of defaults: any part of any of them can be replaced, as `GRPO(loss=GSPOClip())` or in TOML

    [algorithm]
    method = "grpo"
    loss = { kind = "gspo_clip" }
"""

from types import MappingProxyType
from typing import Annotated, Literal, Self, cast

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from sostenuto.errors import nearest
from sostenuto.trainer.parts import (
    GAE,
    KL,
    TIS,
    Advantage,
    Aggregation,
    BatchNormalized,
    CISPOWeight,
    Correction,
    Critic,
    CriticHead,
    GroupRelative,
    GSPOClip,
    LeaveOneOut,
    NoReward,
    Part,
    PolicyGradient,
    PolicyLoss,
    PPOClip,
    Rejection,
    Return,
    SAPOGate,
    Teaching,
    TurnReturn,
    part_of,
)

ZeroSpread = Literal["skip", "replace", "keep"]


class SFT(Part, frozen=True):
    """Supervised fine-tuning: -log p of the masked tokens."""

    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"


class Algorithm(Part, frozen=True):
    """What all methods have.  Use one of the recipes below."""

    method: str

    group_size: int = Field(default=8, ge=1)
    """Programs for each task."""

    temperature: float = Field(default=1.0, gt=0)
    """Of the distribution sampled from; the trainer scores under the same one."""

    advantage: Advantage = GroupRelative()

    critic: Critic | None = None
    """What says the values that a GAE needs."""

    loss: PolicyLoss = PPOClip()

    proximal: Literal["rollout", "current"] = "rollout"
    """What the policy's ratio is over.  rollout: the weights that sampled, as the trainer has them; the
    correction then weighs the engine's difference alone.  current: the weights at the beginning of the
    batch, and the correction weighs all that came before (decoupled PPO, arXiv 2110.00641)."""

    correction: Correction | None = TIS()
    """Of what the engine sampled otherwise than the trainer would have; "none": nothing is corrected, and
    one ratio carries all."""

    rejection: Rejection | None = None

    aggregation: Aggregation = "token_mean"
    """Over the whole batch, however it is cut into micro-batches."""

    aggregation_tokens: int | None = Field(default=None, gt=0)
    """sequence_sum: the constant that a sequence's sum is divided by, such as the longest reply."""

    epochs: int = Field(default=1, ge=1)
    """How often a batch is gone through."""

    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps in one epoch."""

    kl: KL | None = None
    """None: no reference model is loaded."""

    teaching: Teaching | None = None
    """What the job's teachers add; None: it has none."""

    zero_spread: ZeroSpread = "skip"
    """What becomes of a group with equal rewards.

    skip: it takes its place in a batch and is dropped(no_signal) there, so a step costs the same whatever
    the success.  replace: it is dropped as soon as it is complete and another group is sampled in its place.
    keep: it is trained as it is; where members are compared its advantages are exactly zero, and its tokens
    count in the loss's denominator.
    """

    @field_validator("advantage", "critic", "loss", "correction", mode="before")
    @classmethod
    def _reads_part(cls, value: object, info: ValidationInfo) -> object:
        if value == "none" and info.field_name == "correction":
            return None
        if not isinstance(value, dict):
            return value
        name = info.field_name or ""
        choices = {
            "advantage": Advantage,
            "critic": Critic,
            "loss": PolicyLoss,
            "correction": Correction,
        }[name]
        return part_of(choices, cast("dict[str, object]", value), cls.model_fields[name].default)

    @property
    def compares_group(self) -> bool:
        """Whether a reward means something only beside others of its group."""
        part = self.advantage
        return isinstance(part, GroupRelative | LeaveOneOut | TurnReturn) or (
            isinstance(part, BatchNormalized) and part.baseline == "group"
        )

    @property
    def updates(self) -> int:
        """Optimizer steps for each batch."""
        return self.epochs * self.minibatches

    @property
    def needs_reward(self) -> bool:
        return not isinstance(self.advantage, NoReward)

    @model_validator(mode="after")
    def _has_something_to_learn_from(self) -> Self:
        if not self.needs_reward and self.teaching is None:
            raise ValueError(
                "advantage: no_reward leaves nothing to learn from but a teacher; give teaching = {}, or "
                "another advantage"
            )
        if self.teaching is not None and self.zero_spread != "keep":
            raise ValueError(
                "zero_spread: a teacher has something to say of a group of equal rewards, too; "
                'give zero_spread = "keep"'
            )
        return self

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.compares_group and self.group_size < 2:
            raise ValueError(
                f"group_size: {self.advantage.kind} compares the members of a group, and {self.group_size} "
                'is none to compare; give 2 or more, or an advantage that takes one (kind = "return")'
            )
        if not self.compares_group and self.zero_spread != "keep":
            raise ValueError(
                f"zero_spread: with {self.advantage.kind} a group of equal rewards teaches something; "
                'give zero_spread = "keep"'
            )
        if isinstance(self.advantage, GAE) != (self.critic is not None):
            raise ValueError(
                f"critic: advantage {self.advantage.kind} with critic "
                f"{'none' if self.critic is None else self.critic.kind}; gae asks a critic for values, and "
                'nothing else does: give method = "ppo", or both'
            )
        if (self.aggregation == "sequence_sum") != (self.aggregation_tokens is not None):
            raise ValueError(
                "aggregation_tokens: sequence_sum divides by this constant, and nothing else does; "
                "give both, for example with limits.turns * limits.turn_tokens"
            )
        return self


class GRPO(Algorithm, frozen=True):
    """Group-relative policy optimization, arXiv 2402.03300; bounds and token mean as DAPO has them."""

    method: Literal["grpo"] = "grpo"


class DrGRPO(Algorithm, frozen=True):
    """GRPO without its two biases: no deviation, a constant for the length; arXiv 2503.20783."""

    method: Literal["dr_grpo"] = "dr_grpo"
    advantage: Advantage = GroupRelative(normalize_std=False)
    loss: PolicyLoss = PPOClip(high=0.2)
    aggregation: Aggregation = "sequence_sum"
    aggregation_tokens: int | None = Field(default=1024, gt=0)


class RLOO(Algorithm, frozen=True):
    """Policy gradient against the mean of the others, arXiv 2402.14740."""

    method: Literal["rloo"] = "rloo"
    advantage: Advantage = LeaveOneOut()
    loss: PolicyLoss = PolicyGradient()
    proximal: Literal["rollout", "current"] = "current"


class Reinforce(Algorithm, frozen=True):
    """Policy gradient of single trajectories."""

    method: Literal["reinforce"] = "reinforce"
    group_size: int = Field(default=1, ge=1)
    advantage: Advantage = Return()
    loss: PolicyLoss = PolicyGradient()
    proximal: Literal["rollout", "current"] = "current"
    zero_spread: ZeroSpread = "keep"


class ReinforcePP(Algorithm, frozen=True):
    """REINFORCE++, arXiv 2501.03262: PPO's clip without a critic, advantages over the batch."""

    method: Literal["reinforce_pp"] = "reinforce_pp"
    group_size: int = Field(default=1, ge=1)
    advantage: Advantage = BatchNormalized()
    loss: PolicyLoss = PPOClip(high=0.2)
    zero_spread: ZeroSpread = "keep"


class PPO(Algorithm, frozen=True):
    """Proximal policy optimization of single trajectories, with a critic; arXiv 1707.06347."""

    method: Literal["ppo"] = "ppo"
    group_size: int = Field(default=1, ge=1)
    advantage: Advantage = GAE()
    critic: Critic | None = CriticHead()
    loss: PolicyLoss = PPOClip(high=0.2)
    zero_spread: ZeroSpread = "keep"


class GSPO(Algorithm, frozen=True):
    """Group sequence policy optimization, arXiv 2507.18071."""

    method: Literal["gspo"] = "gspo"
    loss: PolicyLoss = GSPOClip()
    aggregation: Aggregation = "sequence_mean"


class CISPO(Algorithm, frozen=True):
    """Clipped importance weights, every token keeps its gradient; arXiv 2506.13585."""

    method: Literal["cispo"] = "cispo"
    loss: PolicyLoss = CISPOWeight()


class SAPO(Algorithm, frozen=True):
    """Soft adaptive policy optimization, arXiv 2511.20347."""

    method: Literal["sapo"] = "sapo"
    loss: PolicyLoss = SAPOGate()
    aggregation: Aggregation = "sequence_mean"


class DecoupledPPO(Algorithm, frozen=True):
    """Behaviour, proximal and current policy apart, arXiv 2110.00641, as AReaL (arXiv 2505.24298) has it."""

    method: Literal["decoupled_ppo"] = "decoupled_ppo"
    loss: PolicyLoss = PPOClip(high=0.2)
    proximal: Literal["rollout", "current"] = "current"
    minibatches: int = Field(default=4, ge=1)


class OPD(Algorithm, frozen=True):
    """On-policy distillation: the student samples, a teacher's log-probabilities are all of the signal.

    The policy gradient of KL(student || teacher) at each token of the student's own path, arXiv 2306.13649.
    """

    method: Literal["opd"] = "opd"
    group_size: int = Field(default=1, ge=1)
    advantage: Advantage = NoReward()
    loss: PolicyLoss = PolicyGradient()
    proximal: Literal["rollout", "current"] = "current"
    zero_spread: ZeroSpread = "keep"
    teaching: Teaching | None = Teaching()


RECIPES = MappingProxyType(
    {
        str(recipe.model_fields["method"].default): recipe
        for recipe in (GRPO, DrGRPO, RLOO, Reinforce, ReinforcePP, PPO, GSPO, CISPO, SAPO, DecoupledPPO, OPD)
    }
)
"""By the name of their method."""


def _recipe(value: object) -> object:
    if not isinstance(value, dict):
        return value
    given = cast("dict[str, object]", value)
    method = str(given.get("method", "grpo"))
    if method not in RECIPES:
        raise ValueError(f"method {method!r}: {nearest(method, list(RECIPES))}")
    return RECIPES[method].model_validate(given)


AnyAlgorithm = Annotated[Algorithm, BeforeValidator(_recipe)]
"""As it is read from a file; GRPO where no method is named."""
