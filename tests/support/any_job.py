"""Strategies for manifests of ElasticJobs: valid ones, ones at the bounds, and invalid ones.

:func:`edges` has each field of the schema at each of its bounds, one at a time; :func:`jobs` any mixture.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from elastic_operator.api.spec import GROUP, KIND, VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator

# Numbers are as kubectl and elasticjob send them: 3.0 in YAML is 3.

Manifest = dict[str, Any]
Values = st.SearchStrategy[Any]
Place = tuple[str | int, ...]


def of(*values: Any) -> Values:
    """One of these; the first is the simplest."""
    return st.sampled_from(values)


def mostly(usual: Values, edge: Values) -> Values:
    """A valid value in five of six cases, otherwise one near the bounds."""
    return st.integers(0, 5).flatmap(lambda number: edge if number == 5 else usual)


def nearly(usual: Values, edge: Values) -> Values:
    """Like :func:`mostly`, for fields that occur often."""
    return st.integers(0, 29).flatmap(lambda number: edge if number == 29 else usual)


def fields(**optional: Values) -> Values:
    """A mapping that may have each of these fields."""
    return st.fixed_dictionaries({}, optional=optional)


WEIRD = (
    of(None, True, False, 0, 1, -1, 3, 10_000, 10_001, 2**31, 2**63, 2**70, 1.5, 1e30)
    | of("", "1", "auto", "x", "é" * 5, "a\n", "\x00")
    | of([], {}, [None], ["a"], [[]], [{}], {"a": 1}, {"a": None}, {"name": "a"})
)
NUMBERS = st.integers(1, 6)
EXTREMES = of(1, 0, -1, 10_000, 10_001)
TEXTS = mostly(of("a", "b c", "1", "é"), of("", "a\n", "x" * 1024, "x" * 1025, "😀" * 1024))
ODD_QUANTITIES = (
    *(0, -1, "1e3", "+1", ".5", "1.", "1E", "1Ei", "0", "-1", "x", "", "Ki", "1Gi\n", "1 Gi", "٣", "1e-3", "1K", "1m"),
    *(None, 0.5, "1" * 64, "1" * 65, 2**31, 2**63, 2**63 - 1),
)
QUANTITIES = mostly(of("1", 1, "0.5", "500m", "256Mi"), of(*ODD_QUANTITIES))
ODD_VARIABLES = ("1A", "", "é", "A\n", "A=B", "A" * 256, "A" * 257, "-", ".", "..", "a b")
VARIABLES = st.fixed_dictionaries(
    {"name": mostly(of("A", "B", "_x", "a.b"), of(*ODD_VARIABLES))},
    optional={
        "value": mostly(of("x", "", "$(A)"), of(None, 1)),
        "valueFrom": mostly(of(None, {"fieldRef": {"fieldPath": "x"}}), of({}, {"a": 1, "b": 2}, {"a": None})),
    },
)
ODD_ENDPOINTS = (
    *("[fe80::1%eth0]", "h/", "a b", "", "a,", "h:1\n", "h:12345", "h:123456", "ftp://h", "::1", "h:", "http://", "é"),
    *("a" * 2048, "a" * 2049, ",a", "a,,b", "http://a,b:1/", "h//", "HTTP://h", "h:0", "[]", "[x]", "٣:1"),
)
ENDPOINTS = mostly(of("etcd:2379", "h", "http://h:1", "https://a:1,b", "[::1]:2379", "a,b,c", None), of(*ODD_ENDPOINTS))
RESOURCES = fields(
    limits=st.dictionaries(of("cpu", "memory", "x/y"), QUANTITIES, max_size=2),
    requests=st.dictionaries(of("cpu", "memory"), QUANTITIES, max_size=2),
)
MANAGED_ETCD = fields(
    image=mostly(of("i", None), of("")),
    resources=RESOURCES,
    storage=mostly(of({"resources": {}}, None), of({}, {"a": None})),
)
ETCD = fields(endpoint=ENDPOINTS) | MANAGED_ETCD | mostly(of({}), st.tuples(MANAGED_ETCD, ENDPOINTS).map(
    lambda both: {**both[0], "endpoint": both[1]}
))  # fmt: skip
VOLUMES = mostly(
    of({"emptyDir": {}}, {"hostPath": {"a": 2**70}}),
    of({}, {"a": 1, "b": 2}, {"emptyDir": None}, {"a": 1, "b": None}, None),
)
TEMPLATES = mostly(
    of(
        {"spec": {"containers": [{"name": "worker", "image": "i"}]}},
        {},
        {"metadata": {"labels": {"a": "b"}}},
        {"spec": {"containers": [{"x": None}], "any": 1.5}},
    ),
    of({"specs": {}}, {"spec": None}, {"metadata": {}, "spec": {}}, None),
)
ODD_MANAGERS = ("kueue", "a/", "/a", "A.b/c", "a/b/c", "a/" + "b" * 61, "a/" + "b" * 62, "a/b\n", "-a/b", "a/-b", "")
CODES = st.lists(nearly(st.integers(1, 6), of(0, 255, 256, -1, "1", None)), min_size=1, max_size=3)
REASONS = st.lists(nearly(of("OOMKilled", "Evicted", "Error"), of("", "x" * 128, "x" * 129, 1)), min_size=1, max_size=3)
POD_CONDITIONS = st.lists(
    st.fixed_dictionaries(
        {"type": nearly(of("DisruptionTarget", "Ready"), of("", "x" * 316, "x" * 317))},
        optional={"status": nearly(of("True", "False", "Unknown"), of("true", "", None, True))},
    ),
    max_size=2,
)
FAILURE_RULES = st.lists(
    st.fixed_dictionaries({"action": nearly(of("FailJob", "Ignore", "Count"), of("Retry", "", None))}).flatmap(
        lambda action: st.one_of(
            st.fixed_dictionaries(
                {"onExitCodes": st.fixed_dictionaries({"operator": of("In", "NotIn"), "values": CODES})},
                optional={"onPodReasons": REASONS} if action["action"] == "Retry" else {},
            ),
            st.fixed_dictionaries({"onPodReasons": REASONS}, optional={"excludeNode": of(True, False, None)}),
            st.fixed_dictionaries({"onPodConditions": POD_CONDITIONS}, optional={"excludeNode": of(True, False)}),
            fields(excludeNode=of(True, False), onExitCodes=of({"operator": "In", "values": [1]})),
        ).map(lambda rest: {**action, **rest})
    ),
    max_size=3,
)
SCHEDULING = fields(
    gang=nearly(of("Volcano"), of("SchedulerPlugins", "Kueue", None)),
    schedulerName=nearly(of("mine"), of("", "x" * 253, "x" * 254)),
    priorityClassName=nearly(of("high"), of("")),
    minAvailable=nearly(of(0, 1), of(-1)),
) | fields(gang=of("Volcano", "SchedulerPlugins", None), queue=of("q", "", None))
RENDEZVOUS = fields(
    joiningWindowSeconds=nearly(of(0, 30), of(-1, 86400, 86401)),
    joinTimeoutSeconds=nearly(of(1, 600), of(0, 10**9, 10**9 + 1)),
    leaseSeconds=nearly(of(1, 5), of(0, 3600, 3601)),
    ports=nearly(
        of({"first": 2000, "last": 2015}, {"first": 1024, "last": 65535}),
        of({"first": 2000, "last": 2014}, {"first": 2000}, {"first": 1023, "last": 2000}, {"first": 3, "last": 65536}),
    ),
)
LIFE = {
    "suspend": nearly(of(True, False), of(None, 1, "true")),
    "managedBy": nearly(of("elastic.pytorch.org/elastic-operator", "a.b/c"), of(*ODD_MANAGERS)),
    "backoffLimit": nearly(of(0, 3), of(-1, 1_000_000, 1_000_001, None)),
    "activeDeadlineSeconds": nearly(of(1, 60), of(0, 10**9, 10**9 + 1, None)),
    "ttlSecondsAfterFinished": nearly(of(0, 60), of(-1, 10**9, 10**9 + 1, None)),
    "cleanPodPolicy": nearly(of("All", "Running", "None"), of("none", "", None)),
    "failurePolicy": nearly(fields(rules=FAILURE_RULES), of({}, None, [], {"rules": None})),
    "schedulingPolicy": SCHEDULING,
    "rendezvous": RENDEZVOUS,
    "gracePeriodSeconds": nearly(of(0, 5), of(-1, 604_800, 604_801, None)),
    "nodeLossSeconds": nearly(of(0, 15), of(-1, 86_400, 86_401, None)),
    "disruptionBudget": nearly(of(True, False), of(None, "yes")),
    "metricsPort": nearly(of(0, 9100), of(-1, 65_535, 65_536, None)),
}
"""Fields of a job's life cycle."""

