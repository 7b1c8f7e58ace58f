"""The one place that everything passes on its way out of the tool server.

- Secret values are replaced in every string that leaves, keys included, before a text is cut.
- An observation keeps within its cap.
- What leaves is valid UTF-8 JSON, whatever an environment put into its strings.
"""

from dataclasses import dataclass, replace

from pydantic import BaseModel, JsonValue, TypeAdapter
from pydantic_core import PydanticSerializationError, to_json

from sostenuto.errors import SostenutoError
from sostenuto.tools.cut import cut_middle, is_cut
from sostenuto.tools.refused import refusal
from sostenuto.tools.secrets import Secrets
from sostenuto.tools.wire import Refusal
from sostenuto.types import ToolResult

_TOOL_RESULT = TypeAdapter(ToolResult)


@dataclass(frozen=True, slots=True)
class Edge:
    """Knows the secrets and the cap of those tools that have none of their own."""

    secrets: Secrets
    output_bytes: int

    def observation(self, result: ToolResult, output_bytes: int | None) -> ToolResult:
        """The result as it may be recorded: without secrets, within the tool's cap or the common one."""
        text = self.text(_encodable(result.content))
        cut = cut_middle(text, output_bytes or self.output_bytes)
        if cut.text is result.content:
            return result
        return replace(result, content=cut.text, cut_bytes=result.cut_bytes + cut.cut_bytes)

    def text(self, text: str) -> str:
        """The text without secrets, and without pieces of secrets where it was cut before."""
        return self.secrets.redact_cut(text) if is_cut(text) else self.secrets.redact(text)

    def refusal(self, error: SostenutoError) -> Refusal:
        """The error as it may leave, its text within the cap of an observation."""
        plain = refusal(error)
        text = cut_middle(self.secrets.redact(_encodable(plain.message)), self.output_bytes).text
        return plain.model_copy(update={"message": text})

    def json(self, value: BaseModel | ToolResult) -> bytes:
        """The value as JSON that may leave."""
        try:
            body = _dump(value)
        except (PydanticSerializationError, UnicodeEncodeError):  # a lone surrogate
            return self._walked_json(value)
        return self._walked_json(value) if self._may_hold_secret(body) else body

    def _may_hold_secret(self, body: bytes) -> bool:
        return any(to_json(secret)[1:-1] in body for secret in self.secrets.values)

    def _walked_json(self, value: BaseModel | ToolResult) -> bytes:
        plain: JsonValue = (
            _TOOL_RESULT.dump_python(value) if isinstance(value, ToolResult) else value.model_dump()
        )
        return to_json(self._walk(plain))

    def _walk(self, value: JsonValue) -> JsonValue:
        """A copy with every string made fit to leave."""
        if isinstance(value, str):
            return self.secrets.redact(_encodable(value))
        if isinstance(value, list | tuple):
            return [self._walk(item) for item in value]
        if isinstance(value, dict):
            return {self.secrets.redact(_encodable(key)): self._walk(item) for key, item in value.items()}
        return value


def _dump(value: BaseModel | ToolResult) -> bytes:
    if isinstance(value, ToolResult):
        return _TOOL_RESULT.dump_json(value)
    return value.model_dump_json().encode()


def _encodable(text: str) -> str:
    """The text, with `?` for what UTF-8 cannot carry."""
    return text if text.isascii() else text.encode(errors="replace").decode()
