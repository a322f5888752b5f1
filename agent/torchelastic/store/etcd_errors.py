"""Translation of etcd's and HTTP's errors into the store's: a sentence, and whether trying again may help."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec

from torchelastic.errors import LeaseLost, StoreError, StoreRefused, StoreUnavailable
from torchelastic.store.etcd_messages import Failure, decode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_TRANSIENT_CODES: Final = frozenset({1, 2, 4, 8, 10, 13, 14})
"""gRPC's canceled, unknown, deadline exceeded, resource exhausted, aborted, internal, unavailable."""

TRANSIENT_STATUSES: Final = frozenset({408, 425, 429})

_TOKEN_REFUSED: Final = ("invalid auth token", "revision of auth store is old", "user name is empty")
"""What etcd says if a token is missing or expired."""

_SHOWN: Final = 200
"""Characters of an unexpected answer that a message shows."""


class Unreached(StoreUnavailable):
    """The request never reached the server, so it was not carried out."""


class TokenRefused(StoreRefused):
    """The server wants a token, or a new one."""


class NoGateway(StoreRefused):
    """The server answers, but not as etcd's JSON gateway does."""


class LeaseExists(StoreRefused):
    """A lease of this id exists already."""


class NotAuthorized(StoreRefused):
    """The user may not use these keys."""


def refusal(endpoint: str, path: str, status: int, body: bytes) -> StoreError:
    """Return the error for an answer whose status is not 200."""
    try:
        code, said = decode(body, Failure).told()
    except msgspec.DecodeError:
        code, said = 0, ""
    where = f"etcd at {endpoint}"
    transient = status >= 500 or status in TRANSIENT_STATUSES
    if not said:
        text = shown(body)
        if transient:
            return StoreUnavailable(f"{where} answers with status {status}: {text}")
        found = f"{path} gives status {status}, {text}"
        return NoGateway(f"what listens at {endpoint} is not etcd, or etcd without its JSON gateway: {found}")
    return meaning(where, said, code=code, transient=transient)


def meaning(where: str, said: str, *, code: int = 0, transient: bool = False) -> StoreError:
    """Return the error for a message of etcd's own.

    Args:
        where: which server said it, as in "etcd at host:port".
        said: its words.
        code: gRPC's status code.
        transient: HTTP's status says that it may pass.
    """
    said = said.removeprefix("etcdserver: ")
    if "requested lease not found" in said:
        return LeaseLost(f"{where} knows no such lease any more")
    if "lease already exists" in said:
        return LeaseExists(f"{where} has a lease of this id already")
    if any(sign in said for sign in _TOKEN_REFUSED):
        return TokenRefused(f"{where} wants a user name and a password: {said}")
    if "authentication failed" in said:
        return StoreRefused(f"{where} does not accept the user name and password")
    if "permission denied" in said:
        return NotAuthorized(f"{where} does not allow this user to use these keys: permission denied")
    if transient or code in _TRANSIENT_CODES:
        return StoreUnavailable(f"{where} cannot answer now: {said}")
    return StoreRefused(f"{where} refuses: {said}")


def broken(endpoint: str, error: aiohttp.ClientError) -> StoreError:
    """Return the error for a failed exchange with a server."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        cause = error.certificate_error
        said = cause.verify_message if isinstance(cause, ssl.SSLCertVerificationError) else str(cause)
        return StoreRefused(f"the certificate of etcd at {endpoint} cannot be trusted: {said}")
    if isinstance(error, aiohttp.ClientOSError) and "[SSL:" in str(error) and "EOF" not in str(error):
        reason = str(error).partition("[SSL:")[2].partition("]")[0].strip()
        return StoreRefused(f"no TLS connection to etcd at {endpoint} can be made: {reason}")
    if isinstance(error, aiohttp.ClientConnectorError):
        state = "cannot be found" if isinstance(error.os_error, socket.gaierror) else "does not answer"
        return Unreached(f"etcd at {endpoint} {state}: {_reason(error.os_error)}")
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return Unreached(f"etcd at {endpoint} does not answer: no connection in time")
    if isinstance(error, aiohttp.ClientResponseError):
        return NoGateway(f"what listens at {endpoint} does not speak HTTP: {error.message}")
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return StoreUnavailable(f"etcd at {endpoint} closed the connection instead of answering")
    if isinstance(error, aiohttp.ClientOSError):
        return StoreUnavailable(f"the connection to etcd at {endpoint} broke: {_reason(error)}")
    return StoreUnavailable(f"the connection to etcd at {endpoint} broke: {str(error) or type(error).__name__}")


def all_failed(error: StoreUnavailable, endpoints: tuple[str, ...]) -> StoreUnavailable:
    """Return the error for servers none of which answered, the last one with ``error``."""
    if len(endpoints) == 1:
        return error
    return StoreUnavailable(f"none of the etcd servers {', '.join(endpoints)} answers; the last failure: {error}")


@contextlib.asynccontextmanager
async def time_limit(endpoint: str, seconds: float) -> AsyncIterator[None]:
    """Limit the time for an exchange with a server.

    Raises:
        StoreUnavailable: the time is up.
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise StoreUnavailable(f"etcd at {endpoint} gave no answer within {seconds:.3g} seconds") from error


def shown(body: bytes) -> str:
    """Return the beginning of an unexpected answer as text on one line."""
    text = " ".join(body[: 4 * _SHOWN].decode("utf-8", "replace").split())
    return repr(text[:_SHOWN]) if text else "nothing"


def _reason(error: OSError) -> str:
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno).lower()
    return error.strerror or str(error) or "connection reset"
