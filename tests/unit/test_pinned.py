"""What pods are made from is kept as it was, in the words of the spec."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_operator.errors import BadInput
from elastic_operator.model import JobStatus, Plan
from elastic_operator.pinned import as_pinned, changed, checked, effective, pin
from elastic_operator.spec import ElasticJobSpec
from tests.support.builders import a_job, with_status

TEXTS = st.text(max_size=8)
SECONDS = st.integers(0, 3600)


def fields(**optional: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries({}, optional=optional)


RULES = st.sampled_from(
    [
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [3, 4]}},
        {"action": "Ignore", "onExitCodes": {"operator": "NotIn", "values": [137]}},
        {"action": "Count", "onPodReasons": ["Evicted", "OOMKilled"], "excludeNode": True},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}, {"type": "Odd", "status": "Unknown"}]},
    ]
)
PINNED = {
    "image": TEXTS,
    "command": st.lists(TEXTS, max_size=2),
    "args": st.lists(TEXTS, max_size=2),
    "env": st.lists(st.fixed_dictionaries({"name": TEXTS, "value": TEXTS}), max_size=2),
    "nprocPerNode": st.integers(1, 8) | st.sampled_from(["auto", "cpu", "gpu"]),
    "failurePolicy": st.fixed_dictionaries({"rules": st.lists(RULES, max_size=3)}),
    "schedulingPolicy": fields(
        gang=st.sampled_from(["SchedulerPlugins", "Volcano"]), schedulerName=TEXTS, queue=TEXTS, priorityClassName=TEXTS
    ),
    "rendezvous": fields(
        joiningWindowSeconds=SECONDS,
        joinTimeoutSeconds=SECONDS,
        leaseSeconds=SECONDS,
        ports=st.just({"first": 30000, "last": 30100}),
    ),
    "etcd": fields(
        endpoint=TEXTS,
        tlsSecret=TEXTS,
        image=TEXTS,
        resources=st.just({"limits": {"cpu": "1"}}),
        storage=st.just({"resources": {"requests": {"storage": "1Gi"}}}),
    ),
    "checkpoint": st.just({"volume": {"persistentVolumeClaim": {"claimName": "digits"}}}),
    "gracePeriodSeconds": SECONDS,
    "nodeLossSeconds": SECONDS,
    "metricsPort": SECONDS,
    "template": st.sampled_from([{}, {"spec": {"containers": [{"name": "worker", "image": "i"}]}}]),
}
FREE = {
    "replicas": st.integers(1, 4),
    "maxRestarts": st.integers(0, 9),
    "backoffLimit": st.integers(0, 9),
    "suspend": st.booleans(),
    "activeDeadlineSeconds": SECONDS,
    "ttlSecondsAfterFinished": SECONDS,
    "cleanPodPolicy": st.sampled_from(["All", "Running", "None"]),
    "disruptionBudget": st.booleans(),
    "managedBy": st.just("kueue.x-k8s.io/multikueue"),
}
SPECS = st.fixed_dictionaries(
    {"minReplicas": st.just(1), "maxReplicas": st.integers(1, 9)}, optional={**PINNED, **FREE}
).map(ElasticJobSpec.of)
RUNS = settings(max_examples=200, deadline=None, database=None, derandomize=True)


@RUNS
@given(spec=SPECS)
def test_what_is_pinned_makes_the_same_spec_again_also_after_it_was_stored(spec: ElasticJobSpec) -> None:
    stored = json.loads(json.dumps(pin(spec)))

    assert stored == pin(spec)
    assert effective(spec, checked(stored)) == spec
    assert changed(spec, stored) == ()


@RUNS
@given(before=SPECS, after=SPECS)
def test_what_is_pinned_holds_and_all_else_follows_the_user(before: ElasticJobSpec, after: ElasticJobSpec) -> None:
    held = effective(after, pin(before))

    assert pin(held) == pin(before)
    for name in ("replicas", "max_replicas", "max_restarts", "backoff_limit", "suspend", "clean_pod_policy"):
        assert getattr(held, name) == getattr(after, name)
    differing = changed(after, pin(before))
    if means_the_same(before, after):
        assert differing == ()
    else:
        assert bool(differing) is (pin(before) != pin(after))
    assert {field.removeprefix("spec.") for field in differing} <= PINNED.keys()


def means_the_same(before: ElasticJobSpec, after: ElasticJobSpec) -> bool:
    """Whether all that differs is where the image stands, which is the only thing in the template here."""
    images = [
        replace(spec, image=spec.image or ("i" if spec.template else None), template={}) for spec in (before, after)
    ]
    return pin(images[0]) == pin(images[1])


OWN = {"name": "worker", "image": "i", "args": ["train.py"], "env": [{"name": "A", "value": "1"}]}
IN_TEMPLATE = {"template": {"metadata": {"creationTimestamp": None}, "spec": {"containers": [OWN]}}}
BESIDE = {"image": "i", "args": ["train.py"], "env": [{"name": "A", "value": "1"}]}


@pytest.mark.parametrize(
    ("before", "after", "differing"),
    [
        (IN_TEMPLATE, BESIDE, ()),
        (BESIDE, IN_TEMPLATE, ()),
        (BESIDE, {**BESIDE, "template": {"spec": {"containers": [{"name": "worker"}]}}}, ()),
        (IN_TEMPLATE, {**BESIDE, "args": ["other.py"]}, ("spec.image", "spec.args", "spec.env", "spec.template")),
        (BESIDE, {**BESIDE, "template": {"spec": {"nodeSelector": {"gpu": "a"}}}}, ("spec.template",)),
        (BESIDE, {**BESIDE, "template": {"spec": {"containers": [{"name": "sidecar"}]}}}, ("spec.template",)),
        (IN_TEMPLATE, {**BESIDE, "nprocPerNode": 2}, ("spec.nprocPerNode",)),
    ],
)
def test_what_is_said_in_another_place_is_no_change(
    before: dict[str, Any], after: dict[str, Any], differing: tuple[str, ...]
) -> None:
    sizes = {"minReplicas": 1, "maxReplicas": 2}
    held = pin(ElasticJobSpec.of({**sizes, **before}))
    assert changed(ElasticJobSpec.of({**sizes, **after}), held) == differing


def test_a_spec_that_says_nothing_is_pinned_as_nothing() -> None:
    assert pin(ElasticJobSpec(min_replicas=1, max_replicas=2)) == {}


def test_pods_are_made_from_what_is_pinned_and_from_what_the_plan_pins() -> None:
    job = with_status(a_job(args=("new.py",)), pinned={"args": ["old.py"]})
    pinned_anew = Plan(status=JobStatus(pinned={"args": ["newest.py"]}))

    assert as_pinned(job).spec.args == ("old.py",)
    assert as_pinned(job, Plan()).spec.args == ("old.py",)
    assert as_pinned(job, pinned_anew).spec.args == ("newest.py",)
    assert as_pinned(a_job(args=("new.py",))).spec.args == ("new.py",)


@pytest.mark.parametrize(
    "garbage",
    [
        {"args": 7},
        {"env": [7]},
        {"etcd": 7},
        {"template": []},
        {"failurePolicy": {"rules": [{}]}},
        {"rendezvous": {"ports": {}}},
    ],
)
def test_what_cannot_be_understood_is_refused(garbage: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="what is pinned in the job's status cannot be understood"):
        checked(garbage)
