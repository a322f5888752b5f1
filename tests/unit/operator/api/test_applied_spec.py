"""The applied spec: a change of a field that pods are created from waits until the job is suspended and resumed."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_operator.api.spec import AppliedSpec, ElasticJobSpec, changed_fields
from elastic_operator.api.status import JobStatus, status_from_json, status_to_json
from elastic_operator.controller.model import Plan, with_applied_spec
from tests.support.any_job import FULL
from tests.support.builders import a_job, with_status

SPECS = st.sets(st.sampled_from(sorted(FULL))).map(
    lambda names: ElasticJobSpec.of({"minReplicas": 1, "maxReplicas": 9, **{name: FULL[name] for name in names}})
)
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
    assert {field.removeprefix("spec.") for field in differing} <= {*AppliedSpec.__struct_encode_fields__}


def test_the_applied_spec_of_a_plan_takes_precedence_over_that_of_the_status() -> None:
    job = with_status(a_job(args=("new.py",)), applied_spec=AppliedSpec(args=("old.py",)))
    newest = Plan(status=JobStatus(applied_spec=AppliedSpec(args=("newest.py",))))

    assert with_applied_spec(job).spec.args == ("old.py",)
    assert with_applied_spec(job, Plan()).spec.args == ("old.py",)
    assert with_applied_spec(job, newest).spec.args == ("newest.py",)
    assert with_applied_spec(a_job(args=("new.py",))).spec.args == ("new.py",)
