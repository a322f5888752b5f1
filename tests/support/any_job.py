"""Specs, statuses and metadata of ElasticJobs: valid ones, ones at the bounds, and invalid ones.

:func:`edges` yields specs with one field at a bound of the schema; :func:`specs` draws any mixture.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from elastic_operator.api.constants import ConditionType, Reason
from elastic_operator.api.spec import ElasticJobSpec
from elastic_operator.api.status import Condition, JobState, JobStatus, LastFailure
from elastic_operator.controller.messages import MESSAGE_LIMIT
from torchelastic.protocol.records import DepartureReason, RunState, TimeBreakdown

if TYPE_CHECKING:
    from collections.abc import Iterator

# The numbers are those that kubectl and elasticjob send: both send 3.0 in YAML as 3.

Manifest = dict[str, Any]
FieldPath = tuple[str | int, ...]


ODD_QUANTITIES = (
    *(0, -1, "1e3", "+1", ".5", "1.", "1E", "1Ei", "0", "-1", "x", "", "Ki", "1 Gi", "٣", "1e-3", "1K", "1m"),
    *(None, 0.5, "1" * 64, "1" * 65, 2**31, 2**63, 2**63 - 1),
)
ODD_VARIABLES = ("1A", "", "é", "A\n", "A=B", "A" * 256, "A" * 257, "-", ".", "..", "a b")
ODD_ENDPOINTS = (
    *("[fe80::1%eth0]", "h/", "a b", "", "a,", "h:1\n", "h:12345", "h:123456", "ftp://h", "::1", "h:", "http://", "é"),
    *("a" * 2048, "a" * 2049, ",a", "a,,b", "http://a,b:1/", "h//", "HTTP://h", "h:0", "[]", "[x]", "٣:1"),
    *("etcd:2379", "h", "http://h:1", "https://a:1,b", "[::1]:2379", "a,b,c"),
)
ODD_MANAGERS = ("kueue", "a/", "/a", "A.b/c", "a/b/c", "a/" + "b" * 61, "a/" + "b" * 62, "a/b\n", "-a/b", "a/-b", "")
ODD_NPROC = (4097, 0, -1, "1", "x", "auto\n", "Auto", "a" * 16, "a" * 17, 1.5, None, 2**63, -(2**63) - 1, "auto", "gpu")

NAMES = ("digits", "a", "a-1", "a" * 45)
ODD_NAMES = ("a" * 46, "a" * 253, "a" * 254, "Digits", "1a", "a.b", "a-", "-a", "", "a\n", "a_b", "a b", "é", None, 1)
ODD_STATUSES: tuple[Any, ...] = (
    *({}, {"state": "Running"}, {"state": "x"}, {"foo": 1}, {"replicas": "x"}, None, "x", []),
    {"conditions": [{"type": "x", "foo": 1}]},
)

FULL: Manifest = {
    "minReplicas": 2,
    "maxReplicas": 3,
    "replicas": 2,
    "spares": 1,
    "image": "a",
    "command": ["a"],
    "args": ["a"],
    "env": [{"name": "A", "value": "x"}, {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}],
    "nprocPerNode": 2,
    "maxRestarts": 3,
    "etcd": {
        "image": "a",
        "resources": {"limits": {"cpu": "1"}, "requests": {"cpu": 1}},
        "storage": {"resources": {}},
    },
    "checkpoint": {"volume": {"emptyDir": {}}},
    "template": {"metadata": {"labels": {}}, "spec": {"containers": []}},
    "suspend": False,
    "managedBy": "elastic.pytorch.org/elastic-operator",
    "backoffLimit": 3,
    "activeDeadlineSeconds": 60,
    "ttlSecondsAfterFinished": 60,
    "cleanPodPolicy": "All",
    "failurePolicy": {
        "rules": [
            {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [3]}, "excludeNode": False},
            {"action": "Ignore", "onPodReasons": ["Evicted"], "excludeNode": True},
            {"action": "Count", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        ]
    },
    "schedulingPolicy": {
        "gang": "Volcano",
        "schedulerName": "mine",
        "queue": "q",
        "priorityClassName": "high",
        "minAvailable": 1,
    },
    "rendezvous": {
        "joiningWindowSeconds": 30,
        "joinTimeoutSeconds": 60,
        "leaseSeconds": 5,
        "ports": {"first": 2000, "last": 2100},
    },
    "gracePeriodSeconds": 5,
    "nodeLossSeconds": 15,
    "disruptionBudget": True,
    "metricsPort": 9100,
}
"""A spec with all current fields that do not exclude each other."""

FORMER_FULL: Manifest = {
    "minReplicas": 1,
    "maxReplicas": 4,
    "rdzvEndpoint": "etcd-service:2379",
    "RunPolicy": {
        "cleanPodPolicy": "None",
        "ttlSecondsAfterFinished": 60,
        "activeDeadlineSeconds": 60,
        "backoffLimit": 3,
        "schedulingPolicy": {"minAvailable": 1},
    },
    "replicaSpecs": {
        "Worker": {
            "replicas": 2,
            "restartPolicy": "ExitCode",
            "template": {"apiVersion": "v1", "kind": "Pod", "metadata": {}, "spec": {"containers": [{"name": "x"}]}},
        }
    },
}
"""A spec with every field of the first controller."""

FORMER_FIXED: Manifest = {
    "minReplicas": 1,
    "replicas": 2,
    "replicaSpecs": {"Worker": {"replicas": 3, "template": {"spec": {"containers": [{"name": "x"}]}}}},
}
"""A spec whose initial number of pods is also the upper bound."""

BARE: Manifest = {"minReplicas": 1, "maxReplicas": 10_000, "image": "a", "args": ["a"]}
"""A minimal spec with the widest bounds."""

_ABSENT: Any = object()
_EXIT_CODES = ("failurePolicy", "rules", 0, "onExitCodes")
ODD_AT: dict[FieldPath, tuple[Any, ...]] = {
    ("minReplicas",): (1, 3, 4),
    ("replicas",): (1, 3, 4),
    ("maxReplicas",): (1, 2, 10_000),
    ("env", 0, "name"): ODD_VARIABLES,
    ("env", 1, "valueFrom"): ({"a": 1, "b": 2}, {"a": None}),
    ("nprocPerNode",): ODD_NPROC,
    ("managedBy",): ODD_MANAGERS,
    ("etcd",): tuple({"endpoint": odd} for odd in ODD_ENDPOINTS),
    ("etcd", "tlsSecret"): ("s",),
    ("etcd", "endpoint"): ("a",),
    ("etcd", "storage"): ({"resources": {}}, {"a": None}),
    ("etcd", "resources", "limits", "cpu"): ODD_QUANTITIES,
    ("etcd", "resources", "requests", "cpu"): ODD_QUANTITIES,
    ("checkpoint", "volume"): ({"hostPath": {"a": 2**70}}, {"a": 1, "b": 2}, {"emptyDir": None}, {"a": 1, "b": None}),
    ("template",): ({"spec": {"containers": [{"x": None}], "any": 1.5}}, {"specs": {}}, {"spec": None}),
    (*_EXIT_CODES, "operator"): ("NotIn", "Is"),
    (*_EXIT_CODES, "values"): ([0], [255], [256], [-1], ["1"], [None], []),
    ("failurePolicy", "rules", 0, "action"): ("FailJob", "Ignore", "Count", "Retry"),
    ("failurePolicy", "rules", 0, "onPodReasons"): (["OOMKilled"], [""], ["x" * 128], ["x" * 129]),
    ("failurePolicy", "rules", 0, "onExitCodes"): (_ABSENT,),
    ("failurePolicy", "rules", 0, "excludeNode"): (True, None),
    ("failurePolicy", "rules", 2, "onPodConditions", 0, "status"): ("False", "Unknown", "true", True),
    ("schedulingPolicy", "gang"): ("SchedulerPlugins", "Kueue"),
    ("rendezvous", "ports"): ({"first": 2000, "last": 2015}, {"first": 2000, "last": 2014}, {"first": 2000}),
    ("cleanPodPolicy",): ("Running", "None", "none"),
    ("rdzvEndpoint",): ODD_ENDPOINTS,
    ("replicaSpecs", "Worker", "restartPolicy"): ("Always", "OnFailure", "Never", "Sometimes"),
}
"""Values at the bounds of a rule or a pattern, by the path of their field."""


def _thousandth(number: int) -> float:
    return number / 1000


_TIMES = st.none() | st.integers(0, 4_000_000_000).map(float)
_COUNTS = st.integers(0, 1_000_000)
_WORDS = st.text(max_size=40) | st.sampled_from([character * MESSAGE_LIMIT for character in "x😀"])
STATUSES = st.builds(
    JobStatus,
    state=st.sampled_from(JobState),
    observed_generation=_COUNTS,
    replicas=_COUNTS,
    ready_replicas=_COUNTS,
    desired=_COUNTS,
    round=st.integers(0, 2**53),
    world_size=_COUNTS,
    restarts=_COUNTS,
    uncharged_restarts=_COUNTS,
    pod_failures=_COUNTS,
    counted_pod_uids=st.frozensets(st.sampled_from("abcd") | st.uuids().map(str), max_size=4),
    size_generation=st.integers(0, 2**53),
    started=_TIMES,
    active=_TIMES,
    completed=_TIMES,
    last_failure=st.none()
    | st.builds(
        LastFailure,
        message=_WORDS,
        pod=st.sampled_from(["", "digits-0-abcde", "x" * 253]),
        rank=st.none() | _COUNTS,
        exit_code=st.none() | st.sampled_from([-(2**31), -1, 0, 255, 2**31 - 1]),
        signal=st.sampled_from(["", "SIGKILL", "SIGRTMIN+15"]),
        time=st.integers(0, 4_000_000_000).map(float),
    ),
    excluded_nodes=st.lists(st.sampled_from(["node-1", "n" * 253]), max_size=100).map(tuple),
    time_breakdown=st.none()
    | st.builds(
        TimeBreakdown,
        until=st.integers(0, 4 * 10**12).map(_thousandth),
        seconds=st.dictionaries(st.sampled_from(RunState), st.integers(0, 10**9).map(_thousandth)),
        lost=st.none() | st.integers(0, 10**9).map(_thousandth),
        nodes_joined=_COUNTS,
        departures=st.dictionaries(st.sampled_from(DepartureReason), _COUNTS),
    ),
    applied_spec=st.none() | st.just(ElasticJobSpec.of({"minReplicas": 1, **FULL}).applied),
    conditions=st.lists(
        st.builds(
            Condition,
            type=st.sampled_from(ConditionType),
            status=st.booleans(),
            reason=st.sampled_from(Reason),
            message=_WORDS,
            since=st.integers(0, 4_000_000_000).map(float),
        ),
        max_size=3,
        unique_by=lambda condition: condition.type,
    ).map(tuple),
)
"""Any status that the operator may write."""


def edges(schema: Manifest) -> Iterator[Manifest]:
    """Yield valid specs, and copies with one field that is at or beyond a bound of its schema, unusual, or absent.

    Args:
        schema: the schema of the spec.
    """
    for right in (FULL, BARE, FORMER_FULL, FORMER_FIXED):
        yield right
        for path in _places(right):
            for value in (*_bounds(_schema_at(schema, path)), *ODD_AT.get(path, ()), *_OF_ANY_TYPE, _ABSENT):
                yield _with(right, path, value)
            if isinstance(_at(right, path), dict):
                yield _with(right, (*path, "unknown"), 1)
    for path in [path for path in ODD_AT if path[:-1] in {(), *_places(FULL)} and path not in {*_places(FULL)}]:
        for value in ODD_AT[path]:
            if value is not _ABSENT:
                yield _with(FULL, path, value)


def odd_metadata() -> Iterator[Manifest]:
    """Yield metadata with one value at a bound or beyond it."""
    yield from ({"name": name} for name in (*NAMES, *ODD_NAMES))
    labels = ({"a": "b"}, {}, None, {"a": 1}, [], "x")
    yield from ({"name": "a", kind: value} for kind in ("labels", "annotations") for value in labels)
    yield from ({}, {"name": "a", "lables": {}}, {"name": "a", "uid": None})


_DRAWN = 5_000
"""Maximum length of a drawn value, because Hypothesis warns of long examples; :func:`edges` has no maximum."""

_OF_ANY_TYPE: tuple[Any, ...] = (None, True, 0, 1, 1.5, "", "x", "1", [], [None], {}, {"a": None})


def _bounds(schema: Manifest) -> Iterator[Any]:
    """Yield the values on both sides of the schema's bounds."""
    for bound in ("minimum", "maximum"):
        if bound in schema:
            yield from (schema[bound] - 1, schema[bound], schema[bound] + 1)
    if "maxLength" in schema:
        for character in "1é😀":
            yield from (character * (schema["maxLength"] + more) for more in (0, 1))
    if "maxItems" in schema:
        items = [{"name": f"V{number}"} if "x-kubernetes-list-map-keys" in schema else "x" for number in range(1026)]
        yield from (items[: schema["maxItems"] + more] for more in (0, 1))
        yield items[:1] * 2
    if "maxProperties" in schema:
        yield from ({f"k{number}": "1" for number in range(schema["maxProperties"] + more)} for more in (0, 1))


