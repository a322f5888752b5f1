"""Read an ElasticJob from a YAML file, and check it. Each error begins with the file, the line and the field.

PyYAML reads the file, with the rules of kubectl's YAML library for values without quotes: ``y`` is true, ``1e3`` is a
number, ``1:30`` and ``2001-01-01`` are strings. As in kubectl, the keys of a mapping must differ, and 3.0 is 3.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import yaml
from yaml.reader import ReaderError

from elastic_operator.api.json_values import Json, shown
from elastic_operator.api.spec import ElasticJobSpec
from elastic_operator.api.validation import Location, Problem, error_list
from elastic_operator.errors import BadInput
from elastic_operator.manifest import crd

if TYPE_CHECKING:
    from pathlib import Path

DEFAULT_NAMESPACE: Final = "default"
MAX_BYTES: Final = 256 * 1024
"""The size limit of an object's annotations: ``kubectl apply`` stores the manifest in one of them."""
_MAX_VALUES: Final = 100_000
"""Maximum number of values after the expansion of aliases: a small file can refer to the same list many times."""
_IMPLICIT: Final = {
    "null": r"~|null|Null|NULL|",
    "bool": r"y|Y|yes|Yes|YES|true|True|TRUE|on|On|ON|n|N|no|No|NO|false|False|FALSE|off|Off|OFF",
    "int": r"[-+]?(0b[01]{1,64}|0x[0-9a-fA-F]{1,16}|0[0-7]{0,22}|[1-9][0-9_]{0,18})",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]{1,2})?",
    "merge": "<<",
}


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with kubectl's rules for keys and for values without quotes."""

    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012 - so it is declared in PyYAML
    bool_values = {**yaml.SafeLoader.bool_values, "y": True, "n": False}  # noqa: RUF012

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key_node in (key for key, _ in node.value if not key.tag.endswith(":merge")):
            key, line = self.key(key_node), key_node.start_mark.line + 1
            if key in lines:
                raise self.bad_input(
                    key_node, f"{key} is set twice (first in line {lines[key]}); remove one of the entries"
                )
            lines[key] = line
        self.flatten_mapping(node)
        self.check_number(len(node.value))
        return node

    def check_number(self, number: int) -> None:
        """Reject a manifest that is too large after the expansion of aliases and merges."""
        if number > _MAX_VALUES:
            raise BadInput(f"{self.name}: has more than {_MAX_VALUES} values when its aliases are expanded; shorten it")

    def key(self, node: yaml.Node) -> str:
        """Return the key of a mapping as a string, because keys are strings in JSON."""
        value = self.scalar(node) if isinstance(node, yaml.ScalarNode) else None
        if value is None:
            raise self.bad_input(node, "this cannot be the name of a field; put it into quotes to make it a string")
        return str(value).lower() if isinstance(value, bool) else str(value)

    def scalar(self, node: yaml.ScalarNode) -> object:
        """Return a string, a number, a Boolean or None."""
        try:
            value = self.construct_object(node)
            if isinstance(value, str) and not value.isascii():  # JSON may escape a character as two surrogates
                return value.encode("utf-16", "surrogatepass").decode("utf-16")
        except (LookupError, ValueError):
            raise self.bad_input(node, f"{node.value!r} cannot be read; put it into quotes, without a tag") from None
        return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**63 else value

    def bad_input(self, node: yaml.Node, message: str) -> BadInput:
        return BadInput(f"{self.name}:{node.start_mark.line + 1}: {message}")


for _kind, _pattern in _IMPLICIT.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(rf"(?:{_pattern})\Z"), None)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a file, before any check.

    Attributes:
        path: the file, as the user named it.
        data: the mapping in it.
        lines: the line number of each value; the first line is 1.
    """

    path: Path
    data: Json
    lines: dict[Location, int] = field(default_factory=dict)

    def line(self, location: Location) -> int:
        """Return the line of a value, or of the value that should contain it if it is missing."""
        while location and location not in self.lines:
            location = location[:-1]
        return self.lines.get(location, 1)

    def bad_input(self, problems: Iterable[Problem]) -> BadInput:
        """Return the error for these problems, in the order of their lines."""
        ordered = sorted(problems, key=lambda problem: self.line(problem.location))
        return BadInput(error_list([f"{self.path}:{self.line(problem.location)}: {problem}" for problem in ordered]))


@dataclass(frozen=True, slots=True)
class ElasticJobManifest:
    """An ElasticJob that has passed every check.

    Attributes:
        source: the file that the job comes from.
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
        BadInput: the file cannot be read, is too large, or is not a single YAML document that is a mapping.
    """
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
        return parse(data.decode("utf-8-sig"), path)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise BadInput(f"{path}:{line}: is not UTF-8; save it in that encoding (is it the right file?)") from None


def parse(text: str, path: Path) -> Manifest:
    """Read the only document in the text of the file at ``path``.

    Raises:
        BadInput: the text is not YAML, is empty, has several documents or duplicate keys, or is not a mapping.
    """
    try:
        loader = _Loader(text)
        loader.name = str(path)
        nodes: list[yaml.Node] = []
        while loader.check_node():
            node = loader.get_node()
            if node is not None and node.tag != "tag:yaml.org,2002:null":
                nodes.append(node)
        if not nodes:
            raise BadInput(f"{path}: is empty; it should hold an ElasticJob")
        if len(nodes) > 1:
            raise loader.bad_input(nodes[1], "a second document begins here; put each job into a file of its own")
        lines: dict[Location, int] = {}
        data = _value(loader, lines, nodes[0], (), nodes[0])
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        character = f"U+{ord(text[error.position]):04X}"
        raise BadInput(f"{path}:{line}: is not YAML: the character {character} is not allowed") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else path
        what = " ".join(part for part in (error.context, error.problem) if part)
        raise BadInput(f"{where}: is not YAML: {what}") from None
    except RecursionError:
        raise BadInput(f"{path}: is nested too deeply") from None
    if not isinstance(data, Mapping):
        raise BadInput(f"{path}: should begin with apiVersion, kind, metadata and spec, but holds {shown(data)}")
    return Manifest(path, data, lines)


def load_checked(path: Path) -> ElasticJobManifest:
    """Read and validate the job that a file describes.

    Raises:
        BadInput: an API server would reject the job; the message names each problem with its line.
    """
    manifest = load(path)
    if problems := crd.validate(manifest.data):
        raise manifest.bad_input(problems)
    return with_defaults(manifest, manifest.data)


def with_defaults(manifest: Manifest, data: Json) -> ElasticJobManifest:
    """Return the job of a file with defaults; ``data`` is the job's object, which has passed every check."""
    job = crd.apply_defaults(data)
    if not job["metadata"].get("namespace"):
        job["metadata"]["namespace"] = DEFAULT_NAMESPACE
    return ElasticJobManifest(manifest, job, ElasticJobSpec.of(job["spec"]))


def _value(
    loader: _Loader, lines: dict[Location, int], node: yaml.Node, location: Location, start: yaml.Node
) -> object:
    """Return the value of a node; record the line of ``start`` as its line."""
    lines[location] = start.start_mark.line + 1
    loader.check_number(len(lines))
    if isinstance(node, yaml.MappingNode):
        pairs = [(loader.key(key), key, below) for key, below in node.value]
        return {name: _value(loader, lines, below, (*location, name), key) for name, key, below in pairs}
    if isinstance(node, yaml.SequenceNode):
        return [_value(loader, lines, item, (*location, index), item) for index, item in enumerate(node.value)]
    assert isinstance(node, yaml.ScalarNode)  # noqa: S101 - the third and last kind of node
    return loader.scalar(node)
