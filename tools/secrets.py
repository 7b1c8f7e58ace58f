"""Values that tools may use and nobody else may see.

- A value is replaced by `[secret NAME]` wherever it stands in a text.
- A cut can go through a value: in a cut text its beginnings and ends count as the value.
"""

import logging
import re
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import contextmanager

from sostenuto.errors import ConfigError, nearest

_PLACEHOLDER = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
SHORTEST_CHARS = 6
"""A shorter value, or piece of one, is ordinary text too often."""


class Secrets:
    """Names and values, fixed at start."""

    def __init__(self, values: Mapping[str, str]) -> None:
        """Refuse with ConfigError a value too short to be told from ordinary text."""
        for name, value in values.items():
            if len(value) < SHORTEST_CHARS:
                raise ConfigError(
                    f"secret {name}: its value has {len(value)} characters; give at least {SHORTEST_CHARS}, "
                    "a shorter one cannot be told from ordinary text"
                )
        self._value_of = dict(values)
        self._name_of = {value: name for name, value in values.items()}
        self._name_of_piece = {
            piece: name for name, value in values.items() for piece in _pieces(value)
        } | self._name_of
        self._edges = [edge for value in values.values() for edge in _edges(value)]
        self._encoded = sorted((value.encode() for value in values.values()), key=len, reverse=True)
        self._whole = _any_of(self._name_of)
        self._whole_or_piece = _any_of(self._name_of_piece)

    @property
    def values(self) -> Collection[str]:
        return self._name_of.keys()

    def fill(self, text: str, where: str) -> str:
        """The text with that secret's value for every `${NAME}`, or a ConfigError that `where` begins."""

        def value(found: re.Match[str]) -> str:
            if found[1] not in self._value_of:
                raise ConfigError(
                    f"{where}: secret {found[1]!r} was not given to the tool server; "
                    f"{nearest(found[1], list(self._value_of))}"
                )
            return self._value_of[found[1]]

        return _PLACEHOLDER.sub(value, text)

    def redact(self, text: str) -> str:
        """The text with every value replaced by its name."""
        if not any(value in text for value in self._name_of):
            return text
        return self._whole.sub(lambda found: f"[secret {self._name_of[found[0]]}]", text)

    def redact_cut(self, text: str) -> str:
        """Like `redact`, for a text that was cut somewhere."""
        # Every piece holds the first or the last characters of its value.
        if not any(edge in text for edge in self._edges):
            return text
        return self._whole_or_piece.sub(lambda found: f"[secret {self._name_of_piece[found[0]]}]", text)

    def redact_bytes(self, data: bytes) -> bytes:
        """Like `redact`, for the content of a file."""
        if not any(value.encode() in data for value in self._name_of):
            return data
        return self.redact(data.decode(errors="surrogateescape")).encode(errors="surrogateescape")

    @property
    def longest_bytes(self) -> int:
        """Of a value as UTF-8."""
        return len(self._encoded[0]) if self._encoded else 0

    def mask(self, data: bytes) -> bytes:
        """The data with every value replaced by as many asterisks as it has bytes."""
        for value in self._encoded:
            data = data.replace(value, b"*" * len(value))
        return data


def _pieces(value: str) -> list[str]:
    """The beginnings and ends of a value that are long enough to matter."""
    lengths = range(SHORTEST_CHARS, len(value))
    return [piece for length in lengths for piece in (value[:length], value[-length:])]


def _edges(value: str) -> tuple[str, str]:
    return value[:SHORTEST_CHARS], value[-SHORTEST_CHARS:]


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches the longest of the texts that begins at a place."""
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)))


def secrets_from_environment(names: tuple[str, ...], environment: Mapping[str, str]) -> Secrets:
    """The named variables, or ConfigError that says which one is not set."""
    missing = [name for name in names if name not in environment]
    if missing:
        raise ConfigError(
            f"secret_names: {', '.join(missing)} not set in the environment of the tool server; "
            "export it before the start or take the name out"
        )
    return Secrets({name: environment[name] for name in names})


@contextmanager
def redacted_logs(secrets: Secrets) -> Generator[None]:
    """Within the block no log record of this process, of any logger and handler, carries a value."""
    make = logging.getLogRecordFactory()
    render = logging.Formatter()

    def make_redacted(*args: object, **kwargs: object) -> logging.LogRecord:
        record: logging.LogRecord = make(*args, **kwargs)
        record.msg, record.args = secrets.redact(record.getMessage()), None
        if record.exc_info:
            # Handlers print this text instead of rendering the exception again.
            record.exc_text = secrets.redact(render.formatException(record.exc_info))
        return record

    logging.setLogRecordFactory(make_redacted)
    try:
        yield
    finally:
        logging.setLogRecordFactory(make)
