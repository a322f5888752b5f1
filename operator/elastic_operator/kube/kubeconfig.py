"""Which kubeconfig a person means, and the connection that it gives: what is wrong with it is said in a sentence.

As kubectl has it: ``--kubeconfig`` names one file; else KUBECONFIG names files, with colons between them, of which
those that are not there are passed over; else it is ``~/.kube/config``.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from elastic_operator.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence

    from elastic_operator.kube.api import Api

_AnyApi = TypeVar("_AnyApi", bound="Api")

_SECTIONS = ("contexts", "clusters", "users")


def find(given: str | None, environ: Mapping[str, str]) -> list[Path]:
    """The files that are there.

    Args:
        given: the file that the command line names; None where it names none.
        environ: has KUBECONFIG and HOME.

    Raises:
        BadInput: there is none.
    """
    if given is not None:
        path = Path(given).expanduser()
        if not path.is_file():
            raise BadInput(f"there is no kubeconfig {given}; check the path after --kubeconfig")
        return [path]
    named = [Path(part).expanduser() for part in environ.get("KUBECONFIG", "").split(os.pathsep) if part]
    there = [path for path in named or [Path("~/.kube/config").expanduser()] if path.is_file()]
    if not there:
        where = f"KUBECONFIG names {os.pathsep.join(map(str, named))}" if named else "~/.kube/config is not there"
        raise BadInput(f"there is no kubeconfig ({where}); name one with --kubeconfig")
    return there


def check(files: Iterable[Path], context: str | None) -> None:
    """See that there is such a context, and what it names.

    Args:
        files: they count together; of two entries with the same name, the first counts.
        context: None for the current one.

    Raises:
        BadInput: not so; the message says what there is.
    """
    names = " and ".join(map(str, files := list(files)))
    known: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
    current = ""
    for path in files:
        read = _read(path)
        current = current or str(read.get("current-context") or "")
        for section in _SECTIONS:
            for name, value in _entries(read.get(section), section.removesuffix("s")):
                known[section].setdefault(name, value)
    chosen = context if context is not None else current
    contexts = ", ".join(known["contexts"]) or "none"
    if not chosen:
        raise BadInput(f"{names} has no current context; choose one with --context (there are: {contexts})")
    if chosen not in known["contexts"]:
        raise BadInput(f"{names} has no context {chosen}; choose another with --context (there are: {contexts})")
    for section in ("clusters", "users"):
        kind = section.removesuffix("s")
        name = known["contexts"][chosen].get(kind)
        if not isinstance(name, str) or name not in known[section]:
            raise BadInput(f"{names} has no {kind} {name or ''}, which its context {chosen} names; correct the file")
    cluster = known["contexts"][chosen]["cluster"]
    if not str(known["clusters"][cluster].get("server")).startswith(("https://", "http://")):
        raise BadInput(f"{names} has no server (https://…) for the cluster {cluster}; correct the file")


async def connection(kind: type[_AnyApi], files: Sequence[Path], context: str | None) -> _AnyApi:
    """The connection that a kubeconfig gives; not opened yet.

    Args:
        kind: of connection.
        files: they count together.
        context: None for the current one.

    Raises:
        BadInput: there is no such context, or it can't be used.
    """
    check(files, context)
    paths = ":".join(map(str, files))
    try:
        with _overheard() as problems:
            api = await kind.from_kubeconfig(paths, context)
    except (TypeError, KeyError, AttributeError, LookupError) as error:
        raise BadInput(f"the kubeconfig {paths} cannot be used ({error}); correct it, or name another") from None
    if problems:
        raise BadInput(f"the kubeconfig {paths} gives no credentials: {problems[0]}")
    return api


@contextlib.asynccontextmanager
async def opened(api: _AnyApi, source: str = "the kubeconfig") -> AsyncGenerator[_AnyApi, None]:
    """The connection, within the block.

    Args:
        api: not opened yet.
        source: where its certificates come from, for a sentence.

    Raises:
        BadInput: certificates or keys can't be used.
    """
    try:
        await api.__aenter__()
    except (OSError, ValueError) as error:
        raise BadInput(f"the certificates of {source} cannot be used: {error}") from None
    try:
        yield api
    finally:
        await api.__aexit__(None, None, None)


@contextlib.contextmanager
def _overheard() -> Iterator[list[str]]:
    """What the official client says to its log: where it can't get credentials, it goes on without."""
    said: list[str] = []
    logger, handler = logging.getLogger("kubernetes.aio.config"), logging.Handler(logging.ERROR)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def _read(path: Path) -> dict[str, Any]:
    try:
        read = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise BadInput(f"the kubeconfig {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:
        where = getattr(error, "problem_mark", None)
        line = f" in line {where.line + 1}" if where else ""
        raise BadInput(f"the kubeconfig {path} is no YAML{line}; correct it, or name another") from None
    if not isinstance(read, dict):
        raise BadInput(f"{path} is no kubeconfig; name another with --kubeconfig")
    return read


def _entries(section: object, kind: str) -> Iterable[tuple[str, dict[str, Any]]]:
    for entry in section if isinstance(section, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("name"), str):
            value = entry.get(kind)
            yield entry["name"], value if isinstance(value, dict) else {}
