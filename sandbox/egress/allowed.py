"""Which servers a sandbox may reach: the words of a specification, and what they mean.

    example.org              ports 80 and 443 of that name
    example.org:8443         that port alone
    *.example.org            every name below it, not itself
    *                        every name and address, but for guarded ones
    10.0.0.5:5432, [::1]:80  an address

A name is checked as a name, before it is resolved.  What it resolves to is checked again (`is_guarded`): a
listed name leads to this machine, or to the metadata of a cloud, only where that address is listed, too.
"""

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

from sostenuto.errors import ConfigError

Address = IPv4Address | IPv6Address

_WEB_PORTS = (80, 443)
_MOST_RULES = 1000
_NAME = re.compile(
    r"(?=.{1,253}\Z)(\*|(\*\.)?[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*)"
)
_METADATA = frozenset(
    map(ip_address, ("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254"))
)
"""Of Alibaba, Azure, Oracle, AWS and Google.  All have link-local addresses as well, or instead."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One entry of a list."""

    host: str
    """A name in lower case, perhaps with a leading wildcard; or an address in its shortest form."""
    ports: tuple[int, ...]

    def matches(self, host: str, port: int) -> bool:
        if port not in self.ports:
            return False
        if self.host.startswith("*."):
            return host.endswith(self.host[1:])
        return self.host in {"*", host}


class AllowList:
    """Made of the entries of a specification; raises ConfigError for one that means nothing."""

    def __init__(self, entries: Sequence[str]) -> None:
        if len(entries) > _MOST_RULES:
            raise ConfigError(f"network: {len(entries)} entries; {_MOST_RULES} at most, use wildcards")
        self._rules = [_rule(entry) for entry in entries]
        self.entries = tuple(entries)

    def allows(self, host: str, port: int) -> bool:
        """Whether a server may be asked for by this name or address, as `canonical` spells it."""
        return any(rule.matches(host, port) for rule in self._rules)

    def allows_address(self, address: Address, port: int) -> bool:
        """Whether a connection may lead there, from a name that is allowed."""
        return not is_guarded(address) or any(
            rule.host == str(plain(address)) and port in rule.ports for rule in self._rules
        )


def _rule(entry: str) -> Rule:
    host, port = split_port(entry)
    if host is None or port == 0:
        raise ConfigError(
            f"network: {entry!r} is no host; give 'example.org', '*.example.org' or 'host:8080'"
        )
    host = canonical(host)
    if not _NAME.fullmatch(host) and _as_address(host) is None:
        raise ConfigError(
            f"network: {entry!r} is no host: a name in ASCII, with a wildcard only as its first part, or an "
            "address, and perhaps a port; no scheme and no path"
        )
    return Rule(host, _WEB_PORTS if port is None else (port,))


def split_port(authority: str) -> tuple[str | None, int | None]:
    """ "host:80", "[::1]:80" or either without a port; (None, None) for what is neither."""
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:/@\s]+)(?::([0-9]{1,5}))?", authority)
    if match is None:
        return (authority, None) if _as_address(authority) is not None else (None, None)
    port = None if match[2] is None else int(match[2])
    return (match[1].strip("[]"), port) if port is None or port <= 65535 else (None, None)


def canonical(host: str) -> str:
    """One spelling for each name and address."""
    address = _as_address(host)
    return host.lower().removesuffix(".") if address is None else str(plain(address))


def _as_address(host: str) -> Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


def plain(address: Address) -> Address:
    """The IPv4 address that an IPv6 one stands for, if it does."""
    return getattr(address, "ipv4_mapped", None) or address


def is_guarded(address: Address) -> bool:
    """Whether it leads to this machine, to all of a network, or to the metadata of a cloud."""
    address = plain(address)
    return (
        address.is_loopback
        or address.is_link_local
        or address.is_unspecified
        or address.is_multicast
        or address.is_reserved
        or address in _METADATA
        or _is_own(address)
    )


def _is_own(address: Address) -> bool:
    """Only addresses of this machine can be bound to."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as trial:
        try:
            trial.bind((str(address), 0))
        except OSError:
            return False
    return True
