"""Tokens of a turn, told while a server that is not ours samples it.

Such a server says only at the end which version each token is of.  Until then tokens are told for what it
served when the request was sent, as long as that is certain.  From the first doubt on they wait for the
reply, which knows: what is told is the reply in parts, versions included.
"""

from collections.abc import Callable

from sostenuto.errors import EngineError
from sostenuto.runtime.engines.wire import GenerateReply, Spans, WireSpan


class Telling:
    """Of one request."""

    def __init__(self, spans: Spans, *, version: str, is_certain: Callable[[], bool], where: str) -> None:
        """`is_certain`: whether all that was sampled until now is of `version`.  `where`: for errors."""
        self._spans = spans
        self._version = version
        self._is_certain = is_certain
        self._where = where
        self._told = 0
        self._waits = False

    def tell(self, token_ids: list[int], logprobs: list[float]) -> None:
        """The next ones."""
        self._waits = self._waits or not self._is_certain()
        if token_ids and not self._waits:
            self._told += len(token_ids)
            self._spans(WireSpan(token_ids=token_ids, logprobs=logprobs, version=self._version))

    def end(self, reply: GenerateReply) -> None:
        """Tell what has waited; EngineError when the reply is not what was told before."""
        before = next((span.start for span in reply.versions if span.version != self._version), None)
        right = len(reply.token_ids) if before is None else before
        if self._told > right:
            raise EngineError(
                f"{self._where}: {self._told} tokens came under version {self._version}, and its answer has "
                f"{right} of it; was it updated past us? Let one runtime alone update it"
            )
        for span in reply.spans(self._told):
            self._spans(span)
