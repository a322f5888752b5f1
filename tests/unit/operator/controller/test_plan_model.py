"""A model of a job: the invariants of the plan hold under any order of events.

The user edits, suspends and resumes the job; pods, agents, nodes and the store change and fail; and the operator
observes the cluster late, applies outdated plans, and is killed between any two of its writes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from elastic_operator.api.constants import Reason
from elastic_operator.api.spec import CleanPodPolicy, FailureAction, GangScheduler, SchedulingSpec
from elastic_operator.api.status import JobState
from elastic_operator.controller.model import IncompatibleImage, Job, Observed, Plan, Pod, PodPhase, TerminationCause
from elastic_operator.controller.plan import EXIT_PERIOD, plan
from elastic_operator.controller.pods import ENDED_PODS_KEPT, LONGEST_BACK_OFF
from tests.support.builders import a_job, on_disruption, on_reasons, with_spec
from tests.support.simulated_cluster import (
    NODES,
    ConflictError,
    OperatorKilledError,
    SimulatedCluster,
    Store,
    finish_reason,
    is_live,
    runs,
)
from torchelastic.protocol.pod import ExitCode
from torchelastic.protocol.records import OutcomeState

if TYPE_CHECKING:
    from elastic_operator.api.spec import FailureRule

ACCIDENTS = st.sampled_from([137, 139, 3, 1, 127, None])
LEAVES = st.sampled_from([129, 130, 131, 143])
RULES = st.lists(
    st.builds(
        on_reasons, st.sampled_from(FailureAction), st.sampled_from(["OOMKilled", "Evicted"]), exclude=st.booleans()
    )
    | st.builds(on_disruption, st.sampled_from([FailureAction.COUNT, FailureAction.IGNORE]), exclude=st.booleans()),
    max_size=2,
).map(tuple)


class AnyLife(RuleBasedStateMachine):
    """The life of one job."""

    @initialize(
        minimum=st.integers(1, 3),
        more=st.integers(0, 3),
        replicas=st.none() | st.integers(1, 5),
        backoff_limit=st.integers(0, 6),
        rules=RULES,
        deadline=st.none() | st.sampled_from([30, 200]),
        ttl=st.none() | st.sampled_from([0, 20, 100]),
        policy=st.sampled_from(CleanPodPolicy),
        gang=st.sampled_from([SchedulingSpec(), SchedulingSpec(GangScheduler.VOLCANO)]),
        budget=st.booleans(),
        suspend=st.sampled_from([False, False, True]),
        spares=st.integers(0, 2),
    )
    def begin(
        self,
        minimum: int,
        more: int,
        replicas: int | None,
        backoff_limit: int,
        rules: tuple[FailureRule, ...],
        deadline: int | None,
        ttl: int | None,
        policy: CleanPodPolicy,
        gang: SchedulingSpec,
        budget: bool,
        suspend: bool,
        spares: int,
    ) -> None:
        maximum = minimum + more
        wanted = None if replicas is None else min(max(replicas, minimum), maximum)
        self.cluster = SimulatedCluster(
            a_job(
                minimum=minimum,
                maximum=maximum,
                replicas=wanted,
                args=("first.py",),
                backoff_limit=backoff_limit,
                failure_rules=rules,
                active_deadline=deadline,
                ttl_after_finished=ttl,
                clean_pod_policy=policy,
                scheduling=gang,
                disruption_budget=budget,
                suspend=suspend,
                spares=spares,
            )
        )
        self.pending_plan: tuple[Job, Observed, Plan] | None = None

    # -- the operator

    def _apply(self, job: Job, observed: Observed, todo: Plan, writes: int = 1_000_000) -> None:
        try:
            self.cluster.apply(job, observed, todo, writes)
        except OperatorKilledError:
            self.cluster.forget_responses()
            self.cluster.record_state()
            self.cluster.recorded = self.cluster.recorded[-1:]  # a restarted operator lists the current state
        except ConflictError:
            pass
        self.pending_plan = None

    @rule(lateness=st.integers(0, 4))
    def the_operator_reconciles(self, lateness: int) -> None:
        self._reconcile(lateness)

    @rule(writes=st.integers(0, 10))
    def the_operator_is_killed_between_two_writes(self, writes: int) -> None:
        job, observed = self.cluster.observe()
        self._apply(job, observed, plan(job, observed, self.cluster.now), writes)

    @rule()
    def the_operator_makes_a_plan(self) -> None:
        job, observed = self.cluster.observe()
        self.pending_plan = job, observed, plan(job, observed, self.cluster.now)

    @precondition(lambda self: self.pending_plan is not None)
    @rule()
    def the_operator_applies_an_outdated_plan(self) -> None:
        assert self.pending_plan is not None
        self._apply(*self.pending_plan)

    @rule()
    def a_second_plan_does_nothing(self) -> None:
        self.cluster.record_state()
        had_store, had_failed_creations = self.cluster.etcd, self._has_failed_creations()
        self._reconcile()
        if self.cluster.etcd and not had_store and not any(map(is_live, self.cluster.pods.values())):
            self._reconcile()  # the first plan has started the store; this plan reads its data
        if had_failed_creations or self._has_failed_creations():
            self._reconcile()  # this plan reports the API server's answer
        if self.cluster.deleted and any(map(is_live, self.cluster.pods.values())):
            self._reconcile()  # the pods of a deleted job are deleted, too
        self._assert_plan_is_empty()

    def _has_failed_creations(self) -> bool:
        """Return whether the last creation of pods failed, or the status reports a failure."""
        cluster = self.cluster
        reasons = {condition.reason for condition in cluster.job.status.conditions if condition.status}
        return bool(cluster.rejection or cluster.blocked or reasons & {Reason.REFUSED, Reason.RESOURCES_BLOCKED})

    def _reconcile(self, lateness: int = 0) -> None:
        job, observed = self.cluster.observe(lateness)
        self._apply(job, observed, plan(job, observed, self.cluster.now))

    def _assert_plan_is_empty(self) -> None:
        job, observed = self.cluster.observe()
        if job.status.state is JobState.SUSPENDED and not job.spec.suspend and not job.deleting:
            self._reconcile()  # a job that is resumed before its last pod is gone becomes Suspended first
            job, observed = self.cluster.observe()
        again = plan(job, observed, self.cluster.now)
        repeated = ("report", "etcd", "min_member", "min_available", "wake_at", "remove")
        if again == Plan(**{name: getattr(again, name) for name in repeated}):
            # Ended pods are removed only when their successors have been observed, which may be one plan later.
            assert all(self.cluster.pods[pod.uid].phase.ended for pod in again.remove)
            self._apply(job, observed, again)
            job, observed = self.cluster.observe()
            again = plan(job, observed, self.cluster.now)
        assert again.report in (None, self.cluster.report), "the report is written a second time"
        assert again == Plan(
            report=again.report,
            etcd=self.cluster.etcd,
            min_member=self.cluster.pod_group,
            min_available=self.cluster.disruption_budget,
            wake_at=again.wake_at,
            create=again.create if self.cluster.quota_exhausted and not self.cluster.rejects_pods else (),
        )
        if not job.status.state.finished and not job.deleting:
            empty = job.spec.desired + job.spec.spares - sum(is_live(pod) for pod in observed.pods)
            # Pods that failed while the store was unread are kept until the store has been read.
            counted = [pod for pod in observed.pods if pod.uid in job.status.counted_pod_uids]
            ended = [pod for pod in counted if pod.phase.ended and not pod.terminating]
            assert len(ended) <= max(ENDED_PODS_KEPT, empty)

    # -- pods

    def _pick(self, data: st.DataObject, pods: list[Pod]) -> Pod | None:
        return data.draw(st.sampled_from(sorted(pods, key=lambda pod: pod.uid))) if pods else None

    @rule(data=st.data())
    def a_pod_starts(self, data: st.DataObject) -> None:
        pods = [pod for pod in self.cluster.pods.values() if pod.phase is PodPhase.PENDING and not pod.terminating]
        if (pod := self._pick(data, pods)) is not None:
            self._start(pod, ready=data.draw(st.booleans()), node=data.draw(st.sampled_from(NODES)))
            self.cluster.record_state()

    def _start(self, pod: Pod, *, ready: bool, node: str = NODES[0]) -> None:
        self.cluster.change(pod, phase=PodPhase.RUNNING, ready=ready, node=node, started=self.cluster.now)

    @rule()
    def all_pods_start(self) -> None:
        for pod in list(self.cluster.pods.values()):
            if is_live(pod) and not pod.ready:
                self._start(pod, ready=True)
        self.cluster.record_state()

    @rule(data=st.data(), code=ACCIDENTS, sidecars_running=st.booleans())
    def a_pod_dies(self, data: st.DataObject, code: int | None, sidecars_running: bool) -> None:
        if (pod := self._pick(data, list(filter(runs, self.cluster.pods.values())))) is not None:
            self.cluster.end(pod, code, sidecars_running=sidecars_running)
            self.cluster.record_state()

    @rule(data=st.data())
    def a_pod_runs_out_of_memory(self, data: st.DataObject) -> None:
        pods = [pod for pod in self.cluster.pods.values() if pod.phase is PodPhase.RUNNING]
        if (pod := self._pick(data, pods)) is not None:
            reasons = pod.reasons | {"OOMKilled"}
            self.cluster.end(
                pod, 137, termination_cause=pod.termination_cause or TerminationCause.OUT_OF_MEMORY, reasons=reasons
            )
            self.cluster.record_state()

    @rule(data=st.data(), termination_cause=st.sampled_from([TerminationCause.DISRUPTED, TerminationCause.NODE_LOST]))
    def a_pod_is_disrupted(self, data: st.DataObject, termination_cause: TerminationCause) -> None:
        if (pod := self._pick(data, [pod for pod in self.cluster.pods.values() if is_live(pod)])) is not None:
            self.cluster.disrupt(pod, termination_cause)
            self.cluster.record_state()

    @rule(data=st.data())
    def a_node_rejects_a_pod(self, data: st.DataObject) -> None:
        pods = [pod for pod in self.cluster.pods.values() if pod.phase is PodPhase.PENDING and not pod.terminating]
        if (pod := self._pick(data, pods)) is not None:
            self.cluster.disrupt(pod, TerminationCause.NOT_ADMITTED)
            self.cluster.record_state()

    @rule(data=st.data())
    def a_pod_is_evicted(self, data: st.DataObject) -> None:
        if (pod := self._pick(data, [pod for pod in self.cluster.pods.values() if is_live(pod)])) is not None:
            self.cluster.evict(pod)
            self.cluster.record_state()

    @rule(data=st.data(), code=LEAVES, sidecars_running=st.booleans())
    def a_pod_leaves(self, data: st.DataObject, code: int, sidecars_running: bool) -> None:
        if (pod := self._pick(data, self.cluster.serving())) is not None:
            self.cluster.end(pod, code, sidecars_running=sidecars_running)
            self.cluster.record_state()

    @rule(data=st.data())
    def the_sidecars_of_a_pod_end(self, data: st.DataObject) -> None:
        if (pod := self._pick(data, [pod for pod in self.cluster.pods.values() if pod.sidecars_running])) is not None:
            self.cluster.change(pod, sidecars_running=False)
            self.cluster.record_state()

    @rule(data=st.data(), dice=st.integers(0, 4))
    def a_pod_has_no_agent(self, data: st.DataObject, dice: int) -> None:
        pods = [pod for pod in self.cluster.pods.values() if pod.phase is PodPhase.PENDING]
        if dice == 0 and (pod := self._pick(data, pods)) is not None:
            self.cluster.end(
                pod, 128, incompatible_image=IncompatibleImage(Reason.NO_AGENT, "the image has no torchelastic-run")
            )
            self.cluster.no_agent = True
            self.cluster.record_state()

    @rule(data=st.data())
    def a_pod_is_deleted(self, data: st.DataObject) -> None:
        if (pod := self._pick(data, list(self.cluster.pods.values()))) is not None:
            self.cluster.delete(pod)
            self.cluster.record_state()

    @rule(data=st.data())
    def a_pod_vanishes(self, data: st.DataObject) -> None:
        if (pod := self._pick(data, list(self.cluster.pods.values()))) is not None:
            del self.cluster.pods[pod.uid]
            self.cluster.record_state()

    @rule()
    def deletions_finish(self) -> None:
        self.cluster.finish_deletions()
        self.cluster.record_state()

    # -- agents

    @rule()
    def the_agents_form_a_round(self) -> None:
        self.cluster.agents_form_a_round()
        self.cluster.record_state()

    @rule(state=st.sampled_from(OutcomeState))
    def the_agents_end_the_run(self, state: OutcomeState) -> None:
        self.cluster.agents_end_the_run(state)
        self.cluster.record_state()

    @precondition(lambda self: self.cluster.run_ended is None)
    @rule(state=st.sampled_from(OutcomeState), readable=st.booleans(), suspend=st.booleans())
    def the_run_ends_and_its_pods_are_deleted_while_the_operator_is_down(
        self, state: OutcomeState, readable: bool, suspend: bool
    ) -> None:
        cluster = self.cluster
        self.all_pods_start()
        cluster.agents_form_a_round()
        cluster.agents_end_the_run(state)
        if cluster.run_ended is not None:
            cluster.pods = {}
            cluster.store.readable = readable
            cluster.forget_responses()
            self._edit(suspend=suspend)
            cluster.record_state()
            cluster.recorded = cluster.recorded[-1:]

    @precondition(lambda self: self.cluster.run_ended is not None)
    @rule(data=st.data(), sidecars_running=st.booleans())
    def an_agent_reads_the_outcome(self, data: st.DataObject, sidecars_running: bool) -> None:
        if (pod := self._pick(data, self.cluster.serving())) is not None:
            self.cluster.agent_exits_with_the_outcome(pod, sidecars_running=sidecars_running)
            self.cluster.record_state()

    @precondition(lambda self: self.cluster.run_ended is None)
    @rule(data=st.data(), dice=st.integers(0, 4))
    def an_agent_refuses_its_input(self, data: st.DataObject, dice: int) -> None:
        if dice == 0 and (pod := self._pick(data, self.cluster.serving())) is not None:
            self.cluster.end(pod, ExitCode.BAD_INPUT, "no such file")
            self.cluster.had_bad_input = True
            self.cluster.record_state()

    # -- API server, store, user, time

    @rule()
    def the_spec_becomes_unacceptable(self) -> None:
        job = self.cluster.job
        self.cluster.rejects_pods = True
        self.cluster.job = replace(job, generation=job.generation + 1)
        self.cluster.record_state()

    @precondition(lambda self: self.cluster.rejects_pods)
    @rule()
    def the_spec_is_corrected(self) -> None:
        job = self.cluster.job
        self.cluster.rejects_pods = False
        self.cluster.job = replace(job, generation=job.generation + 1)
        self.cluster.record_state()

    @rule(full=st.booleans())
    def the_quota_is_exhausted_or_raised(self, full: bool) -> None:
        self.cluster.quota_exhausted = full

    @rule(readable=st.booleans())
    def the_store_becomes_readable_or_unreadable(self, readable: bool) -> None:
        self.cluster.store.readable = readable
        self.cluster.record_state()

    @precondition(lambda self: self.cluster.run_ended is None)
    @rule()
    def the_store_loses_its_keys(self) -> None:
        self.cluster.store = Store(readable=self.cluster.store.readable)
        self.cluster.record_state()

    @rule(minimum=st.integers(1, 4), more=st.integers(0, 3), place=st.integers(0, 3), spares=st.integers(0, 2))
    def the_user_edits_the_spec(self, minimum: int, more: int, place: int, spares: int) -> None:
        replicas = minimum + min(place, more)
        self._edit(min_replicas=minimum, max_replicas=minimum + more, replicas=replicas, spares=spares)

    @rule(suspend=st.booleans())
    def the_user_suspends_or_resumes(self, suspend: bool) -> None:
        self._edit(suspend=suspend)

    @rule(args=st.sampled_from([("first.py",), ("second.py",)]), writes=st.integers(0, 6))
    def the_user_suspends_the_job_to_change_the_program(self, args: tuple[str, ...], writes: int) -> None:
        self._edit(suspend=True)
        self.the_operator_is_killed_between_two_writes(writes)
        self._edit(suspend=False, args=args)
        self._reconcile()

    @rule(args=st.sampled_from([("first.py",), ("second.py",)]))
    def the_user_changes_the_program(self, args: tuple[str, ...]) -> None:
        self._edit(args=args)

    @rule(
        backoff_limit=st.integers(0, 6),
        deadline=st.none() | st.integers(10, 200),
        policy=st.sampled_from(CleanPodPolicy),
    )
    def the_user_changes_fields_that_may_always_change(
        self, backoff_limit: int, deadline: int | None, policy: CleanPodPolicy
    ) -> None:
        self._edit(backoff_limit=backoff_limit, active_deadline=deadline, clean_pod_policy=policy)

    def _edit(self, **fields: Any) -> None:
        job = self.cluster.job
        spec = msgspec.structs.replace(job.spec, **fields)
        if spec != job.spec:
            self.cluster.job = with_spec(job, spec, generation=job.generation + 1)
            self.cluster.record_state()

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.cluster.now += seconds

    # -- invariants

    @invariant()
    def no_index_has_two_live_pods(self) -> None:
        indices = [pod.index for pod in self.cluster.pods.values() if is_live(pod)]
        assert len(indices) == len(set(indices))

    @invariant()
    def all_live_pods_run_the_same_program(self) -> None:
        programs = {self.cluster.applied_specs[pod.uid].args for pod in self.cluster.pods.values() if is_live(pod)}
        assert len(programs) <= 1

    @invariant()
    def names_are_unique(self) -> None:
        assert len({pod.name for pod in self.cluster.pods.values()}) == len(self.cluster.pods)

    def teardown(self) -> None:
        """Check that the job finishes with the right result when all faults are over."""
        if not hasattr(self, "cluster"):
            return
        cluster = self.cluster
        cluster.store.readable = True
        self.the_spec_is_corrected()
        cluster.quota_exhausted = False
        self.a_suspended_job_has_no_objects()
        self._edit(suspend=False)
        for _ in range(20):
            self.deletions_finish()
            self.all_pods_start()
            cluster.agents_form_a_round()
            self.a_second_plan_does_nothing()
            if cluster.job.status.state.finished:
                break
            if cluster.run_ended is None and self._all_pods_train():
                cluster.agents_end_the_run(OutcomeState.SUCCEEDED)
            cluster.now += LONGEST_BACK_OFF
        self._assert_result()

    def a_suspended_job_has_no_objects(self) -> None:
        cluster = self.cluster
        self._edit(suspend=True)
        for _ in range(2):
            self.a_second_plan_does_nothing()
            self.deletions_finish()
        self.a_second_plan_does_nothing()
        status = cluster.job.status
        if not status.state.finished and not cluster.job.deleting:
            assert status.state is JobState.SUSPENDED
            assert (status.applied_spec, status.active, status.replicas) == (None, None, 0)
            assert all(pod.terminating and not runs(pod) for pod in cluster.pods.values())
            assert (cluster.etcd, cluster.pod_group, cluster.disruption_budget) == (False, None, None)

    def _all_pods_train(self) -> bool:
        round, job = self.cluster.store.round, self.cluster.job
        live = [pod for pod in self.cluster.pods.values() if is_live(pod)]
        return round is not None and (len(round.members), len(live)) == (
            job.spec.desired,
            job.spec.desired + job.spec.spares,
        )

    def _assert_result(self) -> None:
        cluster = self.cluster
        job, status = cluster.job, cluster.job.status
        assert status.state.finished, "the job never finishes"
        match finish_reason(status):
            case Reason.RUN_SUCCEEDED:
                assert OutcomeState.SUCCEEDED in cluster.outcomes
            case Reason.RUN_FAILED:
                assert OutcomeState.FAILED in cluster.outcomes
            case Reason.NO_AGENT:
                assert cluster.no_agent
            case Reason.BAD_INPUT:
                assert cluster.had_bad_input
            case Reason.DEADLINE_EXCEEDED | Reason.POD_FAILURE_POLICY:
                pass  # SimulatedCluster checked the reason when the status was written
            case _:
                assert status.pod_failures == len(cluster.counted_failures)
        cluster.now += max(EXIT_PERIOD, job.spec.ttl_after_finished or 0.0)
        for _ in range(3):
            self.a_second_plan_does_nothing()
            self.deletions_finish()
        assert cluster.deleted is (job.spec.ttl_after_finished is not None), (
            "the job is deleted when its TTL has expired, and only then"
        )
        left = [pod for pod in cluster.pods.values() if pod.sidecars_running or runs(pod)]
        if cluster.deleted or job.spec.clean_pod_policy is not CleanPodPolicy.NONE:
            assert not left, "a pod outlives its job"
        if job.spec.clean_pod_policy is CleanPodPolicy.ALL and not cluster.deleted:
            assert not [pod for pod in cluster.pods.values() if not pod.terminating], (
                "a pod of the finished job was not deleted"
            )
        assert (cluster.etcd, cluster.pod_group, cluster.disruption_budget) == (False, None, None), (
            "etcd, the PodGroup or the PodDisruptionBudget outlives its job"
        )


TestAnyLife = AnyLife.TestCase
TestAnyLife.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
