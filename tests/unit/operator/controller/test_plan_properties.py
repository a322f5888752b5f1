"""``plan()`` raises no exception for any input, and never creates more pods than the spec allows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_type_hints

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_operator.api.spec import (
    CleanPodPolicy,
    ElasticJobSpec,
    FailureAction,
    FailurePolicy,
    FailureRule,
    GangScheduler,
    PodCondition,
    SchedulingSpec,
)
from elastic_operator.controller import model
from elastic_operator.controller.model import IncompatibleImage, Job, Observed, Plan, Pod
from elastic_operator.controller.plan import plan
from elastic_operator.controller.pods import pod_name
from tests.support.any_job import STATUSES
from tests.support.builders import NAME, NOW, UID
from tests.support.simulated_cluster import is_live
from torchelastic.protocol import pod, records

NUMBERS = st.integers(-2, 5) | st.integers(-(2**60), 2**60)
SECONDS = st.floats(0, 4e9) | st.sampled_from([NOW - 1, NOW, NOW + 1])
STRINGS = st.text(max_size=8)
NAMES = STRINGS | st.builds(pod_name, st.just(NAME), st.just(UID), st.integers(0, 2), st.sampled_from(["", "a", "b"]))


def instances_of(cls: type, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return a strategy for instances of a class; ``fields`` has strategies for fields; others have any value."""
    hints = get_type_hints(cls, {**vars(records), **vars(model), "pod": pod, "records": records, "Mapping": Mapping})
    return st.builds(cls, **{name: st.from_type(hint) for name, hint in hints.items()} | fields)


RECORDS = (records.SizeRecord, records.FailureRecord, records.Member, records.OutcomeRecord, pod.TerminationMessage)
for record in (*RECORDS, IncompatibleImage):
    st.register_type_strategy(record, instances_of(record))
st.register_type_strategy(records.RoundRecord, instances_of(records.RoundRecord, roles=st.just(())))
PODS = instances_of(
    Pod,
    name=NAMES,
    uid=st.sampled_from(["a", "b", "c", "d"]),
    index=NUMBERS,
    created=SECONDS,
    node=st.sampled_from(["", "node-1", "n"]),
    reasons=st.frozensets(st.sampled_from(["Evicted", "Error"])),
    conditions=st.dictionaries(st.just("DisruptionTarget"), st.sampled_from(["True", "False"])),
)
OBSERVATIONS = instances_of(
    Observed,
    pods=st.lists(PODS, max_size=6).map(tuple),
    time_breakdown=st.none(),
    history=st.none(),
    unreadable=st.none(),
)
RULES = st.builds(
    FailureRule,
    action=st.sampled_from(FailureAction),
    pod_reasons=st.frozensets(st.sampled_from(["Evicted", "Error"])),
    pod_conditions=st.sampled_from([(), (PodCondition("DisruptionTarget"),)]),
    exclude_node=st.booleans(),
)
SPECS = st.builds(
    ElasticJobSpec,
    min_replicas=st.integers(-1, 5),
    max_replicas=st.integers(-1, 5),
    replicas=st.none() | NUMBERS,
    spares=st.integers(0, 3),
    backoff_limit=NUMBERS,
    suspend=st.booleans(),
    active_deadline=st.none() | NUMBERS,
    ttl_after_finished=st.none() | NUMBERS,
    clean_pod_policy=st.sampled_from(CleanPodPolicy),
    failure_policy=st.lists(RULES, max_size=2).map(tuple).map(FailurePolicy),
    scheduling=st.sampled_from([SchedulingSpec(), SchedulingSpec(GangScheduler.VOLCANO)]),
    disruption_budget=st.booleans(),
)
JOBS = st.builds(
    Job,
    name=st.just(NAME),
    namespace=STRINGS,
    uid=st.just(UID),
    generation=NUMBERS,
    spec=SPECS,
    status=STATUSES,
    created=SECONDS,
    deleting=st.booleans(),
)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(job=JOBS, observed=OBSERVATIONS, now=SECONDS)
def test_plan_of_any_input(job: Job, observed: Observed, now: float) -> None:
    made = plan(job, observed, now)

    staying = [pod for pod in observed.pods if is_live(pod) and pod.uid not in {pod.uid for pod in made.remove}]
    assert not made.create or len(made.create) + len(staying) <= job.spec.desired + job.spec.spares
    assert len({pod.name for pod in made.create}) == len(made.create)
    assert len({pod.index for pod in made.create}) == len(made.create)
    assert observed.rejected is None or made.create == ()
    assert not made.unmanaged or made == Plan(unmanaged=True)
    if job.status.state.finished or job.deleting or job.spec.suspend:
        nothing = made.create, made.replicas, made.size, made.min_member, made.min_available
        assert nothing == ((), None, None, None, None)
    assert not made.delete_job or job.spec.ttl_after_finished is not None
