"""Checks the ``metadata`` of a manifest.

It is Kubernetes' own and the same for every kind of object, so no CRD describes it. What is checked is what people
write: the name, the namespace, labels and annotations; of the rest only that it exists and is of the right type.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from elastic_operator.api.validation_error import Problem
from elastic_operator.manifest.structural import Schema, unknown_fields, violations

_TEXT: Final[Schema] = {"type": "string"}
_NUMBER: Final[Schema] = {"type": "integer"}
_TEXTS: Final[Schema] = {"type": "object", "additionalProperties": _TEXT}
_OBJECTS: Final[Schema] = {"type": "array", "items": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}

_SCHEMA: Final[Schema] = {
    "type": "object",
    "properties": {
        "annotations": _TEXTS,
        "creationTimestamp": _TEXT,
        "deletionGracePeriodSeconds": _NUMBER,
        "deletionTimestamp": _TEXT,
        "finalizers": {"type": "array", "items": _TEXT},
        "generateName": _TEXT,
        "generation": _NUMBER,
        "labels": _TEXTS,
        "managedFields": _OBJECTS,
        "name": _TEXT,
        "namespace": _TEXT,
        "ownerReferences": _OBJECTS,
        "resourceVersion": _TEXT,
        "selfLink": _TEXT,
        "uid": _TEXT,
    },
}

_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_DNS_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUALIFIED = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LONGEST_SUBDOMAIN: Final = 253
_MOST_ANNOTATION_BYTES: Final = 256 * 1024


def metadata_problems(metadata: object) -> Iterator[Problem]:
    """What is wrong with the metadata of an object that has to have a name.

    The name's own form is a rule of the CRD.
    """
    at = ("metadata",)
    unknown = [*unknown_fields(metadata, _SCHEMA, at)]
    metadata = _without_nulls(metadata)
    wrong = [*unknown, *violations(metadata, _SCHEMA, at)]
    yield from wrong
    if not isinstance(metadata, Mapping):
        return
    if not metadata.get("name"):
        yield Problem((*at, "name"), "the job needs a name; give it one")
    if wrong:
        return
    namespace = metadata.get("namespace", "")
    if namespace and not _DNS_LABEL.fullmatch(namespace):
        yield Problem(
            (*at, "namespace"),
            "must consist of at most 63 small letters, digits and dashes, and begin and end with a letter or digit",
        )
    for kind in ("labels", "annotations"):
        for key in metadata.get(kind, ()):
            if not _is_qualified_name(key.lower() if kind == "annotations" else key):
                yield Problem(
                    (*at, kind, key),
                    "the key must consist of at most 63 letters, digits and -_. and begin and end with a letter or "
                    "digit; a DNS name and a slash may stand before it",
                )
    for key, value in metadata.get("labels", {}).items():
        if value and not _QUALIFIED.fullmatch(value):
            yield Problem(
                (*at, "labels", key),
                "the value must consist of at most 63 letters, digits and -_. and begin and end with a letter or digit",
            )
    size = sum(len(key.encode()) + len(value.encode()) for key, value in metadata.get("annotations", {}).items())
    if size > _MOST_ANNOTATION_BYTES:
        yield Problem((*at, "annotations"), f"have {size} bytes in all; at most {_MOST_ANNOTATION_BYTES} are possible")


def _without_nulls(metadata: object) -> object:
    """Metadata as it is decoded: what is null is not there."""
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        return metadata
    return {
        key: {name: "" if text is None else text for name, text in value.items()}
        if isinstance(value, Mapping)
        else value
        for key, value in metadata.items()
        if value is not None
    }


def _is_qualified_name(key: str) -> bool:
    """Whether a key of a label or an annotation has the form ``[DNS name/]name``."""
    prefix, slash, name = key.rpartition("/")
    if slash and not (len(prefix) <= _LONGEST_SUBDOMAIN and _DNS_SUBDOMAIN.fullmatch(prefix)):
        return False
    return bool(_QUALIFIED.fullmatch(name))
