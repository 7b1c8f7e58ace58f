"""Where the tool server listens, and what protects the way there."""

import ssl
from errno import EADDRINUSE
from ipaddress import ip_address
from pathlib import Path
from socket import create_server, socket
from typing import Protocol

from sostenuto.errors import ConfigError


class Door(Protocol):
    """Where a server listens."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def tls_certificate(self) -> Path | None: ...
    @property
    def tls_key(self) -> Path | None: ...
    @property
    def insecure(self) -> bool: ...


def listening_socket(config: Door) -> socket:
    """Bound and listening; ConfigError for a port in use, or for an open door that nobody asked for."""
    if not (_is_loopback(config.host) or config.tls_certificate or config.insecure):
        raise ConfigError(
            f"host: {config.host} can be reached from other machines, and keys would travel in clear; "
            "give tls_certificate and tls_key, or write insecure=True"
        )
    try:
        return create_server((config.host, config.port))
    except OSError as error:
        if error.errno == EADDRINUSE:
            raise ConfigError(
                f"port: {config.host}:{config.port} is in use; choose another, or 0 for a free one"
            ) from error
        raise ConfigError(f"host: cannot listen on {config.host}:{config.port}: {error}") from error


def server_tls(config: Door) -> ssl.SSLContext | None:
    """What the server speaks; None without a certificate."""
    if (config.tls_certificate is None) != (config.tls_key is None):
        raise ConfigError("tls_certificate and tls_key: give both or none")
    if config.tls_certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.tls_certificate, config.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"tls_certificate: {config.tls_certificate} and its key cannot be used: {error}; give PEM files"
        ) from error
    return context


def client_tls(ca_file: Path | None) -> ssl.SSLContext | bool:
    """Whom a client believes: the authorities in `ca_file`, else those of the system."""
    if ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"ca_file: {ca_file} cannot be used: {error}; give a PEM file") from error


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
