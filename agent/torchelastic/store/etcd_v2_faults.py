"""What a failed request to an etcd v2 means, in words, and whether trying again may help.

The counterpart of :mod:`torchelastic.store.etcd_faults`, and in its words, for what python-etcd and urllib3 raise.
"""

from __future__ import annotations

import http.client
import os
import socket
import ssl
from typing import TYPE_CHECKING, Any, Final

import etcd
import urllib3

from torchelastic.errors import StoreError, StoreRefused, StoreUnavailable
from torchelastic.store.etcd_faults import NoGateway, NotAuthorized, Unreached, shown
from torchelastic.store.etcd_v2_client import AnswerTooLong

if TYPE_CHECKING:
    from collections.abc import Iterator

_KEY_NOT_FOUND: Final = 100
_RAFT_INTERNAL_ERROR: Final = 300

_TRANSIENT_STATUSES: Final = frozenset({408, 425, 429})


def is_missing(error: etcd.EtcdKeyNotFound) -> bool:
    """Whether etcd says that there is no such key; python-etcd takes any page that is not found for that."""
    return bool(_payload(error).get("errorCode") == _KEY_NOT_FOUND)


def index_of(error: etcd.EtcdException) -> int:
    """The index of etcd when it gave this answer; 0 where it said none."""
    index = _payload(error).get("index")
    return index if isinstance(index, int) else 0


def meaning(endpoint: str, error: Exception, *, status: int, known: bool) -> StoreError:
    """What it means that a request failed.

    Args:
        endpoint: the server that it went to.
        error: what python-etcd raised, and not one of its answers about keys.
        status: HTTP's status of the answer, if there was one.
        known: credentials went along.
    """
    where = f"etcd at {endpoint}"
    if isinstance(error, etcd.EtcdConnectionFailed):
        return _broken(endpoint, error.cause)
    if isinstance(error, etcd.EtcdClusterIdChanged):
        return StoreUnavailable(f"{where} is not the one that it was before: another one has taken its place")
    if isinstance(error, etcd.EtcdInsufficientPermissions):
        if known:
            return NotAuthorized(f"{where} does not accept the user name and password, or not for these keys")
        return StoreRefused(f"{where} wants a user name and a password")
    payload = _payload(error)
    said = " ".join(str(payload[name]) for name in ("message", "cause") if payload.get(name))
    if "errorCode" not in payload:
        if status >= 500 or status in _TRANSIENT_STATUSES:
            return StoreUnavailable(f"{where} answers with status {status}: {_page(payload)}")
        if status == 200:
            return NoGateway(f"what listens at {endpoint} does not answer as etcd's API v2 does")
        return NoGateway(
            f"what listens at {endpoint} is no etcd, or one without its API v2 (--enable-v2=true, until etcd 3.5): "
            f"/v2/keys gives status {status}, {_page(payload)}"
        )
    if status >= 500 or payload["errorCode"] == _RAFT_INTERNAL_ERROR or isinstance(error, _PASSING):
        return StoreUnavailable(f"{where} cannot answer now: {said}")
    return StoreRefused(f"{where} refuses: {said}")


_PASSING: Final = (etcd.EtcdLeaderElectionInProgress, etcd.EtcdWatcherCleared)


def _broken(endpoint: str, cause: BaseException | None) -> StoreError:
    """What a failure to exchange anything with the server means."""
    where = f"etcd at {endpoint}"
    causes = list(_chain(cause))
    for each in causes:
        if isinstance(each, AnswerTooLong):
            return StoreRefused(f"{where} sent {each}")
        if isinstance(each, ssl.SSLCertVerificationError):
            return StoreRefused(f"the certificate of {where} cannot be trusted: {each.verify_message}")
        if isinstance(each, ssl.SSLError) and not isinstance(each, ssl.SSLEOFError):
            return StoreRefused(f"no TLS connection to {where} can be made: {(each.reason or str(each)).lower()}")
        if isinstance(each, socket.gaierror):
            return Unreached(f"{where} cannot be found: {str(each.strerror).lower()}")
        if isinstance(each, http.client.BadStatusLine) and not isinstance(each, http.client.RemoteDisconnected):
            return NoGateway(f"what listens at {endpoint} does not speak HTTP: {shown(str(each).encode())}")
    if isinstance(cause, urllib3.exceptions.SSLError):
        return StoreRefused(f"the certificate of {where} cannot be trusted: {causes[-1]}")
    reason = next((_reason(each) for each in causes if isinstance(each, OSError) and each.errno), "")
    if isinstance(cause, urllib3.exceptions.ConnectTimeoutError):  # urllib3 counts a refused one among them
        return Unreached(f"{where} does not answer: {reason or 'no connection in time'}")
    if isinstance(cause, urllib3.exceptions.ReadTimeoutError):
        return StoreUnavailable(f"{where} gave no answer in time")
    if any(isinstance(each, http.client.RemoteDisconnected) for each in causes):
        return StoreUnavailable(f"{where} closed the connection instead of answering")
    return StoreUnavailable(f"the connection to {where} broke: {reason or 'it ended in the middle of an answer'}")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that it came of; urllib3 hands some on as arguments only."""
    while error is not None:
        yield error
        yield from (each for each in error.args if isinstance(each, BaseException))
        error = error.__cause__ or error.__context__


def _reason(error: OSError) -> str:
    return os.strerror(error.errno).lower() if error.errno and error.errno > 0 else str(error)


def _payload(error: Exception) -> dict[str, Any]:
    payload = getattr(error, "payload", None)
    return payload if isinstance(payload, dict) else {}


def _page(payload: dict[str, Any]) -> str:
    return shown(str(payload.get("cause", "")).encode(errors="replace"))
