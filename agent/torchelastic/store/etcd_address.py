"""The addresses of etcd's servers, and TLS."""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Final

from yarl import URL

from torchelastic.errors import SettingsError

if TYPE_CHECKING:
    from torchelastic.store.api import StoreSettings

_PROBE_LIMIT: Final = 1.0
"""Seconds for finding out why a server does not answer."""


def servers(settings: StoreSettings) -> dict[str, URL]:
    """Return the base URL of each server, by its endpoint.

    Raises:
        SettingsError: the protocol is not one of etcd's, no endpoint is given, or one is not host:port.
    """
    if not settings.endpoints:
        raise SettingsError("no etcd server is given: name at least one as host:port")
    return {endpoint: _base_url(settings.protocol, endpoint) for endpoint in settings.endpoints}


def _base_url(protocol: str, endpoint: str) -> URL:
    if protocol not in {"http", "https"}:
        raise SettingsError(f"{protocol!r} is not a protocol of etcd: use http or https")
    try:
        base = URL(f"{protocol}://{endpoint}")
        complete = base.host and base.explicit_port and base.path == "/" and not base.user
        (base.host or "").encode("idna")  # as looking the name up will
    except ValueError:
        complete = False
    if not complete:
        raise SettingsError(f"{endpoint!r} is not the address of an etcd server: write host:port")
    return base


def tls_context(settings: StoreSettings) -> ssl.SSLContext | None:
    """Return the TLS context of the settings; None for plain HTTP.

    Raises:
        SettingsError: a file cannot be used, or does not match the protocol.
    """
    files = (settings.ca_cert, settings.cert, settings.key)
    if settings.protocol != "https":
        if any(files):
            raise SettingsError("certificates for etcd are given, yet the protocol is http: use https")
        return None
    if settings.key and not settings.cert:
        raise SettingsError(f"a private key for etcd is given ({settings.key}), but no certificate: name both")
    try:
        context = ssl.create_default_context(cafile=settings.ca_cert)
    except (OSError, ValueError) as error:
        raise SettingsError(f"the CA certificate {settings.ca_cert} for etcd cannot be used: {error}") from error
    if settings.cert:
        try:
            # An empty password instead of none, or a key with a password would ask for it on the terminal.
            context.load_cert_chain(settings.cert, settings.key, password="")
        except (OSError, ValueError) as error:
            pair = f"{settings.cert} with the key {settings.key or settings.cert}"
            raise SettingsError(f"the client certificate {pair} for etcd cannot be used: {error}") from error
    return context


async def other_protocol(base: URL) -> str | None:
    """Return the protocol that a server speaks instead of the one it was asked in; None if that is not the reason."""
    if base.scheme == "https":
        return "http" if await _speaks_http(base) else None
    return "https" if await _speaks_tls(base) else None


async def _speaks_tls(base: URL) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        async with asyncio.timeout(_PROBE_LIMIT):
            _, writer = await asyncio.open_connection(base.host, base.port, ssl=context)
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # it refuses a client without a certificate
    except OSError:  # includes TimeoutError
        return False
    writer.transport.abort()
    return True


async def _speaks_http(base: URL) -> bool:
    try:
        async with asyncio.timeout(_PROBE_LIMIT):
            reader, writer = await asyncio.open_connection(base.host, base.port)
            try:
                writer.write(b"GET /version HTTP/1.0\r\n\r\n")
                status = await reader.read(12)
            finally:
                writer.transport.abort()
    except OSError:
        return False
    return status.startswith(b"HTTP/") and status.endswith(b" 200")
