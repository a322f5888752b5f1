"""The plan raises no exception for any input, and never creates more pods than allowed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_operator.api.constants import ConditionType, Reason, pod_name
from elastic_operator.api.spec import (
    MANAGER,
    CleanPodPolicy,
    ElasticJobSpec,
    FailureAction,
    FailurePolicy,
    FailureRule,
    GangScheduler,
    PodCondition,
    SchedulingSpec,
)
from elastic_operator.api.status import Condition, JobState, JobStatus, LastFailure
from elastic_operator.controller.model import (
    EtcdState,
    IncompatibleImage,
    Job,
    Observed,
    Plan,
    Pod,
    PodPhase,
    TerminationCause,
)
from elastic_operator.controller.plan import plan
from tests.support.builders import NAME, NOW, UID
from tests.support.simulated_cluster import is_live
from torchelastic.protocol import (
    FailureRecord,
    Member,
    OutcomeRecord,
    OutcomeState,
    RoundReason,
    RoundRecord,
    SizeRecord,
    TerminationMessage,
)

NUMBERS = st.integers(-2, 5) | st.integers(-(2**60), 2**60)
SECONDS = st.floats() | st.sampled_from([NOW - 1, NOW, NOW + 1])
TEXTS = st.text(max_size=8)
NAMES = TEXTS | st.builds(pod_name, st.just(NAME), st.just(UID), st.integers(0, 2), st.sampled_from(["", "a", "b"]))
SIZES = st.builds(
    SizeRecord, min=NUMBERS, max=NUMBERS, generation=NUMBERS, desired=st.none() | NUMBERS, draining=st.tuples(NAMES)
)
FAILURES = st.builds(
    FailureRecord,
    round=NUMBERS,
    rank=NUMBERS,
    local_rank=NUMBERS,
    node=TEXTS,
    exit_code=st.integers(-255, 255),
    message=TEXTS,
)
PODS = st.builds(
    Pod,
    name=NAMES,
    uid=st.sampled_from(["a", "b", "c", "d"]),
    index=NUMBERS,
    phase=st.sampled_from(PodPhase),
    ready=st.booleans(),
    terminating=st.booleans(),
    created=SECONDS,
    started=st.none() | SECONDS,
    ended=st.none() | SECONDS,
    exit_code=st.none() | st.integers(-300, 300),
    message=st.none()
    | TEXTS
    | st.builds(TerminationMessage, reason=TEXTS, message=TEXTS, failure=st.none() | FAILURES),
    failures=NUMBERS,
    failed=st.none() | SECONDS,
    size=st.none() | SIZES,
    waiting=TEXTS,
    incompatible_image=st.none() | st.builds(IncompatibleImage, reason=st.sampled_from(Reason), message=TEXTS),
    sidecars_running=st.booleans(),
    node=st.sampled_from(["", "m", "n"]),
    termination_cause=st.none() | st.sampled_from(TerminationCause),
    reasons=st.frozensets(st.sampled_from(["Evicted", "Error"])),
    conditions=st.dictionaries(st.just("DisruptionTarget"), st.sampled_from(["True", "False"])),
)
ROUNDS = st.builds(
    RoundRecord,
    number=NUMBERS,
    members=st.lists(st.builds(Member, node=TEXTS, address=TEXTS, workers=NUMBERS), max_size=2).map(tuple),
    restarts=NUMBERS,
    uncharged_restarts=NUMBERS,
    cause=TEXTS,
    reason=st.sampled_from(RoundReason),
    failure=st.none() | FAILURES,
)
WORLDS = st.builds(
    Observed,
    pods=st.lists(PODS, max_size=6).map(tuple),
    etcd=st.sampled_from(EtcdState),
    store_read=st.booleans(),
    round=st.none() | ROUNDS,
    outcome=st.none()
    | st.builds(OutcomeRecord, state=st.sampled_from(OutcomeState), message=TEXTS, failure=st.none() | FAILURES),
    size=st.none() | SIZES,
    rejected=st.none() | TEXTS,
    blocked=st.none() | TEXTS,
    etcd_blocked=st.booleans(),
    store_error=st.none() | TEXTS,
    store_forbidden=st.booleans(),
    disruption_budget_error=st.none() | TEXTS,
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
    max_restarts=NUMBERS,
    backoff_limit=NUMBERS,
    suspend=st.booleans(),
    managed_by=st.sampled_from([MANAGER, MANAGER, MANAGER, "kueue.x-k8s.io/multikueue"]),
    active_deadline=st.none() | NUMBERS,
    ttl_after_finished=st.none() | NUMBERS,
    clean_pod_policy=st.sampled_from(CleanPodPolicy),
    failure_policy=st.lists(RULES, max_size=2).map(tuple).map(FailurePolicy),
    scheduling=st.sampled_from([SchedulingSpec(), SchedulingSpec(GangScheduler.VOLCANO)]),
    disruption_budget=st.booleans(),
    env=st.sampled_from([(), ({"name": "A"}, {"name": "A"}), ({},)]),
    template=st.sampled_from([{}, {"spec": 7}, {"spec": {"containers": [{"name": "worker", "env": 7}]}}]),
)
STATUSES = st.builds(
    JobStatus,
    state=st.sampled_from(JobState),
    desired=NUMBERS,
    round=NUMBERS,
    restarts=NUMBERS,
    uncharged_restarts=NUMBERS,
    pod_failures=NUMBERS,
    active=st.none() | SECONDS,
    last_failure=st.none() | st.builds(LastFailure, message=TEXTS),
    excluded_nodes=st.sampled_from([(), ("m",)]),
    applied_spec=st.none() | SPECS.map(lambda spec: spec.applied),
    counted_pod_uids=st.frozensets(st.sampled_from(["a", "b"])),
    size_generation=NUMBERS,
    started=st.none() | SECONDS,
    completed=st.none() | SECONDS,
    observed_generation=NUMBERS,
    conditions=st.lists(
        st.builds(
            Condition,
            type=st.sampled_from(ConditionType),
            status=st.booleans(),
            reason=st.sampled_from(Reason),
            message=TEXTS,
            since=SECONDS,
        ),
        max_size=4,
        unique_by=lambda condition: condition.type,
    ).map(tuple),
)
JOBS = st.builds(
    Job,
    name=st.just(NAME),
    namespace=TEXTS,
    uid=st.just(UID) | TEXTS,
    generation=NUMBERS,
    spec=SPECS,
    status=STATUSES,
    created=SECONDS,
    deleting=st.booleans(),
)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(job=JOBS, observed=WORLDS, now=SECONDS)
def test_plan_of_any_input(job: Job, observed: Observed, now: float) -> None:
    made = plan(job, observed, now)

    staying = [pod for pod in observed.pods if is_live(pod) and pod.uid not in {removal.uid for removal in made.remove}]
    assert not made.create or len(made.create) + len(staying) <= job.spec.desired
    assert len({pod.name for pod in made.create}) == len(made.create)
    assert len({pod.index for pod in made.create}) == len(made.create)
    if observed.rejected is not None:
        assert made.create == ()
    if made.hands_off:
        assert made == Plan(hands_off=True)
    if job.status.state.finished or job.deleting or job.spec.suspend:
        assert (made.create, made.replicas, made.size, made.min_member, made.min_available) == (
            (),
            None,
            None,
            None,
            None,
        )
    assert not made.delete_job or job.spec.ttl_after_finished is not None