FORMER_WORKER = st.fixed_dictionaries(
    {
        "template": nearly(
            of({"apiVersion": "v1", "kind": "Pod", "spec": {"containers": [{"name": "x"}]}}), of({}, None)
        )
    },
    optional={
        "replicas": mostly(st.integers(1, 3), EXTREMES),
        "restartPolicy": nearly(of("Always", "OnFailure", "Never", "ExitCode"), of("Sometimes", None)),
    },
)
FORMER = st.fixed_dictionaries(
    {"replicaSpecs": st.fixed_dictionaries({"Worker": FORMER_WORKER})},
    optional={
        "maxReplicas": nearly(st.integers(3, 6), EXTREMES),
        "minReplicas": nearly(st.integers(1, 2), EXTREMES),
        "replicas": nearly(st.integers(2, 3), EXTREMES),
        "rdzvEndpoint": ENDPOINTS,
        "RunPolicy": fields(cleanPodPolicy=of("None", "All"), backoffLimit=of(0, 1, -1), schedulingPolicy=of({}, None)),
        "suspend": of(True, False),
        **{
            name: nearly(of(None), value) for name, value in (("image", of("a")), ("etcd", of({})), ("args", of(["a"])))
        },
    },
)
"""Specs of the first controller, and some that fit no controller."""

