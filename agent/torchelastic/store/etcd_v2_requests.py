"""What the store is made of on an etcd v2: functions that ask its servers, one thing after the other, and wait.

They run in the thread of a line (:mod:`torchelastic.store.etcd_v2_line`) and keep nothing.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import etcd

from torchelastic.errors import HistoryCompacted, StoreError, StoreUnavailable
from torchelastic.store.etcd_faults import NoGateway
from torchelastic.store.etcd_v2_faults import index_of
from torchelastic.store.etcd_v2_names import Stored, folder_of, folders_above, key_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchelastic.store.etcd_v2_line import Answer, Servers

_TRIES: Final = 100
"""So often may others be faster before a change counts as impossible; each time means that somebody else made one."""

_REMOVALS: Final = frozenset({"delete", "expire", "compareAndDelete"})

_NOBODY: Final = "/_nobody"
"""A name below a folder that no key has."""


@dataclass(frozen=True, slots=True)
class Node:
    """A key with its value, as etcd has it.

    Attributes:
        path: under which it stands.
        stored: what stands there.
        created: the index at which it came into being.
        modified: the index of its last change; renewing its time to live counts as one.
        ttl: seconds left; None where it stays.
    """

    path: str
    stored: Stored
    created: int
    modified: int
    ttl: int | None = None


def node_of(answer: Answer) -> Node:
    """The key in an answer, or in a part of one.

    Raises:
        NoGateway: there is none.
    """
    path, text, created, modified = answer.key, answer.value, answer.createdIndex, answer.modifiedIndex
    if not (isinstance(path, str) and isinstance(created, int) and isinstance(modified, int)):
        raise NoGateway("what listens there does not answer as etcd's API v2 does: a key lacks its index")
    ttl = answer.ttl if isinstance(answer.ttl, int) else None
    return Node(path, Stored.read(text if isinstance(text, str) else ""), created, modified, ttl)


def seconds(ttl: float) -> int:
    """A time to live as etcd counts it."""
    return max(math.ceil(ttl), 1)


def find(servers: Servers, path: str) -> Node | None:
    """The key under a path, as the majority of the servers has it."""
    try:
        return node_of(servers.ask(lambda client: client.read(path, quorum=True), repeatable=True))
    except etcd.EtcdKeyNotFound:
        return None


def find_all(servers: Servers, prefix: str) -> tuple[int, list[tuple[str, Node]]]:
    """The index, and all keys with this prefix, in their order."""
    try:
        answer = servers.ask(
            lambda client: client.read(folder_of(prefix), recursive=True, quorum=True), repeatable=True
        )
    except etcd.EtcdKeyNotFound as error:
        return index_of(error), []
    return answer.etcd_index, sorted(_below(answer, prefix), key=lambda item: item[0])


def _below(answer: Answer, prefix: str) -> Iterator[tuple[str, Node]]:
    for leaf in answer.leaves:
        if not leaf.dir and (key := key_of(leaf.key)) is not None and key.startswith(prefix):
            yield key, node_of(leaf)


def current_index(servers: Servers, prefix: str) -> tuple[str, int]:
    """A server that answers for the majority and lets us read below a prefix, and etcd's index.

    The question is for a key that is not there: nothing could be smaller.
    """
    path = folder_of(prefix).rstrip("/") + _NOBODY
    try:
        index = servers.ask(lambda client: client.read(path, quorum=True), repeatable=True).etcd_index
    except etcd.EtcdKeyNotFound as error:
        index = index_of(error)
    return servers.asked, index


def put(servers: Servers, path: str, stored: Stored, ttl: float | None) -> Node:
    """Set a key, whatever stood there.

    Not by a plain "set", for which the key would be created anew.
    """
    for _ in range(_TRIES):
        with contextlib.suppress(etcd.EtcdKeyNotFound):
            return node_of(servers.ask(_write(path, stored.text, ttl, prevExist=True)))
        with contextlib.suppress(etcd.EtcdAlreadyExist):
            return create(servers, path, stored, ttl)
    raise StoreUnavailable(f"others create and delete {path} all the time")


def create(servers: Servers, path: str, stored: Stored, ttl: float | None) -> Node:
    """Set a key that is not there.

    Raises:
        EtcdAlreadyExist: it is.
    """
    return node_of(servers.ask(_write(path, stored.text, ttl, prevExist=False)))


def absent(servers: Servers, path: str) -> int | None:
    """The index of etcd, where there is no such key; None where there is."""
    try:
        servers.ask(lambda client: client.read(path, quorum=True), repeatable=True)
    except etcd.EtcdKeyNotFound as error:
        return index_of(error)
    return None


def swap(
    servers: Servers, path: str, stored: Stored | None, ttl: float | None, *, expected: int, stamp: str
) -> int | None:
    """Set a key (None: delete it) if it was written last at an index.

    Args:
        servers: whom to ask.
        path: of the key.
        stored: what is to stand there.
        ttl: seconds that it stays; None for good.
        expected: the index that its last change had when it was seen.
        stamp: of the write that was seen then; empty where it is not known.

    Returns:
        The new index; None where somebody has written it since.
    """
    for _ in range(_TRIES):
        try:
            if stored is None:
                return node_of(servers.ask(_delete(path, prevIndex=expected))).modified
            return node_of(servers.ask(_write(path, stored.text, ttl, prevIndex=expected))).modified
        except etcd.EtcdKeyNotFound:
            return None
        except etcd.EtcdCompareFailed:
            # Where only its time to live was renewed, the key has another index and is the same.
            found = find(servers, path)
            if found is None or not stamp or found.stored.stamp != stamp:
                return None
            expected = found.modified
    raise StoreUnavailable(f"others renew {path} all the time")


def renew(servers: Servers, path: str, ttl: float, *, text: str | None = None) -> Node:
    """Start a key's time anew, which no watch tells.

    Args:
        servers: whom to ask.
        path: of the key.
        ttl: seconds.
        text: what must stand there; None for anything.

    Raises:
        EtcdKeyNotFound: there is no such key.
        EtcdCompareFailed: something else stands there.
    """
    compare = {} if text is None else {"prevValue": text}
    return node_of(servers.ask(lambda client: client.refresh(path, seconds(ttl), **compare), repeatable=True))


def renew_if(servers: Servers, path: str, ttl: float, mine: Callable[[Stored], bool]) -> bool:
    """Start a key's time anew if what stands there is what the caller takes it for; tells whether it did."""
    for _ in range(_TRIES):
        found = find(servers, path)
        if found is None or not mine(found.stored):
            return False
        try:
            renew(servers, path, ttl, text=found.stored.text)
            return True
        except etcd.EtcdKeyNotFound:
            return False
        except etcd.EtcdCompareFailed:
            continue
    raise StoreUnavailable(f"others change {path} all the time")


