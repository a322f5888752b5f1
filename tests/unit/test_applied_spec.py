"""The applied spec: what pods are made from is kept until the job is suspended and resumed."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_operator.api.spec import AppliedSpec, ElasticJobSpec, changed_fields
from elastic_operator.api.status import JobStatus, status_from_json, status_to_json
from elastic_operator.controller.model import Plan, with_applied_spec
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
APPLIED = {
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
NOT_APPLIED = {
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
    {"minReplicas": st.just(1), "maxReplicas": st.integers(1, 9)}, optional={**APPLIED, **NOT_APPLIED}
).map(ElasticJobSpec.of)
RUNS = settings(max_examples=200, deadline=None, database=None, derandomize=True)


@RUNS
@given(spec=SPECS)
def test_applied_spec_round_trips(spec: ElasticJobSpec) -> None:
    stored = json.loads(json.dumps(status_to_json(JobStatus(applied_spec=spec.applied))))
    applied = status_from_json(stored).applied_spec

    assert spec.with_applied(applied) == spec
    assert changed_fields(spec, applied) == ()


@RUNS
@given(before=SPECS, after=SPECS)
def test_applied_fields_stay_and_others_change(before: ElasticJobSpec, after: ElasticJobSpec) -> None:
    held = after.with_applied(before.applied)

    assert held.applied == before.applied
    for name in ("replicas", "max_replicas", "max_restarts", "backoff_limit", "suspend", "clean_pod_policy"):
        assert getattr(held, name) == getattr(after, name)
    differing = changed_fields(after, before.applied)
    assert bool(differing) is (before.applied != after.applied)
    assert {field.removeprefix("spec.") for field in differing} <= APPLIED.keys()


def test_with_applied_spec_prefers_the_plan() -> None:
    job = with_status(a_job(args=("new.py",)), applied_spec=AppliedSpec(args=("old.py",)))
    newest = Plan(status=JobStatus(applied_spec=AppliedSpec(args=("newest.py",))))

    assert with_applied_spec(job).spec.args == ("old.py",)
    assert with_applied_spec(job, Plan()).spec.args == ("old.py",)
    assert with_applied_spec(job, newest).spec.args == ("newest.py",)
    assert with_applied_spec(a_job(args=("new.py",))).spec.args == ("new.py",)
