"""Connecting to a store: the adapter that fits the server, once the server answers."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, TypeVar

from torchelastic.errors import StoreRefused, StoreUnavailable
from torchelastic.store.backoff import Backoff
from torchelastic.store.etcd_http import WrongApi
from torchelastic.store.etcd_v3 import EtcdV3Store

if TYPE_CHECKING:
    from torchelastic.store.api import Store, StoreSettings
    from torchelastic.store.etcd_v2 import EtcdV2Store

_Store = TypeVar("_Store", "EtcdV3Store", "EtcdV2Store")

logger = logging.getLogger(__name__)


async def connect(settings: StoreSettings) -> Store:
    """Return a store on the servers that the settings name, after one of them has answered.

    If the settings name no version, this is etcd's API v3, or v2 if the servers have no other.

    Raises:
        StoreUnavailable: none answers.
        StoreRefused: one answers, but not with the API that is asked for, or refuses the credentials.
    """
    if settings.version == 2:
        return await _checked(_v2(settings))
    try:
        return await _checked(EtcdV3Store(settings))
    except WrongApi as no_v3:
        if settings.version is not None:
            raise
        try:
            store = await _checked(_v2(settings))
        except WrongApi as no_v2:
            raise StoreRefused(f"{no_v3}; nor does it serve the API v2") from no_v2
        except NoPythonEtcd as no_v2:
            raise StoreRefused(f"{no_v3}; and {no_v2}") from no_v2
        logger.debug("the API v2 of etcd is used, since %s", no_v3)
        return store


async def connect_within(settings: StoreSettings, seconds: float) -> Store:
    """Return a store as :func:`connect` does, waiting for the servers at most ``seconds``.

    Raises:
        StoreUnavailable: none has answered.
        StoreRefused: one has answered, and trying again does not help.
    """
    deadline = time.monotonic() + seconds
    backoff = Backoff()
    while True:
        try:
            return await connect(settings)
        except StoreUnavailable as error:
            if backoff.attempts == 0:
                logger.warning("%s; trying again for %g s", error, seconds)
            if time.monotonic() > deadline:
                raise
        await backoff.wait()


class NoPythonEtcd(StoreRefused):
    """The package that speaks etcd's API v2 is not installed."""


def _v2(settings: StoreSettings) -> EtcdV2Store:
    try:
        from torchelastic.store.etcd_v2 import EtcdV2Store
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in {"etcd", "urllib3", "dns"}:
            raise
        raise NoPythonEtcd("etcd's API v2 needs the package python-etcd: pip install python-etcd") from error
    return EtcdV2Store(settings)


async def _checked(store: _Store) -> _Store:
    try:
        await store.check()
    except BaseException:
        await store.close()
        raise
    return store