def _schema_at(schema: Manifest, path: FieldPath) -> Manifest:
    """Return the schema at a path, or an empty schema inside opaque values."""
    for step in path:
        below = schema.get("items") if isinstance(step, int) else schema.get("properties", {}).get(step)
        schema = below or schema.get("additionalProperties") or {}
    return schema


def _at(value: Any, path: FieldPath) -> Any:
    for step in path:
        value = value[step]
    return value


def _with(value: Manifest, path: FieldPath, new: object) -> Manifest:
    """Return a copy of a value with another value at this path, or without the path."""
    made = copy.deepcopy(value)
    container = _at(made, path[:-1])
    if new is not _ABSENT:
        container[path[-1]] = copy.deepcopy(new)
    elif isinstance(container, list):
        del container[path[-1]]
    else:
        container.pop(path[-1], None)
    return made


@st.composite
def specs(draw: st.DrawFn, schema: Manifest) -> Manifest:
    """Draw one of the specs above with up to six changed values: most are valid, and some are at or beyond a bound.

    Args:
        schema: the schema of the spec.
    """
    spec = draw(st.sampled_from((FULL, BARE, FORMER_FULL, FORMER_FIXED)))
    for _ in range(draw(st.integers(0, 6))):
        places = [*_places(spec), *(path for path in ODD_AT if len(path) == 1)]
        path = draw(st.sampled_from(places))
        bounds = [value for value in _bounds(_schema_at(schema, path)) if len(repr(value)) < _DRAWN]
        values = (_ABSENT, *ODD_AT.get(path, ()), *bounds)
        if draw(st.integers(0, 4)) == 0:
            values = (*values, *_OF_ANY_TYPE, {"foo": 1})
        spec = _with(spec, path, draw(st.sampled_from(values)))
    return spec


def _places(value: object, at: FieldPath = ()) -> Iterator[FieldPath]:
    """Yield every path below a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, below in items:
        yield (*at, step)
        yield from _places(below, (*at, step))
