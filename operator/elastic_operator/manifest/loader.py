"""Reads an ElasticJob from a file and checks it. Every error begins with file, line and field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from elastic_operator.api.spec import ElasticJobSpec, Json
from elastic_operator.api.validation_error import Location, Problem, in_words, shown
from elastic_operator.errors import BadInput
from elastic_operator.manifest import crd
from elastic_operator.manifest.yaml_document import read_document

if TYPE_CHECKING:
    from pathlib import Path

DEFAULT_NAMESPACE: Final = "default"
MAX_BYTES: Final = 256 * 1024
"""`kubectl apply` keeps the manifest in an annotation, which takes no more."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A file as it is written, before any check.

    Attributes:
        path: the file, as the user named it.
        data: the mapping in it.
        lines: the line of each value, from 1.
        plain: what was written without quotes for a value that is not a text.
    """

    path: Path
    data: Json
    lines: Mapping[Location, int] = field(default_factory=dict)
    plain: Mapping[Location, str] = field(default_factory=dict)

    def line(self, location: Location) -> int:
        """Return the line of a value, or of the value around it if it is missing."""
        while location and location not in self.lines:
            location = location[:-1]
        return self.lines.get(location, 1)

    def located(self, problem: Problem) -> str:
        """Return the problem with file and line."""
        written, value = self.plain.get(problem.location), _value_at(self.data, problem.location)
        note = f" (YAML reads {written} as {shown(value)})" if written and written != shown(value) else ""
        return f"{self.path}:{self.line(problem.location)}: {problem}{note}"

    def bad_input(self, problems: Iterable[Problem]) -> BadInput:
        """Return the error for these problems, in the order of their lines."""
        ordered = sorted(problems, key=lambda problem: self.line(problem.location))
        return BadInput(in_words([self.located(problem) for problem in ordered]))


@dataclass(frozen=True, slots=True)
class ElasticJobManifest:
    """An ElasticJob that has passed every check.

    Attributes:
        source: the file that it comes from.
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
        """The job's namespace."""
        return str(self.job["metadata"]["namespace"])


def load(path: Path) -> Manifest:
    """Read a file without checking it.

    Raises:
        BadInput: it cannot be read, or is not one YAML document with a mapping in it.
    """
    document = read_document(_text(path), str(path))
    if not isinstance(document.data, Mapping):
        raise BadInput(
            f"{path}: should begin with apiVersion, kind, metadata and spec, but holds {shown(document.data)}"
        )
    return Manifest(path, document.data, document.lines, document.plain)


def load_checked(path: Path) -> ElasticJobManifest:
    """Read the job that a file describes.

    Raises:
        BadInput: an API server would refuse it; the message names every problem with its line.
    """
    manifest = load(path)
    if problems := crd.validate(manifest.data):
        raise manifest.bad_input(problems)
    return _checked(manifest, manifest.data)


def check_change(manifest: Manifest, *, live: Json, kept: Json) -> ElasticJobManifest:
    """Return the job that a running one becomes when its file has changed.

    Args:
        manifest: the file as it is now.
        live: the running job's object, with the metadata that an API server adds.
        kept: fields of the spec that stay as they are if the file does not name them.

    Raises:
        BadInput: the result is not valid, or a running job cannot follow the change.
    """
    data = dict(manifest.data)
    if isinstance(metadata := data.get("metadata"), Mapping):
        written = ("namespace", "uid", "generation", "creationTimestamp")
        data["metadata"] = {**{key: live["metadata"][key] for key in written if key in live["metadata"]}, **metadata}
    if isinstance(spec := data.get("spec"), Mapping):
        data["spec"] = {**kept, **{key: value for key, value in spec.items() if value is not None}}
    if problems := crd.validate(data, old=live) or crd.refused_changes(live, data):
        raise manifest.bad_input(problems)
    return _checked(manifest, data)


def _checked(manifest: Manifest, data: Json) -> ElasticJobManifest:
    job = crd.apply_defaults(data)
    if not job["metadata"].get("namespace"):
        job["metadata"]["namespace"] = DEFAULT_NAMESPACE
    return ElasticJobManifest(manifest, job, ElasticJobSpec.of(job["spec"]))


def _value_at(value: object, location: Location) -> object:
    for step in location:
        if isinstance(value, Mapping):
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int):
            value = value[step]
    return value


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise BadInput(f"{path}: there is no such file; check the path") from None
    except IsADirectoryError:
        raise BadInput(f"{path}: is a directory; name the manifest's file in it") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise BadInput(f"{path}: cannot be read: {reason}") from None
    if len(data) > MAX_BYTES:
        raise BadInput(f"{path}: is larger than a manifest may be ({MAX_BYTES >> 10} KiB); is it the right file?")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise BadInput(f"{path}:{line}: is not UTF-8; save it in that encoding (is it the right file?)") from None