ODD_NPROC = (4097, 0, -1, "1", "x", "auto\n", "Auto", "a" * 16, "a" * 17, 1.5, None, 2**63, -(2**63) - 1)
SPECS = st.fixed_dictionaries(
    {},
    optional={
        "minReplicas": mostly(st.integers(1, 3), EXTREMES),
        "replicas": mostly(NUMBERS, EXTREMES | st.none()),
        "image": TEXTS,
        "args": mostly(of(["a"]), st.lists(TEXTS, max_size=2)),
        "command": mostly(of(["a"]), st.lists(TEXTS, max_size=2)),
        "env": st.lists(VARIABLES, max_size=3),
        "nprocPerNode": mostly(of(1, 2, "auto", "gpu", "cpu", 4096), of(*ODD_NPROC)),
        "maxRestarts": mostly(NUMBERS, of(0, -1, 1_000_000, 1_000_001, None)),
        "etcd": ETCD,
        "checkpoint": fields(volume=VOLUMES),
        "template": TEMPLATES,
        **LIFE,
    },
)
"""The fields of a spec beside maxReplicas."""

NAMES = ("digits", "a", "a-1", "a" * 45)
ODD_NAMES = ("a" * 46, "a" * 253, "a" * 254, "Digits", "1a", "a.b", "a-", "-a", "", "a\n", "a_b", "a b", "é", None, 1)
LABELS: tuple[Any, ...] = ({"a": "b"}, {"a/b": "c"}, {"A_": "x"}, {"a": ""}, {}, None, {"kubernetes.io/x": "y"})
ODD_LABELS: tuple[Any, ...] = (
    *(
        {"A.b/c": "x"},
        {"a": "x y"},
        {"a/b/c": "d"},
        {"a": None},
        {"a": 1},
        {"": "a"},
        {"/a": "b"},
        {"a/": "b"},
        [],
        "x",
    ),
    *({"x" * 63: "a"}, {"x" * 64: "a"}, {"a": "x" * 63}, {"a": "x" * 64}, {"a": "-"}, {"a\n": "b"}, {"a": "b\n"}),
    *({"a" * 253 + "/b": "c"}, {"a" * 254 + "/b": "c"}, {"a..b/c": "d"}, {"-a": "b"}, {"a": ".b"}, {"é": "b"}),
)
ANNOTATIONS: tuple[Any, ...] = ({"a": "b c"}, {"A/b": "c"}, {"X.Y/z": ""}, {}, None)
ODD_ANNOTATIONS: tuple[Any, ...] = (
    *({"a": None}, {"a/b/c": "d"}, {"a": 1}, {"-": "1"}, {"": "x"}, {"a": "é\n"}, [], "x"),
    *({"x": "y" * 262_143}, {"x": "y" * 262_144}, {"x": "é" * 131_072}),
)
METADATA = st.fixed_dictionaries(
    {"name": mostly(of(*NAMES), of(*ODD_NAMES))},
    optional={
        "labels": mostly(of(*LABELS), of(*ODD_LABELS)),
        "annotations": mostly(of(*ANNOTATIONS), of(*ODD_ANNOTATIONS)),
    },
)
STATUSES = mostly(
    of({}, {"state": "Running"}, {"state": "x"}),
    of({"foo": 1}, {"replicas": "x"}, {"conditions": [{"type": "x", "foo": 1}]}, None, "x", []),
)


