"""Leases on an etcd v2, which has none: there each key has a time to live of its own.

A lease that :meth:`~torchelastic.store.api.Store.grant` makes up is known to its client alone: the keys that it wrote
under it (:class:`OwnLease`). One of the caller's choice is known to all: a hidden key says for how long it is granted
and which keys hang on it, so that whoever keeps it alive keeps what the others have written.

A value says under which lease it was written, so nobody renews or removes a key that has passed to somebody else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import etcd
import msgspec

from torchelastic.contract import KEY_ROOT
from torchelastic.errors import LeaseLost, StoreUnavailable
from torchelastic.store import etcd_v2_requests as requests
from torchelastic.store.etcd_v2_names import Stored

if TYPE_CHECKING:
    from torchelastic.store.etcd_v2_line import Servers
    from torchelastic.store.etcd_v2_requests import Node

_SHARED: Final = f"{KEY_ROOT}/_leases"
"""Below what the agents may write anyway; the underscore hides it from those who list and watch there."""

_TRIES: Final = 100


@dataclass(slots=True)
class OwnLease:
    """A lease that only its client knows.

    Attributes:
        id: its id.
        ttl: seconds for which it is granted.
        ends_at: when it ends if nothing hangs on it, by the client's clock.
        texts: what was last written under it, by path.
        unsure: those of the paths that may never have been written.
    """

    id: int
    ttl: float
    ends_at: float
    texts: dict[str, str] = field(default_factory=dict)
    unsure: set[str] = field(default_factory=set)

    def note(self, path: str, text: str) -> str | None:
        """Something is about to be written under it; gives back what was before."""
        before = self.texts.get(path)
        if before is None:
            self.unsure.add(path)
        self.texts[path] = text
        return before

    def restore(self, path: str, before: str | None) -> None:
        """It was not written."""
        if before is None:
            self.drop(path)
        else:
            self.texts[path] = before

    def drop(self, path: str) -> None:
        """The path does not hang on it."""
        self.texts.pop(path, None)
        self.unsure.discard(path)

    def copy(self) -> OwnLease:
        """As it is now, for another thread."""
        return OwnLease(self.id, self.ttl, self.ends_at, dict(self.texts), set(self.unsure))


class _SharedLease(msgspec.Struct, frozen=True):
    """What the hidden key of a shared lease says.

    Attributes:
        ttl: seconds for which it is granted.
        keys: the paths that were written under it, and may hang on another one by now.
    """

    ttl: float
    keys: tuple[str, ...] = ()


def lost(lease: int) -> LeaseLost:
    """That there is no such lease any more."""
    return LeaseLost(f"lease {lease:x} has ended")


def keep_own(servers: Servers, lease: OwnLease) -> list[str]:
    """Start its time anew; gives back the paths that do not hang on it any more.

    Raises:
        LeaseLost: a key that hung on it is gone.
    """
    passed_on = []
    for path, text in tuple(lease.texts.items()):
        try:
            requests.renew(servers, path, lease.ttl, text=text)
        except etcd.EtcdKeyNotFound:
            if path not in lease.unsure:
                raise lost(lease.id) from None
            passed_on.append(path)
        except etcd.EtcdCompareFailed:
            if not requests.renew_if(servers, path, lease.ttl, lambda stored: stored.lease == lease.id):
                passed_on.append(path)
    return passed_on


def end_own(servers: Servers, lease: OwnLease) -> None:
    """Remove what hangs on it."""
    _remove(servers, tuple(lease.texts), lease.id)


def grant_shared(servers: Servers, lease: int, ttl: float) -> None:
    """Make it, or keep it alive if it is there."""
    for _ in range(_TRIES):
        try:
            requests.create(servers, _path(lease), _record(_SharedLease(ttl)), ttl)
        except etcd.EtcdAlreadyExist:
            try:
                keep_shared(servers, lease)
            except LeaseLost:
                continue  # it has just ended: then it can be made
        return
    raise StoreUnavailable(f"lease {lease:x} comes and goes all the time")


def keep_shared(servers: Servers, lease: int) -> None:
    """Start its time anew, and that of all keys that hang on it, whoever has written them.

    Raises:
        LeaseLost: it has ended.
    """
    _, shared = _read(servers, lease)
    try:
        requests.renew(servers, _path(lease), shared.ttl)
    except etcd.EtcdKeyNotFound:
        raise lost(lease) from None
    for path in shared.keys:  # one that is not there stays noted: it may be about to be written
        requests.renew_if(servers, path, shared.ttl, lambda stored: stored.lease == lease)


def join_shared(servers: Servers, lease: int, path: str) -> float:
    """Note that a key is about to hang on it; gives back the seconds that are left of it.

    Raises:
        LeaseLost: it has ended.
    """
    for _ in range(_TRIES):
        node, shared = _read(servers, lease)
        left = shared.ttl if node.ttl is None else node.ttl
        if path in shared.keys:
            return left
        record = _record(_SharedLease(shared.ttl, (*shared.keys, path)))
        swapped = requests.swap(servers, _path(lease), record, left, expected=node.modified, stamp=node.stored.stamp)
        if swapped is not None:
            return left
    raise StoreUnavailable(f"others write under lease {lease:x} all the time")


def end_shared(servers: Servers, lease: int) -> None:
    """Remove it and what hangs on it."""
    try:
        _, shared = _read(servers, lease)
    except LeaseLost:
        return
    _remove(servers, shared.keys, lease)
    requests.delete(servers, _path(lease))
    requests.remove_empty_folders(servers, [_path(lease)])


def _remove(servers: Servers, paths: tuple[str, ...], lease: int) -> None:
    for path in paths:
        requests.delete_if(servers, path, lambda stored: stored.lease == lease)
    requests.remove_empty_folders(servers, list(paths))


def _read(servers: Servers, lease: int) -> tuple[Node, _SharedLease]:
    node = requests.find(servers, _path(lease))
    if node is None:
        raise lost(lease)
    try:
        return node, msgspec.json.decode(node.stored.value, type=_SharedLease)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise lost(lease) from None


def _record(shared: _SharedLease) -> Stored:
    return Stored.new(msgspec.json.encode(shared), 0)


def _path(lease: int) -> str:
    return f"{_SHARED}/{lease:x}"
