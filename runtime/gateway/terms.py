"""What a program of the gateway may ask for, and what it gets whatever it asks."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from sostenuto.runtime.gateway.turn import Ask, Refused
from sostenuto.types import Limits, Purpose


@dataclass(frozen=True, slots=True)
class RoleTerms:
    """Of the calls in one role of a program."""

    trained: bool
    temperature: float | None = None
    """Of one that is not trained; None: what the client asks for."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Of one program."""

    purpose: Purpose = Purpose.SERVE
    temperature: float | None = None
    """None: what the client asks for."""
    seed: int | None = None
    """Of the sampling noise, where the client gives none; None: another one for each call."""
    limits: Limits | None = None
    """None: those of the model and the engines."""
    routed_experts: bool = False
    """Record which experts of a mixture-of-experts model each token was routed to."""
    roles: Mapping[str, RoleTerms] = field(default_factory=dict[str, RoleTerms])
    """By name; a call in none of them is the policy's."""

    def is_trained(self, role: str) -> bool:
        """Whether what is said in it may be learnt from."""
        return role not in self.roles or self.roles[role].trained

    def is_seed_of(self, ask: Ask) -> bool:
        """Whether the call's own seed counts.

        Not in training: an agent that asks with the same seed each time would make all members of its group
        the same.
        """
        return ask.seeded and self.purpose is not Purpose.TRAIN

    def applied(self, ask: Ask) -> Ask:
        """The call as it is sampled; Refused when these terms do not allow it."""
        sampling, trained = ask.sampling, self.is_trained(ask.role)
        if self.purpose is Purpose.TRAIN and trained:
            _refuse_what_training_cannot_recompute(ask)
        temperature = self.temperature if trained else self.roles[ask.role].temperature
        if temperature is not None:
            sampling = sampling.model_copy(update={"temperature": temperature})
        most = ask.max_tokens
        if self.limits is not None:
            most = min(most or self.limits.turn_tokens, self.limits.turn_tokens)
        return replace(ask, sampling=sampling, max_tokens=most)


def _refuse_what_training_cannot_recompute(ask: Ask) -> None:
    sampling = ask.sampling
    wrong = {
        "top_p": sampling.top_p < 1,
        "top_k": sampling.top_k > 0,
        "min_p": sampling.min_p > 0,
        "repetition_penalty": sampling.repetition_penalty != 1,
        "presence_penalty": sampling.presence_penalty != 0,
        "frequency_penalty": sampling.frequency_penalty != 0,
        ask.held_by: sampling.grammar is not None,
    }
    for key, is_wrong in wrong.items():
        if is_wrong:
            raise Refused(
                f"{key}: this program is trained, and training recomputes the whole distribution; "
                "leave it out",
                field=key,
                code="not_in_training",
            )
