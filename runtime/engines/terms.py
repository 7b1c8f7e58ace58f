"""On what terms an engine is used that others have started."""

from dataclasses import dataclass

from sostenuto.runtime.engines.wire import Capabilities

UNKNOWN = "unknown"
"""What an engine is said to serve while nobody here can tell; no version is called so."""


@dataclass(frozen=True, slots=True)
class Terms:
    start_is_known: bool = True
    """False: whatever it is started with, and however that is labelled, it has to be given weights first."""

    kv_tokens: int | None = None
    concurrency: int | None = None
    """What is used of it, at most; None: all that there is."""

    def applied_to(self, facts: Capabilities) -> Capabilities:
        return facts.model_copy(
            update={
                "kv_tokens": min(facts.kv_tokens, self.kv_tokens or facts.kv_tokens),
                "concurrency": min(facts.concurrency, self.concurrency or facts.concurrency),
            }
        )


AS_IT_SAYS = Terms()
"""It is believed, and all of it is used."""
