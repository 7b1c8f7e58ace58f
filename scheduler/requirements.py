"""Which versions of the weights a program's requests may be served by."""

from dataclasses import dataclass
from typing import Self

from sostenuto.errors import ConfigError
from sostenuto.types import Version

_FORMS = 'give ">=EPOCH.NUMBER", "==EPOCH.NUMBER" or "pinned"'


@dataclass(frozen=True, slots=True)
class Requirement:
    """At least a version, exactly one, or the one that the program began with."""

    least: Version | None = None
    most: Version | None = None
    pinned: bool = False
    """Every turn is of the version that the first one was granted under."""

    def __post_init__(self) -> None:
        if self.least is not None and self.most is not None and self.most < self.least:
            raise ConfigError(f"requires: at least {self.least} and at most {self.most} is no version")

    def __str__(self) -> str:
        if self.pinned:
            return "the version that the program began with"
        if self.is_exact:
            return f"version {self.least}"
        return f"version {self.least} or newer" if self.least is not None else "any version"

    @classmethod
    def at_least(cls, version: Version) -> Self:
        return cls(least=version)

    @classmethod
    def exactly(cls, version: Version) -> Self:
        return cls(least=version, most=version)

    @classmethod
    def parse(cls, text: str) -> Self:
        """ConfigError for a text that names none."""
        if text == "pinned":
            return cls(pinned=True)
        try:
            version = Version.parse(text[2:])
        except ValueError as error:
            raise ConfigError(f"requires: {text!r} names no version; {_FORMS}") from error
        if text[:2] not in (">=", "=="):
            raise ConfigError(f"requires: {text!r} begins with {text[:2]!r}; {_FORMS}")
        return cls.at_least(version) if text[:2] == ">=" else cls.exactly(version)

    def of(self, began: Version | None) -> "Requirement":
        """What it asks of the next turn of a program that began with a version."""
        return Requirement.exactly(began) if self.pinned and began is not None else self

    def allows(self, version: Version) -> bool:
        """Of one that `of` returned."""
        return (self.least is None or version >= self.least) and (self.most is None or version <= self.most)

    @property
    def is_exact(self) -> bool:
        return self.least is not None and self.least == self.most

    def may_come(self, deployed: Version | None) -> bool:
        """Whether a later publication can be what it asks for."""
        return self.most is None or deployed is None or self.most > deployed


ANY = Requirement()
