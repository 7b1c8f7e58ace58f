"""Seeds that depend on what a program is, never on when it runs."""

import hashlib


def seed_of(*parts: object) -> int:
    """63 bits from any parts that print the same each time."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
