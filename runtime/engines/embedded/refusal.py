"""What the engine answers instead of doing as asked."""

from dataclasses import asdict, dataclass


@dataclass
class Refusal(Exception):  # noqa: N818 - reads as the fact it states
    """A request, or a start, that is refused.  4xx: the request is at fault; 5xx: the engine is."""

    status: int
    error: str
    """Short and fixed, for programs."""
    message: str
    remedy: str

    def body(self) -> dict[str, str]:
        """The JSON object of a refusal, as `wire` states it."""
        fields = asdict(self)
        fields.pop("status")
        return fields

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})"
