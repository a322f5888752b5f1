"""Follows the etcds of all jobs: one mirror for each job that has, or had, pods.

A mirror outlives its job until all pods of the job are gone. Only then may the job's keys be deleted from an external
etcd.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import time
from asyncio import sslproto
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, NoReturn, Self

from cryptography import x509

from elastic_operator.api.json_values import get_str
from elastic_operator.certificates import client_context
from elastic_operator.errors import ClusterError
from elastic_operator.kubernetes.client import SECRETS, Api, ApiError, with_hint
from elastic_operator.kubernetes.etcd_endpoints import EtcdEndpoints
from elastic_operator.store_mirror import MemoryBudget, StoreMirror, store_at
from torchelastic.errors import SettingsError, StoreError, StoreTooLarge
from torchelastic.store.etcd_errors import AddressForbidden
from torchelastic.store.etcd_process import AUTHORITY, CERTIFICATE, KEY

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Collection
    from types import TracebackType

    from elastic_operator.api.json_values import Json
    from elastic_operator.kubernetes.etcd_certificates import EtcdCertificates
    from torchelastic.protocol.records import SizeRecord
    from torchelastic.store.api import StoreSettings


class SecretError(StoreError):
    """The Secret with the certificates for an etcd cannot be read, or has no usable certificates."""


def tls_context(secret: Json) -> ssl.SSLContext:
    """Return the context for the certificates in a Secret of a user.

    Raises:
        SecretError: the Secret has no usable certificates.
    """
    name, files = get_str(secret, "metadata", "name"), dict[str, bytes]()
    for key in (AUTHORITY, CERTIFICATE, KEY):
        try:
            files[key] = base64.b64decode(get_str(secret, "data", key), validate=True)
        except ValueError:
            raise SecretError(f"{key} of the Secret {name} is not base64") from None
    about = f"the Secret {name}, which spec.etcd.tlsSecret names,"
    if not files[AUTHORITY] and not files[CERTIFICATE]:
        raise SecretError(
            f"{about} has neither {AUTHORITY} nor {CERTIFICATE}: put the certificates for etcd under these names"
        )
    try:
        return client_context(files)
    except ValueError as error:
        raise SecretError(f"{about} has a {error}") from None


def _expiry(secret: Json) -> float | None:
    """Return when the first certificate of a Secret expires; None if it has none that can be parsed.

    Of several authorities, the last one counts: a bundle may still have a former one.
    """
    found: list[float] = []
    for name, choose in ((AUTHORITY, max), (CERTIFICATE, min)):
        with contextlib.suppress(ValueError):
            pem = base64.b64decode(get_str(secret, "data", name))
            ends = [each.not_valid_after_utc.timestamp() for each in x509.load_pem_x509_certificates(pem)]
            found.append(choose(ends))
    return min(found, default=None)


logger: Final = logging.getLogger(__name__)

# Every connection has a buffer of this size, which is 256 KiB by default: too much for thousands of connections.
sslproto.SSLProtocol.max_size = 1 << 14

WRITE_TIMEOUT: Final = 1.0
"""Maximum number of seconds for writing a size, so that a hanging store does not delay pods for longer."""
_REPORT_INTERVAL: Final = 30.0
_RESTART_DELAY: Final = 10.0
_CLEANUP_TIMEOUT: Final = 5.0
"""Maximum number of seconds for deleting a run's keys, which otherwise expire within a day."""


@dataclass(slots=True)
class _Followed:
    """A followed etcd.

    Attributes:
        uid: the UID of the job.
        external: whether the etcd outlives the job.
        secret: the Secret with the certificates of an external etcd; None for none.
        tls: whether the operator issues the certificates.
        expiry: when the first certificate of this Secret expires, in seconds since the epoch; None if unknown.
        available: an event that is set while a connection may succeed.
        away_since: when the etcd became unreachable, a monotonic time; None while it is reachable.
        error: why the etcd is unreachable, as reported last on the job; None if nothing was reported.
        reason: the same as reported in the log.
        reported: when this was reported, a monotonic time.
    """

    key: str
    uid: str
    mirror: StoreMirror
    external: bool
    endpoint: str = ""
    secret: str | None = None
    tls: bool = False
    expiry: float | None = None
    available: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    away_since: float | None = None
    error: str | None = None
    reason: str = ""
    reported: float = 0.0


