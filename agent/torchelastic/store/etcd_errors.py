"""Errors of etcd's servers: converts failed connections and unexpected answers to the errors of a store."""

from __future__ import annotations

import os
import socket
import ssl
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec

from torchelastic.errors import LeaseLost, StoreError, StoreRefused, StoreUnavailable
from torchelastic.store.api import too_large

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchelastic.store.api import StoreSettings

MAX_ANSWER: Final = 6 << 20
"""Maximum size of an answer in bytes: a page of keys, or all keys of a run in the API v2."""

_PROBE_LIMIT: Final = 1.0
"""Seconds for finding out why a server does not answer."""

_SHOWN: Final = 200
"""Maximum number of characters of an unexpected answer in a message."""

_TRANSIENT_CODES: Final = frozenset({1, 2, 4, 8, 10, 13, 14})
"""gRPC's canceled, unknown, deadline exceeded, resource exhausted, aborted, internal, unavailable."""

_TOKEN_REFUSED: Final = ("invalid auth token", "revision of auth store is old", "user name is empty")
"""etcd's messages about a missing or expired token."""


async def read_answer(
    endpoint: str, response: aiohttp.ClientResponse, *, signs: bytes, limit: int, received: Callable[[int], None]
) -> bytearray:
    """Return the body of an answer.

    Args:
        endpoint: the server, for the error.
        response: the answer.
        signs: the characters that begin a value: decoded, a short value takes many times its size.
        limit: the maximum number of these characters.
        received: see :class:`~torchelastic.store.api.StoreSettings`.

    Raises:
        StoreTooLarge: the answer is larger than MAX_ANSWER, or has more values.
    """
    body = bytearray()
    try:
        async for chunk in response.content.iter_any():
            body += chunk
            received(len(chunk))
            limit -= sum(map(chunk.count, signs))
            if len(body) > MAX_ANSWER or limit < 0:
                raise too_large(f"etcd at {endpoint}")
        return body
    finally:
        received(-len(body))


class AddressRefused(OSError):  # noqa: N818 - named like StoreRefused
    """A socket for this address must not be opened; the message says why."""


def connector(settings: StoreSettings) -> aiohttp.TCPConnector:
    """Return a connector whose connections the settings allow."""
    if settings.open_socket is None:
        return aiohttp.TCPConnector(limit=0)
    # After the name lookup, so that no name can change its address in between.
    return aiohttp.TCPConnector(limit=0, socket_factory=settings.open_socket)


class AddressForbidden(StoreRefused):
    """The settings forbid the address of the server."""


class Unreached(StoreUnavailable):
    """The request never reached the server, so it had no effect."""


class WrongApi(StoreRefused):
    """The server answers, but does not support the requested API of etcd."""


class NotAuthorized(StoreRefused):
    """The user has no access to the requested keys."""


class TokenRefused(StoreRefused):
    """The server requires a token, or a new one."""


class LeaseExists(StoreRefused):
    """A lease with this id already exists."""


class Fault(msgspec.Struct, frozen=True):
    """An error message of etcd 3. In a stream, etcd before 3.6 calls the code ``grpc_code``."""

    message: str = ""
    code: int = 0
    grpc_code: int = 0


def is_transient(status: int) -> bool:
    """Return whether a later attempt may succeed after an answer with this HTTP status."""
    return status >= 500 or status in {408, 425, 429}


def unexpected(endpoint: str, path: str, status: int, body: bytes | bytearray, *, lacking: str) -> StoreError:
    """Return the error for an answer that is not etcd's; ``lacking`` names the feature that an etcd would lack."""
    if is_transient(status):
        return StoreUnavailable(f"etcd at {endpoint} answers with status {status}", detail=shown(body))
    found = f"{path} gives status {status}"
    return WrongApi(f"the server at {endpoint} is not etcd, or is etcd without {lacking}: {found}", detail=shown(body))


def shown(body: bytes | bytearray) -> str:
    """Return the beginning of an unexpected answer as a string on one line."""
    text = " ".join(body[: 4 * _SHOWN].decode("utf-8", "replace").split())
    return repr(text[:_SHOWN]) if text else "nothing"


def refused(where: str, fault: Fault, *, transient: bool = False) -> StoreError:
    """Return the error for an error message of etcd 3; ``transient`` if the HTTP status is temporary."""
    message = fault.message.removeprefix("etcdserver: ")
    if "requested lease not found" in message:
        return LeaseLost(f"{where} no longer has this lease")
    if "lease already exists" in message:
        return LeaseExists(f"{where} already has a lease with this id")
    if any(sign in message for sign in _TOKEN_REFUSED):
        return TokenRefused(f"{where} requires a user name and a password, or the secret of the run", detail=message)
    if "authentication failed" in message:
        return StoreRefused(f"{where} does not accept the user name and password, or the secret of the run")
    if "permission denied" in message:
        return NotAuthorized(f"{where} does not allow this user to use these keys: permission denied")
    if transient or (fault.code or fault.grpc_code) in _TRANSIENT_CODES or "has been compacted" in message:
        return StoreUnavailable(f"{where} cannot answer now", detail=message)
    return StoreRefused(f"{where} refuses", detail=message)


def broken(endpoint: str, error: aiohttp.ClientError) -> StoreError:
    """Return the error for a failed exchange with a server."""
    where = f"etcd at {endpoint}"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        cause = error.certificate_error
        reason = cause.verify_message if isinstance(cause, ssl.SSLCertVerificationError) else str(cause)
        return StoreRefused(f"the certificate of {where} cannot be trusted: {reason}")
    if isinstance(error, aiohttp.ClientOSError) and "[SSL:" in str(error) and "EOF" not in str(error):
        reason = str(error).partition("[SSL:")[2].partition("]")[0].strip()
        return StoreRefused(f"the TLS connection to {where} failed: {reason}")
    if isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, AddressRefused):
        return AddressForbidden(f"{where} may not be used: {error.os_error}")
    if isinstance(error, aiohttp.ClientConnectorError):
        state = "cannot be found" if isinstance(error.os_error, socket.gaierror) else "does not answer"
        return Unreached(f"{where} {state}: {_reason(error.os_error)}")
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return Unreached(f"{where} does not answer: no connection in time")
    if isinstance(error, aiohttp.ClientResponseError):
        return WrongApi(f"the server at {endpoint} does not support HTTP", detail=" ".join(error.message.split()))
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return StoreUnavailable(f"{where} closed the connection instead of answering")
    if isinstance(error, aiohttp.ClientPayloadError):
        return StoreUnavailable(f"{where} closed the connection within an answer")
    reason = _reason(error) if isinstance(error, aiohttp.ClientOSError) else str(error) or type(error).__name__
    return StoreUnavailable(f"the connection to {where} broke: {reason}")


def _reason(error: OSError) -> str:
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno).lower()
    return error.strerror or str(error) or "connection reset"


async def other_protocol(endpoint: str, settings: StoreSettings) -> str | None:
    """Return the protocol that a server expects instead of the one in the settings; None if there is none."""
    other = "https" if settings.protocol == "http" else "http"
    timeout = aiohttp.ClientTimeout(total=_PROBE_LIMIT)
    try:
        async with (
            aiohttp.ClientSession(connector=connector(settings), timeout=timeout) as session,
            session.get(f"{other}://{endpoint}/version", ssl=False, allow_redirects=False) as answer,
        ):
            return other if other == "https" or answer.status == 200 else None
    except aiohttp.ClientError as error:
        return other if "ALERT" in str(error) else None  # the server refuses a client without a certificate
    except TimeoutError:
        return None
