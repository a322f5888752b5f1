"""Find and check the kubeconfig, as kubectl does: ``--kubeconfig``, else KUBECONFIG, else ``~/.kube/config``."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from elastic_operator.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from elastic_operator.kubernetes.client import Api

_AnyApi = TypeVar("_AnyApi", bound="Api")


def find(given: str | None, environ: Mapping[str, str]) -> list[Path]:
    """Return the files that exist: the given one, or those that KUBECONFIG names, or the usual one.

    Raises:
        BadInput: there is none.
    """
    if given is not None:
        path = Path(given).expanduser()
        if not path.is_file():
            raise BadInput(f"there is no kubeconfig {given}; check the path after --kubeconfig")
        return [path]
    named = [Path(part).expanduser() for part in environ.get("KUBECONFIG", "").split(os.pathsep) if part]
    found = [path for path in named or [Path("~/.kube/config").expanduser()] if path.is_file()]
    if not found:
        where = f"KUBECONFIG names {os.pathsep.join(map(str, named))}" if named else "~/.kube/config is not there"
        raise BadInput(f"there is no kubeconfig ({where}); name one with --kubeconfig")
    return found


async def connection(kind: type[_AnyApi], files: Sequence[Path], context: str | None) -> _AnyApi:
    """Return the connection of a context (None: the current one) of these files together; not opened yet.

    Raises:
        BadInput: there is no such context, or it is invalid.
    """
    paths = ":".join(map(str, files))
    try:
        _check(files, context)
        with _logged_errors() as problems:
            api = await kind.from_kubeconfig(paths, context)
    except (TypeError, KeyError, AttributeError, LookupError) as error:
        raise BadInput(f"the kubeconfig {paths} cannot be used ({error}); correct it, or name another") from None
    if problems:
        raise BadInput(f"the kubeconfig {paths} gives no credentials: {problems[0]}")
    return api


def _check(files: Sequence[Path], context: str | None) -> None:
    names = " and ".join(map(str, files))
    documents = [_read(path) for path in files]
    contexts, clusters, users = (
        {
            str(entry.get("name")): entry.get(section.removesuffix("s")) or {}
            for document in reversed(documents)  # of entries with the same name, the first counts
            for entry in document.get(section) or ()
            if isinstance(entry, dict)
        }
        for section in ("contexts", "clusters", "users")
    )
    chosen = (
        context if context is not None else next(filter(None, (each.get("current-context") for each in documents)), "")
    )
    known = ", ".join(contexts) or "none"
    if not chosen:
        raise BadInput(f"{names} has no current context; choose one with --context (there are: {known})")
    if chosen not in contexts:
        raise BadInput(f"{names} has no context {chosen}; choose another with --context (there are: {known})")
    for kind, entries in (("cluster", clusters), ("user", users)):
        name = contexts[chosen].get(kind)
        if name not in entries:
            raise BadInput(f"{names} has no {kind} {name or ''}, which its context {chosen} names; correct the file")
    cluster = contexts[chosen]["cluster"]
    if not str(clusters[cluster].get("server")).startswith(("https://", "http://")):
        raise BadInput(f"{names} has no server (https://…) for the cluster {cluster}; correct the file")


def _read(path: Path) -> dict[str, Any]:
    try:
        read = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise BadInput(f"the kubeconfig {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:
        where = getattr(error, "problem_mark", None)
        line = f" in line {where.line + 1}" if where else ""
        raise BadInput(f"the kubeconfig {path} is no YAML{line}; correct it, or name another") from None
    if not isinstance(read, dict) or not all(
        isinstance(read.get(section) or [], list) for section in ("contexts", "clusters", "users")
    ):
        raise BadInput(f"{path} is no kubeconfig; name another with --kubeconfig")
    return read


@contextlib.contextmanager
def _logged_errors() -> Iterator[list[str]]:
    """Collect what the official client logs: without credentials, it goes on."""
    messages: list[str] = []
    logger, handler = logging.getLogger("kubernetes.aio.config"), logging.Handler(logging.ERROR)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
