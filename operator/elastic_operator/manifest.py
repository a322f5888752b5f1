"""Reads an ElasticJob from a file and checks it, so that whoever wrote it learns at once what to change, and where.

Every error is one sentence that begins with the file, the line and the field: ``digits.yaml:7: spec.minReplicas: …``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from elastic_operator import crd
from elastic_operator.errors import BadInput
from elastic_operator.merge import three_way_merge
from elastic_operator.problem import Location, Problem, in_words, shown
from elastic_operator.spec import ElasticJobSpec, Json
from elastic_operator.yaml_source import MAX_BYTES, read_document

if TYPE_CHECKING:
    from pathlib import Path

DEFAULT_NAMESPACE: Final = "default"


@dataclass(frozen=True, slots=True)
class Manifest:
    """A file as it was written: nothing of it is checked but that it is one YAML mapping.

    Attributes:
        path: the file, as the user named it.
        data: what it says.
        lines: the line of each value, from 1.
        plain: what was written where YAML made something else than a text of it.
    """

    path: Path
    data: Json
    lines: Mapping[Location, int] = field(default_factory=dict)
    plain: Mapping[Location, str] = field(default_factory=dict)

    def line(self, location: Location) -> int:
        """The line of a value; of what it should stand in, where it is missing."""
        while location and location not in self.lines:
            location = location[:-1]
        return self.lines.get(location, 1)

    def located(self, problem: Problem) -> str:
        """The problem with file and line."""
        return f"{self.path}:{self.line(problem.location)}: {problem}{self._as_written(problem.location)}"

    def bad_input(self, problems: Iterable[Problem]) -> BadInput:
        """The error to raise for these problems, in the order of their lines."""
        ordered = sorted(problems, key=lambda problem: self.line(problem.location))
        return BadInput(in_words([self.located(problem) for problem in ordered]))

    def _as_written(self, location: Location) -> str:
        """A word on what YAML made of a text without quotes, where it is not the same."""
        written = self.plain.get(location)
        value: object = self.data
        for step in location:
            if isinstance(value, Mapping):
                value = value.get(step)
            elif isinstance(value, list) and isinstance(step, int):
                value = value[step]
        return f" (YAML reads {written} as {shown(value)})" if written and written != shown(value) else ""


@dataclass(frozen=True, slots=True)
class ElasticJobManifest:
    """An ElasticJob that has passed every check.

    Attributes:
        source: the file that it comes from; its ``data`` is what to remember as last applied.
        job: the whole object, with the namespace and the defaults filled in.
        spec: the typed form of its spec.
    """

    source: Manifest
    job: Json
    spec: ElasticJobSpec

    @property
    def name(self) -> str:
        """The job's name."""
        return str(self.job["metadata"]["name"])

    @property
    def namespace(self) -> str:
        """Where the job is to live."""
        return str(self.job["metadata"]["namespace"])


def load(path: Path) -> Manifest:
    """A file as it is written.

    Raises:
        BadInput: it cannot be read, or is not one YAML document with a mapping in it.
    """
    document = read_document(_text(path), str(path))
    if not isinstance(document.data, Mapping):
        raise BadInput(
            f"{path}: should begin with apiVersion, kind, metadata and spec, but holds {shown(document.data)}"
        )
    return Manifest(path, document.data, document.lines, document.plain)


def check(manifest: Manifest) -> ElasticJobManifest:
    """The job that a file describes.

    Raises:
        BadInput: an API server would refuse it; the message names every problem with its line.
    """
    if problems := crd.validate(manifest.data):
        raise manifest.bad_input(problems)
    return _checked(manifest, manifest.data)


def check_change(manifest: Manifest, *, last_applied: Json, live: Json) -> ElasticJobManifest:
    """The job that a running one becomes by the file's having been changed, as by ``kubectl apply``.

    Args:
        manifest: the file as it is now.
        last_applied: what it said when it was applied last.
        live: the running job's object.

    Raises:
        BadInput: the result would be refused, or is more of a change than a running job can follow.
    """
    merged = three_way_merge(last_applied, live, manifest.data)
    if problems := crd.validate(merged, old=live) or crd.refused_changes(live, merged):
        raise manifest.bad_input(problems)
    return _checked(manifest, merged)


def load_checked(path: Path) -> ElasticJobManifest:
    """The job that a file describes: :func:`load` and :func:`check`."""
    return check(load(path))


def _checked(manifest: Manifest, data: Json) -> ElasticJobManifest:
    job = crd.apply_defaults(data)
    if not job["metadata"].get("namespace"):
        job["metadata"]["namespace"] = DEFAULT_NAMESPACE
    return ElasticJobManifest(manifest, job, ElasticJobSpec.of(job["spec"]))


def _text(path: Path) -> str:
    """The file's text."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise BadInput(f"{path}: there is no such file; check the path") from None
    except IsADirectoryError:
        raise BadInput(f"{path}: is a folder; name the manifest's file in it") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise BadInput(f"{path}: cannot be read: {reason}") from None
    if len(data) > MAX_BYTES:
        raise BadInput(f"{path}: is larger than any manifest may be ({MAX_BYTES >> 10} KiB); is it the right file?")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise BadInput(f"{path}:{line}: is not UTF-8; save it in that encoding (is it the right file?)") from None