class JobStores:
    """The followed etcds; an async context manager.

    Args:
        changed: called with a job's key when something in its etcd has changed.
        certificates: issues the operator's certificates for the etcds that it creates.
        secret_namespaces: the namespaces in which the operator may read Secrets.
        endpoints: the endpoints of external etcds that may be used; by default, as without entries.
        timeout: seconds before an unreachable external etcd is reported.
        managed_timeout: the same for a job's own etcd: Kubernetes notices a failed node within a minute.
        expiry_interval: seconds between reads of the Secrets for the expiry of their certificates.
    """

    def __init__(
        self,
        api: Api,
        changed: Callable[[str], None],
        certificates: EtcdCertificates,
        *,
        secret_namespaces: Collection[str] = (),
        endpoints: EtcdEndpoints | None = None,
        timeout: float = 3.0,
        managed_timeout: float = 60.0,
        expiry_interval: float = 3600.0,
    ) -> None:
        self._api = api
        self._on_change = changed
        self._certificates = certificates
        self._secret_namespaces = frozenset(secret_namespaces)
        self._endpoints = endpoints or EtcdEndpoints()
        self._timeout = timeout
        self._managed_timeout = managed_timeout
        self._expiry_interval = expiry_interval
        self._budget = MemoryBudget()
        self._tasks = asyncio.TaskGroup()
        self._followed: dict[str, _Followed] = {}

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._reads = self._tasks.create_task(self._read_expiries())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reads.cancel()
        for followed in self._followed.values():
            if followed.task is not None:
                followed.task.cancel()
        self._followed.clear()
        await self._tasks.__aexit__(kind, error, trace)

    def of(self, uid: str) -> StoreMirror | None:
        """Return the mirror of a job's etcd; None if the etcd is not followed."""
        followed = self._followed.get(uid)
        return None if followed is None else followed.mirror

    def error(self, uid: str) -> str | None:
        """Return why a job's etcd has been unreachable for a while; None if it has not."""
        followed = self._followed.get(uid)
        return None if followed is None else followed.error

    def expiries(self) -> dict[str, float]:
        """Return, by the job's key, when the first certificate in its Secret expires, in seconds since the epoch."""
        found = ((each.key, each.expiry) for each in self._followed.values())
        return {key: expiry for key, expiry in found if expiry is not None}

    def follow(
        self,
        uid: str,
        key: str,
        endpoint: str,
        *,
        external: bool,
        available: bool,
        secret: str | None = None,
        tls: bool = False,
    ) -> StoreMirror:
        """Follow a job's etcd, or change its settings if it is followed; return its mirror.

        ``external``, ``available`` and ``tls`` are as in :class:`_Followed`; ``secret`` is in the job's namespace.
        """
        followed = self._followed.get(uid)
        if followed is None:
            followed = self._start(uid, key, external=external)
        followed.endpoint = endpoint
        followed.secret, followed.tls = secret, tls
        if available:
            followed.available.set()
        else:
            followed.available.clear()
            followed.away_since = followed.error = None
        return followed.mirror

    def uids_of(self, key: str) -> tuple[str, ...]:
        """Return the UIDs of all followed jobs with this key, including former ones."""
        return tuple(uid for uid, followed in self._followed.items() if followed.key == key)

    def unfollow(self, uid: str) -> None:
        """Stop following a job's etcd; delete the run's keys if the etcd is external."""
        followed = self._followed.pop(uid, None)
        if followed is not None:
            self._tasks.create_task(self._end(followed))

    async def write_size(self, uid: str, size: SizeRecord) -> None:
        """Write the desired size if the store is reachable; if not, the job is reconciled once the store can be read.

        Raises:
            StoreError: the write failed, and must be tried again.
        """
        followed = self._followed.get(uid)
        if followed is None:
            return
        try:
            async with asyncio.timeout(WRITE_TIMEOUT):
                await followed.mirror.write_size(size)
        except TimeoutError:
            raise StoreError(f"it has not answered within {WRITE_TIMEOUT} s") from None

    def forbidden(self, namespace: str, name: str) -> str | None:
        """Return why the operator may not read a Secret; None if it may."""
        if namespace in self._secret_namespaces:
            return None
        return (
            f"the operator may not read the Secret {name} in the namespace {namespace}, so it only "
            "sees the termination messages of pods: add the namespace to the chart's value etcd.secretNamespaces"
        )

    async def read_secret(self, namespace: str, name: str) -> Json:
        """Return a Secret with certificates for etcd.

        Raises:
            SecretError: there is no such Secret, or the operator may or can not read it.
        """
        try:
            return await self._api.get(SECRETS, namespace, name)
        except ClusterError as error:
            status = error.status if isinstance(error, ApiError) else 0
            if status == 404:
                raise SecretError(
                    f"the Secret {name} of spec.etcd.tlsSecret does not exist in the namespace {namespace}: create it"
                ) from None
            if status == 403:
                raise SecretError(
                    f"the operator may not read the Secret {name} in the namespace {namespace}: the chart grants this "
                    "right in the namespaces of its value etcd.secretNamespaces"
                ) from None
            raise SecretError(f"the Secret {name} with the credentials for etcd cannot be read: {error}") from None

    def _start(self, uid: str, key: str, *, external: bool) -> _Followed:
        mirror = StoreMirror(
            uid,
            changed=lambda: self._changed(followed),
            away=lambda error: self._away(followed, error),
            budget=self._budget,
        )
        followed = self._followed[uid] = _Followed(key, uid, mirror, external)
        followed.task = self._tasks.create_task(self._follow(followed))
        return followed

    async def _follow(self, followed: _Followed) -> NoReturn:
        while True:
            try:
                await followed.mirror.run(lambda: self._settings(followed), followed.available)
            except Exception as defect:
                logger.exception("%s: an unexpected error while its store was followed", followed.key)
                self._away(followed, StoreError(f"an unexpected error: {defect!r}"))
            await asyncio.sleep(_RESTART_DELAY)

    async def _settings(self, followed: _Followed) -> StoreSettings:
        """Return the settings of a new connection, with the current certificates."""
        context = None
        if followed.tls:
            context = client_context(self._certificates.issue(followed.uid))
        elif followed.secret is not None:
            secret = await self.read_secret(followed.key.partition("/")[0], followed.secret)
            context, followed.expiry = tls_context(secret), _expiry(secret)
        settings = store_at(followed.endpoint, context)
        if followed.external:
            settings = replace(settings, open_socket=self._endpoints.socket_for(settings.endpoints))
        return settings

    async def _read_expiries(self) -> NoReturn:
        while True:
            await asyncio.sleep(self._expiry_interval)
            for followed in list(self._followed.values()):
                if followed.secret is None:
                    continue
                try:
                    secret = await self.read_secret(followed.key.partition("/")[0], followed.secret)
                except StoreError as error:
                    logger.debug("%s: the expiry of its certificates is unknown: %s", followed.key, error)
                else:
                    followed.expiry = _expiry(secret)

    def _changed(self, followed: _Followed) -> None:
        if followed.mirror.readable:
            if followed.error is not None:
                logger.info("%s: its store can be reached again", followed.key)
            followed.away_since = followed.error = None
        self._on_change(followed.key)

    def _away(self, followed: _Followed, error: StoreError | SettingsError) -> None:
        if not followed.available.is_set():
            return
        reason = error.message if isinstance(error, StoreError) else str(error)
        now = time.monotonic()
        if followed.away_since is None:
            followed.away_since = now
        if followed.error is None:
            timeout = self._timeout if followed.external else self._managed_timeout
            due = followed.mirror.paused or now - followed.away_since >= timeout
        else:
            differs, paused = reason != followed.reason, followed.mirror.paused  # a pause is long
            due = differs and (paused or now - followed.reported >= _REPORT_INTERVAL)
        (logger.warning if due else logger.debug)("%s: its store cannot be reached: %s", followed.key, reason)
        if due:
            shown = with_hint(reason) if _is_harmless(followed, error) else _unusable(followed)
            followed.error, followed.reason, followed.reported = shown, reason, now
            self._on_change(followed.key)

    @staticmethod
    async def _end(followed: _Followed) -> None:
        try:
            if followed.external:
                async with asyncio.timeout(_CLEANUP_TIMEOUT):
                    await followed.mirror.forget_run()
        except (StoreError, TimeoutError) as error:
            logger.info("%s: its keys remain in its store for a day: %s", followed.key, str(error) or "no response")
        except Exception:
            logger.exception("%s: an unexpected error while its keys were removed from its store", followed.key)
        finally:
            if followed.task is not None:
                followed.task.cancel()
                await asyncio.wait([followed.task])


def _is_harmless(followed: _Followed, error: StoreError | SettingsError) -> bool:
    """Return whether the users of a job may see an error.

    The endpoint of an external etcd may be any server. How it answers, or that it does not, would show its open ports.
    """
    if isinstance(error, AddressForbidden):  # of several servers, the first ones may have been asked
        return "," not in followed.endpoint
    return not followed.external or isinstance(error, SettingsError | SecretError | StoreTooLarge)


def _unusable(followed: _Followed) -> str:
    """Return the same sentence for every failure of the connection to an external etcd."""
    if followed.expiry is not None and followed.expiry < time.time():
        return f"a certificate in the Secret {followed.secret}, which spec.etcd.tlsSecret names, has expired: renew it"
    return (
        f"etcd at {followed.endpoint} cannot be used: check that it runs, and its address, protocol (http:// or "
        "https://), certificates and network policies; the operator's log has the reason"
    )
