"""Manifests of ElasticJobs as people may write them: mostly right, often at the edge of it, sometimes quite wrong."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from elastic_operator.spec import GROUP, KIND, VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator

Manifest = dict[str, Any]
Path = tuple[str | int, ...]

# Of each list the first is right and plain: a counter-example is made as plain as possible.

WEIRD = st.sampled_from(
    [
        None, True, False, 0, 1, -1, 3, 10_000, 10_001, 2**31, 2**63, 2**70, 1.5, 3.0, -0.0, 1e30, "", "1", "auto", "x",
        "é" * 5, "a\n", "\x00", [], {}, [None], ["a"], [[]], [{}], {"a": 1}, {"a": None}, {"name": "a"},
    ]
)  # fmt: skip
TEXTS = st.sampled_from(["a", "b c", "1", "é", "a\n", "", "x" * 1024, "x" * 1025, "😀" * 1024])
QUANTITIES = st.sampled_from(
    [
        "1", 1, 0, -1, "0.5", "500m", "256Mi", "1e3", "+1", ".5", "1.", "1E", "1Ei", "0", "-1", "x", "", "Ki", "1Gi\n",
        "1 Gi", None, 0.5, 1.0, "1" * 64, "1" * 65, 2**31, 2**63, "٣",
    ]
)  # fmt: skip
BOUNDS = st.sampled_from([1, 2, 3, 4, 5, 6, 0, -1, 10_000, 10_001])
FEW = st.integers(1, 6)


def fields(**optional: st.SearchStrategy[Any]) -> st.SearchStrategy[Manifest]:
    """A mapping that may have each of these fields."""
    return st.fixed_dictionaries({}, optional=optional)


VARIABLES = st.fixed_dictionaries(
    {"name": st.sampled_from(["A", "B", "_x", "a.b", "1A", "", "é", "A\n", "A=B", "A" * 256, "A" * 257])},
    optional={
        "value": st.sampled_from(["x", "", "$(A)", None, 1]),
        "valueFrom": st.sampled_from([{"fieldRef": {"fieldPath": "x"}}, {}, {"a": 1, "b": 2}, None]),
    },
)
ENDPOINTS = st.sampled_from(
    [
        "etcd:2379", "h", "http://h:1", "https://a:1,b", "[::1]:2379", "[fe80::1%eth0]", "a,b,c", "h/", "a b", "",
        "a,", "h:1\n",
        "h:123456", "ftp://h", "::1", "h:", "http://", "é", "a" * 2048, "a" * 2049, None,
    ]
)  # fmt: skip
ETCD = fields(
    endpoint=ENDPOINTS,
    image=st.sampled_from(["i", "", None]),
    resources=fields(
        limits=st.dictionaries(st.sampled_from(["cpu", "memory", "x/y"]), QUANTITIES),
        requests=st.dictionaries(st.sampled_from(["cpu", "memory"]), QUANTITIES),
        claims=st.just([]),
    ),
    storage=st.sampled_from([{"resources": {}}, {}, None, {"a": None}]),
)
VOLUMES = st.sampled_from(
    [{"emptyDir": {}}, {}, {"a": 1, "b": 2}, {"emptyDir": None}, {"a": 1, "b": None}, None, {"hostPath": {"a": 2**70}}]
)
TEMPLATES = st.sampled_from(
    [
        {"spec": {"containers": [{"name": "worker", "image": "i"}]}},
        {},
        {"metadata": {"labels": {"a": "b"}}},
        {"spec": {"containers": [{"x": None}], "any": 1.5}},
        {"specs": {}},
        {"spec": None},
        {"metadata": {}, "spec": {}},
        None,
    ]
)
SPECS = st.fixed_dictionaries(
    {"maxReplicas": FEW | BOUNDS},
    optional={
        "image": st.just("a") | TEXTS,
        "args": st.just(["a"]) | st.lists(TEXTS, max_size=2),
        "minReplicas": FEW | BOUNDS,
        "replicas": FEW | BOUNDS | st.none(),
        "command": st.lists(TEXTS, max_size=2),
        "env": st.lists(VARIABLES, max_size=3),
        "nprocPerNode": st.sampled_from(
            [1, 2, "auto", "gpu", "cpu", 4096, 4097, 0, -1, "1", "x", "auto\n", "Auto", "a" * 17, 2.0, 1.5, None]
        ),
        "maxRestarts": BOUNDS | st.sampled_from([0, 1_000_000, 1_000_001, None]),
        "etcd": ETCD,
        "checkpoint": fields(volume=VOLUMES),
        "template": TEMPLATES,
    },
).map(lambda spec: {"image": "a", "args": ["a"], **spec})
"""Specs; a field that must be there is missing by the hand of :func:`spoilt` only."""

NAMES = st.sampled_from(
    ["digits"] * 8
    + ["a", "a" * 45, "a" * 46, "a" * 254, "a-1", "Digits", "1a", "a.b", "a-", "-a", "", "a\n", "é", "a_b", None, 1]
)
LABELS = st.sampled_from(
    [
        {"a": "b"}, {"a/b": "c"}, {"A_": "x"}, {"a": ""}, {"A.b/c": "x"}, {"a": "x y"}, {"a/b/c": "d"}, {"a": None},
        {}, None,
        {"a": 1}, {"x" * 63: "a"}, {"x" * 64: "a"}, {"": "a"}, {"a": "x" * 63}, {"a": "x" * 64}, {"a": "-"},
        {"/a": "b"},
        {"a/": "b"}, {"a\n": "b"}, {"a": "b\n"}, {"a" * 253 + "/b": "c"}, {"a" * 254 + "/b": "c"}, {"a..b/c": "d"},
        {"elastic.pytorch.org/job": "x"}, {"kubernetes.io/x": "y"},
    ]
)  # fmt: skip
ANNOTATIONS = st.sampled_from(
    [
        {"a": "b c"}, {"A/b": "c"}, {"a": None}, {"a/b/c": "d"}, {"a": 1}, {"x": "y" * (262_144 - 1)},
        {"x": "y" * 262_144},
        {"-": "1"}, {"X.Y/z": ""}, {}, None, {"": "x"},
    ]
)  # fmt: skip
METADATA = st.fixed_dictionaries(
    {"name": NAMES},
    optional={
        "labels": LABELS,
        "annotations": ANNOTATIONS,
        "finalizers": st.sampled_from([[], None, ["example.org/x"], ["x"], [1], [""], ["a/b/c"]]),
        "generateName": st.sampled_from(["", "a-"]),
    },
)
STATUSES = st.sampled_from(
    [
        {}, {"state": "Running"}, {"state": "x"}, {"foo": 1}, {"replicas": "x"},
        {"conditions": [{"type": "x", "foo": 1}]}, None,
        "x", [],
    ]
)  # fmt: skip


def named(name: str) -> st.SearchStrategy[Manifest]:
    """Manifests of one name, spoilt at up to two places."""
    return spoilt(_manifests(st.just({"name": name})))


def any_jobs() -> st.SearchStrategy[Manifest]:
    """Manifests of any name, spoilt at up to two places."""
    return spoilt(_manifests(METADATA))


def _manifests(metadata: st.SearchStrategy[Manifest]) -> st.SearchStrategy[Manifest]:
    return st.fixed_dictionaries(
        {"apiVersion": st.just(f"{GROUP}/{VERSION}"), "kind": st.just(KIND), "metadata": metadata, "spec": SPECS},
        optional={"status": STATUSES},
    )


@st.composite
def spoilt(draw: st.DrawFn, manifests: st.SearchStrategy[Manifest]) -> Manifest:
    """A manifest with something at any place taken away, replaced or added."""
    manifest = copy.deepcopy(draw(manifests))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 1, 2]))):
        places = [place for place in _places(manifest) if place[0] not in {"apiVersion", "kind", "metadata"}]
        if not places:
            return manifest
        *above, last = draw(st.sampled_from(places))
        container: Any = manifest
        for step in above:
            container = container[step]
        match draw(st.sampled_from(["replace", "remove", "add"])):
            case "replace":
                container[last] = copy.deepcopy(draw(WEIRD))
            case "remove":
                del container[last]
            case "add" if isinstance(container[last], dict):
                name = draw(st.sampled_from(["foo", "spec", "kind", "name", "replica", "metadata", "apiVersion"]))
                container[last][name] = copy.deepcopy(draw(WEIRD))
            case "add" if isinstance(container[last], list):
                container[last].append(copy.deepcopy(draw(WEIRD)))
    return manifest


def _places(value: object, at: Path = ()) -> Iterator[Path]:
    """Every place below a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, below in items:
        yield (*at, step)
        yield from _places(below, (*at, step))
