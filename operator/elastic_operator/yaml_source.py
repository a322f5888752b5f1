"""Reads one YAML document as kubectl reads it, and remembers on which line each value stands.

PyYAML scans and parses; this module turns the nodes into values, for four reasons. kubectl's YAML is not PyYAML's:
``y`` is true there, ``1e3`` a number, ``1:30`` and ``2001-01-01`` are texts, and the same file has to mean the same
here. A key that stands twice is refused (elsewhere the last one wins silently). Aliases can make a small file huge:
what they stand for counts. And every problem is to be told with its line.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import yaml
from yaml.composer import Composer
from yaml.parser import Parser
from yaml.reader import Reader, ReaderError
from yaml.resolver import Resolver
from yaml.scanner import Scanner

from elastic_operator.errors import BadInput
from elastic_operator.yaml_scalars import Scalar, resolved

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from elastic_operator.problem import Location

MAX_BYTES: Final = 256 * 1024
"""Of a manifest; also what it may grow to through its aliases. `kubectl apply` keeps the manifest in an annotation, and
that is as much as an API server takes there."""

_MAX_DEPTH: Final = 100

_IMPLICIT: Final = "implicit"
"""The tag of a scalar without quotes and without a tag of its own: what it is shows in its text."""
_STANDARD: Final = "tag:yaml.org,2002:"
_COLLECTION_TAGS: Final = {f"{_STANDARD}map", f"{_STANDARD}seq"}


@dataclass(frozen=True, slots=True)
class YamlDocument:
    """A document and where its values stand.

    Attributes:
        data: mappings with texts as keys, lists, texts, numbers, truth values and None.
        lines: for each value the line on which it (or its key) stands, from 1.
        plain: for values that were written without quotes and are no texts, what was written.
    """

    data: object
    lines: Mapping[Location, int] = field(default_factory=dict)
    plain: Mapping[Location, str] = field(default_factory=dict)


def read_document(text: str, name: str) -> YamlDocument:
    """The one document that the text holds.

    Args:
        text: YAML.
        name: what to call it in an error.

    Raises:
        BadInput: it is not YAML, empty, more than one document, larger than any manifest may be, or says a thing twice.
    """
    nodes = [node for node in _nodes(text, name) if not _is_empty(node)]
    if not nodes:
        raise BadInput(f"{name}: is empty; it should hold an ElasticJob")
    if len(nodes) > 1:
        line = nodes[1].start_mark.line + 1
        raise BadInput(f"{name}:{line}: a second document begins here; put each job into a file of its own")
    reading = _Reading(name)
    data = reading.value(nodes[0], ())
    return YamlDocument(data, reading.lines, reading.plain)


class _Loader(Reader, Scanner, Parser, Composer, Resolver):
    """Composes nodes; leaves what a plain scalar is to us."""

    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        Resolver.__init__(self)

    def resolve(self, kind: type[yaml.Node], value: object, implicit: tuple[bool, bool]) -> str:  # noqa: ARG002
        """The tag of a node that has none: called by Composer, which also hands in the text."""
        if kind is yaml.ScalarNode:
            return _IMPLICIT if implicit[0] else self.DEFAULT_SCALAR_TAG
        return self.DEFAULT_SEQUENCE_TAG if kind is yaml.SequenceNode else self.DEFAULT_MAPPING_TAG


def _nodes(text: str, name: str) -> Iterator[yaml.Node]:
    """The documents of the text."""
    try:
        loader = _Loader(text)
        while loader.check_node():
            if (node := loader.get_node()) is not None:
                yield node
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise BadInput(
            f"{name}:{line}: is not YAML: the character U+{ord(text[error.position]):04X} cannot stand there"
        ) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        raise BadInput(f"{where}: is not YAML: {_cause(error)}") from None
    except RecursionError:
        raise BadInput(f"{name}: is nested too deeply; at most {_MAX_DEPTH} levels are possible") from None


def _cause(error: yaml.MarkedYAMLError) -> str:
    """What the parser says, and a hint where it is hard to understand."""
    said = " ".join(part for part in (error.context, error.problem) if part)
    if "'\\t'" in said:
        return "a tab cannot indent; write spaces"
    if error.problem == "mapping values are not allowed here":
        return 'there is a ": " too many here; put the value into quotes if it has one in it, or check the indentation'
    return said


def _is_empty(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == _IMPLICIT and resolved(node.value) is None


class _Reading:
    """Turns the nodes of one document into values."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._size = 0
        self._open: list[yaml.Node] = []
        self.lines: dict[Location, int] = {}
        self.plain: dict[Location, str] = {}

    def value(self, node: yaml.Node, location: Location, key: yaml.Node | None = None) -> object:
        """The value of a node, aliases written out."""
        self._account(node)
        self.lines[location] = (key or node).start_mark.line + 1
        self.plain.pop(location, None)
        if isinstance(node, yaml.ScalarNode):
            scalar = self._scalar(node)
            if not isinstance(scalar, str) and node.tag == _IMPLICIT:
                self.plain[location] = node.value
            return scalar
        if node.tag not in _COLLECTION_TAGS:
            raise self._bad(node, f"the tag {_short(node.tag)} has no meaning here; remove it")
        with self._opened(node):
            if isinstance(node, yaml.SequenceNode):
                return [self.value(item, (*location, index)) for index, item in enumerate(node.value)]
            mapping: dict[str, Any] = {}
            self._fill(mapping, node, location, set())
            return mapping

    def _fill(self, mapping: dict[str, Any], node: yaml.Node, location: Location, own: set[str]) -> None:
        """Put the fields of a mapping node into the mapping.

        Args:
            mapping: where to.
            node: the mapping's node, or one that is merged into it.
            location: of the mapping.
            own: the keys that this node has had already.
        """
        for key_node, value_node in node.value:
            if _is_merge_key(key_node):
                for base in self._merged(value_node):
                    with self._opened(base):
                        self._account(base)
                        self._fill(mapping, base, location, set())
                continue
            self._account(key_node)
            key = self._key(key_node)
            if key in own:
                first = self.lines[(*location, key)]
                raise self._bad(
                    key_node, f"{key} stands here for the second time (before: line {first}); remove one of the two"
                )
            own.add(key)
            mapping[key] = self.value(value_node, (*location, key), key_node)

    def _merged(self, node: yaml.Node) -> list[yaml.Node]:
        """The mappings that a merge key names, the one that wins last."""
        bases = node.value[::-1] if isinstance(node, yaml.SequenceNode) else [node]
        for base in bases:
            if not isinstance(base, yaml.MappingNode):
                raise self._bad(base, "<< takes a mapping, or a list of mappings; give it an alias of one")
        return bases

    def _key(self, node: yaml.Node) -> str:
        """A mapping's key; as in JSON, it is a text."""
        key = self._scalar(node) if isinstance(node, yaml.ScalarNode) else None
        match key:
            case None | float():
                raise self._bad(node, "this cannot be the name of a field; put it into quotes if it is to be a text")
            case bool():
                return "true" if key else "false"
            case _:
                return str(key)

    def _scalar(self, node: yaml.ScalarNode) -> Scalar:
        """A text, a number, a truth value or None."""
        text = self._text(node)
        if node.tag in (_IMPLICIT, f"{_STANDARD}str", f"{_STANDARD}timestamp"):
            value = resolved(text) if node.tag == _IMPLICIT else text
            if isinstance(value, float) and not math.isfinite(value):
                raise self._bad(node, f"{text} is no number that JSON knows; write another, or put it into quotes")
            return value
        value = resolved(text)
        kinds = {"int": int, "float": int | float, "bool": bool, "null": type(None)}
        kind = kinds.get(node.tag.removeprefix(_STANDARD))
        if kind is None:
            raise self._bad(node, f"the tag {_short(node.tag)} has no meaning here; remove it")
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self._bad(node, f"{text} is not what the tag {_short(node.tag)} before it says; remove the tag")
        return value

    def _text(self, node: yaml.ScalarNode) -> str:
        """The text of a scalar; escapes for the two halves of a character, as JSON has them, are one character."""
        text: str = node.value
        if text.isascii():
            return text
        try:
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            raise self._bad(
                node, "this text has half a character in it (a lone surrogate); write the other half"
            ) from None

    @contextlib.contextmanager
    def _opened(self, node: yaml.Node) -> Iterator[None]:
        """While what is inside a node is read: not forever, where it holds itself, and not too deep."""
        if any(node is one for one in self._open):
            raise self._bad(node, "this holds itself, through an alias; write it out")
        if len(self._open) >= _MAX_DEPTH:
            raise self._bad(node, f"this is nested too deeply; at most {_MAX_DEPTH} levels are possible")
        self._open.append(node)
        yield
        self._open.pop()

    def _account(self, node: yaml.Node) -> None:
        self._size += 1 + (len(node.value) if isinstance(node, yaml.ScalarNode) else 0)
        if self._size > MAX_BYTES:
            raise self._bad(
                node, "with its aliases written out, this is larger than any manifest may be; use fewer of them"
            )

    def _bad(self, node: yaml.Node, message: str) -> BadInput:
        return BadInput(f"{self._name}:{node.start_mark.line + 1}: {message}")


def _is_merge_key(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.value == "<<" and node.tag in (_IMPLICIT, f"{_STANDARD}merge")


def _short(tag: str) -> str:
    return f"!!{tag.removeprefix(_STANDARD)}" if tag.startswith(_STANDARD) else tag
