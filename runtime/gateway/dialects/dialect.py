"""What the server needs of a dialect: reading a call, and writing what came of it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from sostenuto.runtime.engines.wire import Feature, WireSpan
from sostenuto.runtime.gateway.replies import Past
from sostenuto.runtime.gateway.texts import Texts
from sostenuto.runtime.gateway.turn import Ask, Refused, Told
from sostenuto.runtime.rendering.renderer import Renderer

Json = dict[str, Any]

COMMENT = b": the program waits\n\n"
"""In a stream of server-sent events; readers skip it."""


@dataclass(frozen=True, slots=True)
class Served:
    """What a gateway serves."""

    model: str
    """The name that clients ask for; any of `aliases` means the same."""
    aliases: frozenset[str]
    context_tokens: Callable[[], int]
    """Prompt and reply together, as the engines are now."""
    stop_token_ids: tuple[int, ...]
    texts: Texts
    created: int
    """Unix time, in seconds."""
    renderer: Renderer
    features: Callable[[], frozenset[Feature]]
    """What all engines have, as they are now."""
    roles: frozenset[str] = frozenset()
    """Names of models that clients may ask for, too: each is a role of the program."""
    strict_tools: bool = True
    """Whether `strict` of a tool is kept to."""

    def check(self, model: str | None) -> None:
        """Refused for a model that is not served; none means the one that is."""
        if model is not None and model != self.model and model not in self.aliases | self.roles:
            raise Refused(
                f"model: {model[:200]!r} is not served here; ask for {self.model!r}",
                status=404,
                field="model",
                code="model_not_found",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A call that goes on from a reply by its id."""

    previous: str
    """"" begins."""
    ask: Callable[[Past], tuple[Ask, Past]]
    """What is asked after that reply, and the conversation so far."""
    past: Callable[[Past, Told], Past] | None
    """That conversation with the reply to this call; None: it is not to be kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request, understood."""

    asks: tuple[Ask, ...]
    """Sampled side by side; more than one for several choices or prompts."""
    streams: bool = False
    body: Any = None
    """The dialect's own reading of it."""
    id: str = ""
    """Of the reply, in the dialect's form."""
    chain: Chain | None = None
    """Decides over `asks` once the program is known."""
    known: Past = field(default_factory=Past)
    """The conversation so far, as `chain` has it."""
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Dialect(Protocol):
    @property
    def keep_alive(self) -> bytes:
        """What says in a stream that its program still waits."""
        ...

    def read(self, body: Json, served: Served) -> Call:
        """Refused with the name of the key that is wrong."""
        ...

    def reply(self, call: Call, told: Sequence[Told], served: Served) -> Json: ...

    def events(self, call: Call, told: Sequence[Told], served: Served) -> Iterable[bytes]:
        """The reply as server-sent events, whole."""
        ...

    def error(self, error: Refused) -> Json:
        """The body of a refusal."""
        ...

    def error_event(self, error: Refused) -> bytes:
        """The same, in a stream that has begun."""
        ...


class Live(Protocol):
    """One call, streamed while it is sampled."""

    def span(self, span: WireSpan) -> Iterable[bytes]:
        """Events of tokens that were sampled just now."""
        ...

    def end(self, told: Told) -> Iterable[bytes]:
        """Events of all that was not told yet, and the end."""
        ...


@runtime_checkable
class LiveDialect(Protocol):
    """A Dialect that tells tokens as they come."""

    def live(self, call: Call, served: Served) -> Live | None:
        """None: this call is told when it is over."""
        ...
