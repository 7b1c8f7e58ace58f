"""Classes by value: the typed door to cloudpickle."""

# cloudpickle ships no types
import cloudpickle  # pyright: ignore[reportMissingTypeStubs]

SENT_BY_VALUE = "<dynamic-code>"
"""The file name of code that was sent by value."""


def dumps(value: object) -> bytes:
    """The value, and what it refers to that its reader cannot import."""
    return cloudpickle.dumps(value)  # pyright: ignore[reportUnknownMemberType]


def loads(data: bytes) -> object:
    return cloudpickle.loads(data)