FULL: Manifest = {
    "minReplicas": 2,
    "maxReplicas": 3,
    "replicas": 2,
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
"""A spec of the first controller with every field."""

FORMER_FIXED: Manifest = {
    "minReplicas": 1,
    "replicas": 2,
    "replicaSpecs": {"Worker": {"replicas": 3, "template": {"spec": {"containers": [{"name": "x"}]}}}},
}
"""A spec whose initial number of pods is also the upper bound."""

BARE: Manifest = {"minReplicas": 1, "maxReplicas": 10_000, "image": "a", "args": ["a"]}
"""A minimal spec with the widest bounds."""

ODD_AT: dict[Place, tuple[Any, ...]] = {
    ("env", 0, "name"): ODD_VARIABLES,
    ("nprocPerNode",): ODD_NPROC,
    ("managedBy",): ODD_MANAGERS,
    ("etcd", "tlsSecret"): ("s",),
    ("etcd",): tuple({"endpoint": odd} for odd in ODD_ENDPOINTS),
    ("etcd", "endpoint"): ("a",),
    ("etcd", "resources", "limits", "cpu"): ODD_QUANTITIES,
    ("etcd", "resources", "requests", "cpu"): ODD_QUANTITIES,
}
"""Values at the bounds of a rule or a pattern."""

_ABSENT = object()


def edges(schema: Manifest) -> Iterator[Manifest]:
    """Specs that are valid except for one field, which is at a bound of its schema, beyond it, unusual, or absent.

    Args:
        schema: of the spec.
    """
    for right in (FULL, BARE, FORMER_FULL, FORMER_FIXED):
        yield right
        for place in _places(right):
            for value in (*_bounds(_schema_at(schema, place)), *ODD_AT.get(place, ()), *_OF_ANY_TYPE, _ABSENT):
                yield _with(right, place, value)
            if isinstance(_at(right, place), dict):
                yield _with(right, (*place, "unknown"), 1)
    for place in ODD_AT.keys() - {*_places(FULL)}:
        for value in ODD_AT[place]:
            yield _with(FULL, place, value)


def odd_metadata() -> Iterator[Manifest]:
    """Metadata with one value at a bound or beyond it."""
    yield from ({"name": name} for name in (*NAMES, *ODD_NAMES))
    yield from ({"name": "a", "labels": labels} for labels in (*LABELS, *ODD_LABELS))
    yield from ({"name": "a", "annotations": annotations} for annotations in (*ANNOTATIONS, *ODD_ANNOTATIONS))
    yield from ({}, {"name": "a", "lables": {}}, {"name": "a", "finalizers": "x"}, {"name": "a", "uid": None})


_OF_ANY_TYPE: tuple[Any, ...] = (None, True, 0, 1, 1.5, "", "x", "1", [], [None], {}, {"a": None})


def _bounds(schema: Manifest) -> Iterator[Any]:
    """The values on both sides of the schema's bounds."""
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


def _schema_at(schema: Manifest, place: Place) -> Manifest:
    """The schema at a path; empty inside opaque values."""
    for step in place:
        below = schema.get("items") if isinstance(step, int) else schema.get("properties", {}).get(step)
        schema = below or schema.get("additionalProperties") or {}
    return schema


def _at(value: Any, place: Place) -> Any:
    for step in place:
        value = value[step]
    return value


def _with(value: Manifest, place: Place, new: object) -> Manifest:
    """A copy with another value at this path, or without the path."""
    made = copy.deepcopy(value)
    container = _at(made, place[:-1])
    if new is _ABSENT:
        del container[place[-1]]
    else:
        container[place[-1]] = copy.deepcopy(new)
    return made


def jobs(metadata: st.SearchStrategy[Manifest] = METADATA) -> st.SearchStrategy[Manifest]:
    """Manifests, some of them with errors.

    Args:
        metadata: the strategy for their metadata.
    """
    right = {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND}
    today = st.tuples(mostly(st.integers(3, 6), EXTREMES), SPECS).map(
        lambda both: {"maxReplicas": both[0], "image": "a", "args": ["a"], **both[1]}
    )
    spec = st.integers(0, 4).flatmap(lambda number: FORMER if number == 4 else today)
    plain = st.fixed_dictionaries(
        {**{key: st.just(value) for key, value in right.items()}, "metadata": metadata, "spec": spec},
        optional={"status": STATUSES},
    )
    return plain | spoilt(plain)


@st.composite
def spoilt(draw: st.DrawFn, manifests: st.SearchStrategy[Manifest]) -> Manifest:
    """A manifest with one or two values removed, replaced or added."""
    manifest = copy.deepcopy(draw(manifests))
    for _ in range(draw(st.integers(1, 2))):
        places = [place for place in _places(manifest) if place[0] not in {"apiVersion", "kind", "metadata"}]
        if not places:
            return manifest
        *above, last = draw(st.sampled_from(places))
        container: Any = manifest
        for step in above:
            container = container[step]
        match draw(of("remove", "replace", "add")):
            case "replace":
                container[last] = copy.deepcopy(draw(WEIRD))
            case "remove":
                del container[last]
            case "add" if isinstance(container[last], dict):
                name = draw(of("foo", "spec", "kind", "name", "replica", "metadata", "apiVersion"))
                container[last][name] = copy.deepcopy(draw(WEIRD))
            case "add" if isinstance(container[last], list):
                container[last].append(copy.deepcopy(draw(WEIRD)))
    return manifest


def _places(value: object, at: Place = ()) -> Iterator[Place]:
    """Every path below a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, below in items:
        yield (*at, step)
        yield from _places(below, (*at, step))