def delete(servers: Servers, path: str) -> None:
    """Remove a key if it is there."""
    with contextlib.suppress(etcd.EtcdKeyNotFound):
        servers.ask(_delete(path))


def delete_if(servers: Servers, path: str, mine: Callable[[Stored], bool]) -> None:
    """Remove a key if what stands there is what the caller takes it for."""
    while (found := find(servers, path)) is not None and mine(found.stored):
        if swap(servers, path, None, None, expected=found.modified, stamp=found.stored.stamp) is not None:
            return


def remove_empty_folders(servers: Servers, paths: list[str]) -> None:
    """Remove the folders that these paths were in, as far as nothing is left in them and this user may."""
    for path in paths:
        with contextlib.suppress(etcd.EtcdException, StoreError):
            for folder in folders_above(path):
                servers.ask(_delete(folder, dir=True))


def next_change(
    servers: Servers, folder: str, start: int, *, at: str, patience: float
) -> tuple[str, Node | None, int] | int:
    """The next change below a folder from an index on.

    Args:
        servers: whom to ask.
        folder: below which.
        start: the index.
        at: which of the servers.
        patience: seconds to wait for it.

    Returns:
        Its path, what stands there now, and its index. Where there was none: the index up to which there is none.

    Raises:
        HistoryCompacted: changes from this index on are no longer kept, or a whole folder was removed.
    """
    try:
        answer = servers.ask(
            lambda client: client.read(folder, wait=True, waitIndex=start, recursive=True, timeout=patience), at=at
        )
    except etcd.EtcdWatchTimedOut:
        return max(servers.index, start - 1)
    except etcd.EtcdEventIndexCleared as error:
        raise HistoryCompacted(f"etcd no longer keeps the changes from index {start} on; list again") from error
    node = node_of(answer)
    gone = answer.action in _REMOVALS
    if answer.dir and gone:
        raise HistoryCompacted(f"the folder {node.path} was removed from etcd with all that was in it; list again")
    return node.path, None if gone else node, node.modified


def _write(path: str, text: str, ttl: float | None, **conditions: Any) -> Callable[[Any], Answer]:  # noqa: ANN401
    whole = None if ttl is None else seconds(ttl)
    return lambda client: client.write(path, text, ttl=whole, **conditions)


def _delete(path: str, **conditions: Any) -> Callable[[Any], Answer]:  # noqa: ANN401
    return lambda client: client.delete(path, **conditions)
