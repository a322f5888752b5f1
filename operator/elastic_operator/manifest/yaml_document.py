"""Reads one YAML document as kubectl reads it, with the line on which each value stands.

PyYAML reads it, with the rules of kubectl's YAML library for values without quotes: ``y`` is true, ``1e3`` is a number,
``1:30`` and ``2001-01-01`` are texts. As in kubectl, a key must not stand twice, and 3.0 is 3.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import yaml
from yaml.reader import ReaderError

from elastic_operator.errors import BadInput

if TYPE_CHECKING:
    from elastic_operator.api.validation_error import Location

_MAX_DEPTH: Final = 100
_MAX_VALUES: Final = 100_000
"""Aliases can make a small file huge."""

_IMPLICIT: Final = {
    "null": r"~|null|Null|NULL|",
    "bool": r"y|Y|yes|Yes|YES|true|True|TRUE|on|On|ON|n|N|no|No|NO|false|False|FALSE|off|Off|OFF",
    "int": r"[-+]?(0b[01]{1,64}|0x[0-9a-fA-F]{1,16}|0[0-7]{0,22}|[1-9][0-9_]{0,18})",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    "merge": "<<",
}


_COLLECTIONS: Final = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with kubectl's rules for values without quotes."""

    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012 - so it is declared in PyYAML
    bool_values = {**yaml.SafeLoader.bool_values, "y": True, "n": False}  # noqa: RUF012


for _kind, _pattern in _IMPLICIT.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(rf"(?:{_pattern})\Z"), None)


@dataclass(frozen=True, slots=True)
class YamlDocument:
    """A document and where its values stand.

    Attributes:
        data: mappings with texts as keys, lists, texts, numbers, truth values and None.
        lines: the line of each value, or of its key, from 1.
        plain: what was written without quotes for a value that is not a text.
    """

    data: object = None
    lines: dict[Location, int] = field(default_factory=dict)
    plain: dict[Location, str] = field(default_factory=dict)


def read_document(text: str, name: str) -> YamlDocument:
    """Read the one document that the text holds.

    Args:
        text: YAML.
        name: what to call it in an error.

    Raises:
        BadInput: it is not YAML, empty, more than one document, or has a key twice.
    """
    try:
        loader = _Loader(text)
        nodes: list[yaml.Node] = []
        while loader.check_node():
            node = loader.get_node()
            if node is not None and node.tag != "tag:yaml.org,2002:null":
                nodes.append(node)
        if not nodes:
            raise BadInput(f"{name}: is empty; it should hold an ElasticJob")
        if len(nodes) > 1:
            line = nodes[1].start_mark.line + 1
            raise BadInput(f"{name}:{line}: a second document begins here; put each job into a file of its own")
        document = YamlDocument()
        data = _Reader(loader, name, document).value(nodes[0], ())
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        character = f"U+{ord(text[error.position]):04X}"
        raise BadInput(f"{name}:{line}: is not YAML: the character {character} cannot stand there") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        raise BadInput(f"{where}: is not YAML: {_cause(error)}") from None
    except RecursionError:
        raise BadInput(
            f"{name}: is nested too deeply, or too large with its aliases written out; "
            f"at most {_MAX_DEPTH} levels and {_MAX_VALUES} values are possible"
        ) from None
    return YamlDocument(data, document.lines, document.plain)


class _Reader:
    """Turns the nodes of a document into values, and notes their lines."""

    def __init__(self, loader: _Loader, name: str, document: YamlDocument) -> None:
        self._loader = loader
        self._name = name
        self._document = document
        self._count = 0
        self._flattened: set[yaml.Node] = set()

    def value(self, node: yaml.Node, location: Location, key: yaml.Node | None = None) -> object:
        """Return the value of a node."""
        self._count += 1
        if len(location) > _MAX_DEPTH or self._count > _MAX_VALUES:
            raise RecursionError
        self._document.lines[location] = (key or node).start_mark.line + 1
        self._document.plain.pop(location, None)
        if node.tag not in _COLLECTIONS and not isinstance(node, yaml.ScalarNode):
            raise self._bad(node, f"the tag {node.tag} has no meaning here; remove it")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, location)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*location, index)) for index, item in enumerate(node.value)]
        value = self._scalar(node)
        if not isinstance(value, str) and isinstance(node, yaml.ScalarNode) and node.style is None:
            self._document.plain[location] = node.value
        return value

    def _mapping(self, node: yaml.MappingNode, location: Location) -> dict[str, object]:
        if node not in self._flattened:
            self._flattened.add(node)
            seen: dict[str, int] = {}
            for key_node in (key_node for key_node, _ in node.value if not key_node.tag.endswith(":merge")):
                key, line = self._key(key_node), key_node.start_mark.line + 1
                if key in seen:
                    before = f"(before: line {seen[key]})"
                    raise self._bad(key_node, f"{key} stands here for the second time {before}; remove one of the two")
                seen[key] = line
            self._loader.flatten_mapping(node)
        found: dict[str, object] = {}
        for key_node, below in node.value:
            key = self._key(key_node)
            found[key] = self.value(below, (*location, key), key_node)
        return found

    def _key(self, node: yaml.Node) -> str:
        """Return a mapping's key, which is a text as in JSON."""
        value = self._scalar(node) if isinstance(node, yaml.ScalarNode) else None
        if value is None or isinstance(value, float):
            raise self._bad(node, "this cannot be the name of a field; put it into quotes if it is to be a text")
        return str(value).lower() if isinstance(value, bool) else str(value)

    def _scalar(self, node: yaml.Node) -> str | int | float | bool | None:
        try:
            value = self._loader.construct_object(node)
            if isinstance(value, str) and not value.isascii():  # JSON escapes one character as two halves
                return value.encode("utf-16", "surrogatepass").decode("utf-16")
        except (AttributeError, LookupError, TypeError, ValueError):
            raise self._bad(node, f"{node.value!r} cannot be read; put it into quotes, without a tag") from None
        if isinstance(value, float):
            if not math.isfinite(value):
                raise self._bad(node, f"{node.value} is not a number in JSON; write another, or put it into quotes")
            return int(value) if value.is_integer() and abs(value) < 2**63 else value
        if value is None or isinstance(value, str | int):
            return value
        raise self._bad(node, f"a value with the tag {node.tag} cannot be in JSON; put it into quotes, without a tag")

    def _bad(self, node: yaml.Node, message: str) -> BadInput:
        return BadInput(f"{self._name}:{node.start_mark.line + 1}: {message}")


def _cause(error: yaml.MarkedYAMLError) -> str:
    """Return what the parser says, or plainer words."""
    said = " ".join(part for part in (error.context, error.problem) if part)
    if "'\\t'" in said:
        return "a tab cannot indent; write spaces"
    if error.problem == "mapping values are not allowed here":
        return 'there is a ": " too many here; put the value into quotes if it has one in it, or check the indentation'
    return said
