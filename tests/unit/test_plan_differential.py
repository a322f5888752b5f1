"""A spec that is applied fresh and the same spec reached by edits end alike."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_operator.api.spec import CleanPodPolicy, FailureAction, FailurePolicy, GangScheduler, SchedulingSpec
from elastic_operator.controller.model import Job, PodPhase
from elastic_operator.controller.plan import plan
from tests.support.builders import a_job, on_reasons, with_spec
from tests.support.simulated_cluster import SimulatedCluster, is_live
from torchelastic.protocol import OutcomeState

if TYPE_CHECKING:
    from elastic_operator.api.spec import ElasticJobSpec
    from elastic_operator.api.status import JobState, JobStatus

ENOUGH = 8
"""So many reconciles bring every job here to rest."""

SPECS = st.builds(
    lambda minimum, more, place, **fields: (
        a_job(minimum=minimum, maximum=minimum + more, replicas=minimum + min(place, more), **fields).spec
    ),
    minimum=st.integers(1, 3),
    more=st.integers(0, 3),
    place=st.integers(0, 3),
    args=st.sampled_from([("first.py",), ("second.py",)]),
    backoff_limit=st.integers(5, 6),
    suspend=st.booleans(),
    active_deadline=st.none() | st.just(3600),
    clean_pod_policy=st.sampled_from(CleanPodPolicy),
    failure_policy=st.sampled_from([(), (on_reasons(FailureAction.IGNORE, "OOMKilled"),)]).map(FailurePolicy),
    scheduling=st.sampled_from([SchedulingSpec(), SchedulingSpec(GangScheduler.VOLCANO)]),
    disruption_budget=st.booleans(),
)
MISTAKES = SPECS.map(lambda spec: msgspec.structs.replace(spec, env=({"name": "A"}, {"name": "A"})))
"""Specs of which no pod can be made."""


@dataclass(frozen=True)
class Rest:
    """What a job comes to rest with, but for names, times and counts: those tell how it came there."""

    state: JobState
    observed: bool
    numbers: tuple[int, int, int, int]
    active: bool
    applied_spec: object
    holds: frozenset[tuple[str, str]]
    pods: tuple[int, frozenset[str]]
    kept: tuple[bool, int | None, int | None]


def settle(cluster: SimulatedCluster) -> None:
    """Let all things take their course until there is nothing left to do."""
    for _ in range(ENOUGH):
        cluster.look()
        job, observed = cluster.observe()
        cluster.apply(job, observed, plan(job, observed, cluster.now))
        cluster.finish_deletions()
        for pod in list(cluster.pods.values()):
            if is_live(pod) and not pod.ready:
                cluster.change(pod, phase=PodPhase.RUNNING, ready=True, started=cluster.now)
        cluster.agents_form_an_round()


def edit(cluster: SimulatedCluster, spec: ElasticJobSpec) -> None:
    job = cluster.job
    if spec != job.spec:
        cluster.job = with_spec(job, spec, generation=job.generation + 1)
        settle(cluster)


def rest(cluster: SimulatedCluster) -> Rest:
    job: Job = cluster.job
    status: JobStatus = job.status
    live = [pod for pod in cluster.pods.values() if is_live(pod)]
    kinds = frozenset(repr(cluster.made_from[pod.uid].applied) for pod in live)
    return Rest(
        state=status.state,
        observed=status.observed_generation == job.generation,
        numbers=(status.replicas, status.ready_replicas, status.desired, status.world_size),
        active=status.active is not None,
        applied_spec=status.applied_spec,
        holds=frozenset((each.type, each.reason) for each in status.conditions if each.status),
        pods=(len(live), kinds),
        kept=(cluster.etcd, cluster.group, cluster.guard),
    )


def reached(edits: list[ElasticJobSpec], spec: ElasticJobSpec) -> SimulatedCluster:
    """The job that was applied as the first of these and edited into the next, and so on; what may not change while it
    runs is changed while it is suspended."""
    first, *more = [*edits, spec]
    cluster = SimulatedCluster(replace(a_job(), spec=first))
    settle(cluster)
    for each in more:
        if each.applied != cluster.job.spec.applied:
            edit(cluster, msgspec.structs.replace(cluster.job.spec, suspend=True))
            edit(cluster, msgspec.structs.replace(each, suspend=True))
        edit(cluster, each)
    return cluster


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(edits=st.lists(SPECS | MISTAKES, min_size=1, max_size=4), spec=SPECS)
def test_a_spec_reached_by_edits_and_one_applied_fresh_end_alike(
    edits: list[ElasticJobSpec], spec: ElasticJobSpec
) -> None:
    fresh, edited = reached([], spec), reached(edits, spec)
    assert rest(edited) == rest(fresh)

    for cluster in (fresh, edited):
        cluster.agents_end_the_run(OutcomeState.SUCCEEDED)
        settle(cluster)
    assert rest(edited) == rest(fresh)
