"""What running calls hold of the tool server's machine."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """In thousandths of a processor, because sums of floats do not come back to zero, and bytes."""

    millicpus: int = 0
    memory_bytes: int = 0

    def __add__(self, other: "Claim") -> "Claim":
        return Claim(self.millicpus + other.millicpus, self.memory_bytes + other.memory_bytes)

    def __sub__(self, other: "Claim") -> "Claim":
        return Claim(self.millicpus - other.millicpus, self.memory_bytes - other.memory_bytes)

    def within(self, whole: "Claim") -> "Claim":
        """The part of it that exists at all."""
        return Claim(min(self.millicpus, whole.millicpus), min(self.memory_bytes, whole.memory_bytes))

    def fits(self, free: "Claim") -> bool:
        return self.millicpus <= free.millicpus and self.memory_bytes <= free.memory_bytes

    def lacking(self, free: "Claim") -> "Claim":
        """What of it is not free."""
        return Claim(max(0, self.millicpus - free.millicpus), max(0, self.memory_bytes - free.memory_bytes))

    def touches(self, other: "Claim") -> bool:
        """Whether both want some of the same."""
        cpus = self.millicpus and other.millicpus
        return bool(cpus or (self.memory_bytes and other.memory_bytes))
