"""Whatever happens to a job, and wherever the operator is interrupted, the plan keeps its promises.

A user edits the spec, suspends the job and resumes it; pods and agents, nodes and the store do what they may do; and
the operator sees the world late, acts on what it saw before the world went on, and dies between any two of its writes.
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
from elastic_operator.controller.scaling import ENDED_PODS_KEPT, LONGEST_BACK_OFF
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
from torchelastic.protocol import ExitCode, OutcomeState

if TYPE_CHECKING:
    from elastic_operator.api.spec import FailureRule

ACCIDENTS = st.sampled_from([137, 139, 3, 1, 127, None])
LEAVES = st.sampled_from([143, 130])
RULES = st.lists(
    st.builds(
        on_reasons, st.sampled_from(FailureAction), st.sampled_from(["OOMKilled", "Evicted"]), exclude=st.booleans()
    )
    | st.builds(on_disruption, st.sampled_from([FailureAction.COUNT, FailureAction.IGNORE]), exclude=st.booleans()),
    max_size=2,
).map(tuple)


class AnyLife(RuleBasedStateMachine):
    """One job's life."""

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
            )
        )
        self.held: tuple[Job, Observed, Plan] | None = None

    # -- the operator

    def _carry_out(self, job: Job, observed: Observed, todo: Plan, writes: int = 1_000_000) -> None:
        try:
            self.cluster.apply(job, observed, todo, writes)
        except OperatorKilledError:
            self.cluster.forget()
            self.cluster.look()
            self.cluster.seen = self.cluster.seen[-1:]  # the next operator begins with a list of its own
        except ConflictError:
            pass
        self.held = None

    @rule(lateness=st.integers(0, 4))
    def the_operator_reconciles(self, lateness: int) -> None:
        self._reconcile(lateness)

    @rule(writes=st.integers(0, 10))
    def the_operator_is_killed_between_two_writes(self, writes: int) -> None:
        job, observed = self.cluster.observe()
        self._carry_out(job, observed, plan(job, observed, self.cluster.now), writes)

    @rule()
    def the_operator_makes_a_plan(self) -> None:
        job, observed = self.cluster.observe()
        self.held = job, observed, plan(job, observed, self.cluster.now)

    @precondition(lambda self: self.held is not None)
    @rule()
    def the_operator_carries_it_out_after_the_world_has_moved_on(self) -> None:
        assert self.held is not None
        self._carry_out(*self.held)

    @rule()
    def a_second_plan_does_nothing(self) -> None:
        self.cluster.look()
        had_store, was_troubled = self.cluster.etcd, self._is_troubled()
        self._reconcile()
        if self.cluster.etcd and not had_store and not any(map(is_live, self.cluster.pods.values())):
            self._reconcile()  # a store that has just come up says what was waited for
        if was_troubled or self._is_troubled():
            self._reconcile()  # what the API server has answered is told
        if self.cluster.deleted and any(map(is_live, self.cluster.pods.values())):
            self._reconcile()  # with the job go its pods
        self._assert_nothing_is_left_to_do()

    def _is_troubled(self) -> bool:
        """Whether pods could not be made when that was tried last, or the status says so."""
        cluster = self.cluster
        said = {condition.reason for condition in cluster.job.status.conditions if condition.status}
        return bool(cluster.refusal or cluster.blocked or said & {Reason.REFUSED, Reason.RESOURCES_BLOCKED})

    def _reconcile(self, lateness: int = 0) -> None:
        job, observed = self.cluster.observe(lateness)
        self._carry_out(job, observed, plan(job, observed, self.cluster.now))

    def _assert_nothing_is_left_to_do(self) -> None:
        job, observed = self.cluster.observe()
        again = plan(job, observed, self.cluster.now)
        if again == replace(Plan(remove=again.remove), **_standing(again)):
            # Remains of pods go only when their successors can be seen: where there are many, that is one plan later.
            assert all(self.cluster.pods[removal.uid].phase.ended for removal in again.remove)
            self._carry_out(job, observed, again)
            job, observed = self.cluster.observe()
            again = plan(job, observed, self.cluster.now)
        assert again.report in (None, self.cluster.report), "it is written once"
        assert again == Plan(
            report=again.report,
            etcd=self.cluster.etcd,
            min_member=self.cluster.group,
            min_available=self.cluster.guard,
            wake_at=again.wake_at,
            create=again.create if self.cluster.full and not self.cluster.refuses else (),
        )
        if not job.status.state.finished and not job.deleting:
            empty = job.spec.desired - sum(is_live(pod) for pod in observed.pods)
            # Whoever died before the store was read stays until it has been.
            judged = [pod for pod in observed.pods if pod.uid in job.status.counted_pod_uids]
            remains = [pod for pod in judged if pod.phase.ended and not pod.terminating]
            assert len(remains) <= max(ENDED_PODS_KEPT, empty)

    # -- pods

    def _pick(self, data: st.DataObject, pods: list[Pod]) -> Pod | None:
        return data.draw(st.sampled_from(sorted(pods, key=lambda pod: pod.uid))) if pods else None

    @rule(data=st.data())
    def a_pod_starts(self, data: st.DataObject) -> None:
        pods = [pod for pod in self.cluster.pods.values() if pod.phase is PodPhase.PENDING and not pod.terminating]
        if (pod := self._pick(data, pods)) is not None:
            self._start(pod, ready=data.draw(st.booleans()), node=data.draw(st.sampled_from(NODES)))
            self.cluster.look()

    def _start(self, pod: Pod, *, ready: bool, node: str = NODES[0]) -> None:
        self.cluster.change(pod, phase=PodPhase.RUNNING, ready=ready, node=node, started=self.cluster.now)

    @rule()
    def all_pods_start(self) -> None:
        for pod in list(self.cluster.pods.values()):
            if is_live(pod) and not pod.ready:
                self._start(pod, ready=True)
        self.cluster.look()

    @rule(data=st.data(), code=ACCIDENTS, sidecars_running=st.booleans())
    def a_pod_dies(self, data: st.DataObject, code: int | None, sidecars_running: bool) -> None:
        if (pod := self._pick(data, list(filter(runs, self.cluster.pods.values())))) is not None:
            self.cluster.end(pod, code, sidecars_running=sidecars_running)
            self.cluster.look()

    @rule(data=st.data())
    def a_pod_runs_out_of_memory(self, data: st.DataObject) -> None:
        pods = [pod for pod in self.cluster.pods.values() if pod.phase is PodPhase.RUNNING]
        if (pod := self._pick(data, pods)) is not None:
            reasons = pod.reasons | {"OOMKilled"}
            self.cluster.end(
                pod, 137, termination_cause=pod.termination_cause or TerminationCause.OUT_OF_MEMORY, reasons=reasons
            )
            self.cluster.look()

    @rule(data=st.data(), termination_cause=st.sampled_from([TerminationCause.DISRUPTED, TerminationCause.NODE_LOST]))
    def a_pod_has_to_go(self, data: st.DataObject, termination_cause: TerminationCause) -> None:
        if (pod := self._pick(data, [pod for pod in self.cluster.pods.values() if is_live(pod)])) is not None:
            self.cluster.disrupt(pod, termination_cause)
            self.cluster.look()

    @rule(data=st.data())
    def a_node_has_no_room_after_all(self, data: st.DataObject) -> None:
        pods = [pod for pod in self.cluster.pods.values() if pod.phase is PodPhase.PENDING and not pod.terminating]
        if (pod := self._pick(data, pods)) is not None:
            self.cluster.disrupt(pod, TerminationCause.NOT_ADMITTED)
            self.cluster.look()

    @rule(data=st.data())
    def a_pod_is_evicted(self, data: st.DataObject) -> None:
        if (pod := self._pick(data, [pod for pod in self.cluster.pods.values() if is_live(pod)])) is not None:
            self.cluster.evict(pod)
            self.cluster.look()

    @rule(data=st.data(), code=LEAVES, sidecars_running=st.booleans())
    def a_pod_leaves(self, data: st.DataObject, code: int, sidecars_running: bool) -> None:
        if (pod := self._pick(data, self.cluster.serving())) is not None:
            self.cluster.end(pod, code, sidecars_running=sidecars_running)
            self.cluster.look()

    @rule(data=st.data())
    def what_sidecars_running_ends(self, data: st.DataObject) -> None:
        if (pod := self._pick(data, [pod for pod in self.cluster.pods.values() if pod.sidecars_running])) is not None:
            self.cluster.change(pod, sidecars_running=False)
            self.cluster.look()

    @rule(data=st.data(), dice=st.integers(0, 4))
    def a_pod_has_no_agent(self, data: st.DataObject, dice: int) -> None:
        pods = [pod for pod in self.cluster.pods.values() if pod.phase is PodPhase.PENDING]
        if dice == 0 and (pod := self._pick(data, pods)) is not None:
            self.cluster.end(
                pod, 128, incompatible_image=IncompatibleImage(Reason.NO_AGENT, "the image has no torchelastic-run")
            )
            self.cluster.no_agent = True
            self.cluster.look()

    @rule(data=st.data())
    def a_pod_is_deleted(self, data: st.DataObject) -> None:
        if (pod := self._pick(data, list(self.cluster.pods.values()))) is not None:
            self.cluster.delete(pod)
            self.cluster.look()

    @rule(data=st.data())
    def a_pod_vanishes(self, data: st.DataObject) -> None:
        if (pod := self._pick(data, list(self.cluster.pods.values()))) is not None:
            del self.cluster.pods[pod.uid]
            self.cluster.look()

    @rule()
    def deletions_come_to_their_end(self) -> None:
        self.cluster.finish_deletions()
        self.cluster.look()

    # -- agents

    @rule()
    def the_agents_form_an_round(self) -> None:
        self.cluster.agents_form_an_round()
        self.cluster.look()

    @rule(state=st.sampled_from(OutcomeState))
    def the_agents_end_the_run(self, state: OutcomeState) -> None:
        self.cluster.agents_end_the_run(state)
        self.cluster.look()

    @precondition(lambda self: self.cluster.run_ended is None)
    @rule(state=st.sampled_from(OutcomeState), readable=st.booleans(), suspend=st.booleans())
    def the_run_ends_and_all_is_cleaned_up_while_the_operator_is_away(
        self, state: OutcomeState, readable: bool, suspend: bool
    ) -> None:
        cluster = self.cluster
        self.all_pods_start()
        cluster.agents_form_an_round()
        cluster.agents_end_the_run(state)
        if cluster.run_ended is not None:
            cluster.pods = {}
            cluster.store.readable = readable
            cluster.forget()
            self._edit(suspend=suspend)
            cluster.look()
            cluster.seen = cluster.seen[-1:]

    @precondition(lambda self: self.cluster.run_ended is not None)
    @rule(data=st.data(), sidecars_running=st.booleans())
    def an_agent_hears_of_the_end(self, data: st.DataObject, sidecars_running: bool) -> None:
        if (pod := self._pick(data, self.cluster.serving())) is not None:
            self.cluster.agents_hear_of_the_end(pod, sidecars_running=sidecars_running)
            self.cluster.look()

    @precondition(lambda self: self.cluster.run_ended is None)
    @rule(data=st.data(), dice=st.integers(0, 4))
    def an_agent_refuses_its_input(self, data: st.DataObject, dice: int) -> None:
        if dice == 0 and (pod := self._pick(data, self.cluster.serving())) is not None:
            self.cluster.end(pod, ExitCode.BAD_INPUT, "no such file")
            self.cluster.refused_input = True
            self.cluster.look()

    # -- API server, store, user, time

    @rule()
    def the_spec_asks_for_what_is_not_there(self) -> None:
        job = self.cluster.job
        self.cluster.refuses = True
        self.cluster.job = replace(job, generation=job.generation + 1)
        self.cluster.look()

    @precondition(lambda self: self.cluster.refuses)
    @rule()
    def the_spec_is_mended(self) -> None:
        job = self.cluster.job
        self.cluster.refuses = False
        self.cluster.job = replace(job, generation=job.generation + 1)
        self.cluster.look()

    @rule(full=st.booleans())
    def room_comes_and_goes(self, full: bool) -> None:
        self.cluster.full = full

    @rule(readable=st.booleans())
    def the_store_comes_and_goes(self, readable: bool) -> None:
        self.cluster.store.readable = readable
        self.cluster.look()

    @precondition(lambda self: self.cluster.run_ended is None)
    @rule()
    def the_store_loses_its_keys(self) -> None:
        self.cluster.store = Store(readable=self.cluster.store.readable)
        self.cluster.look()

    @rule(minimum=st.integers(1, 4), more=st.integers(0, 3), place=st.integers(0, 3))
    def the_user_edits_the_spec(self, minimum: int, more: int, place: int) -> None:
        self._edit(min_replicas=minimum, max_replicas=minimum + more, replicas=minimum + min(place, more))

    @rule(suspend=st.booleans())
    def the_user_suspends_or_resumes(self, suspend: bool) -> None:
        self._edit(suspend=suspend)

    @rule(args=st.sampled_from([("first.py",), ("second.py",)]), writes=st.integers(0, 6))
    def the_user_brings_another_program_by_suspending(self, args: tuple[str, ...], writes: int) -> None:
        self._edit(suspend=True)
        self.the_operator_is_killed_between_two_writes(writes)
        self._edit(suspend=False, args=args)
        self._reconcile()

    @rule(args=st.sampled_from([("first.py",), ("second.py",)]))
    def the_user_wants_another_program(self, args: tuple[str, ...]) -> None:
        self._edit(args=args)

    @rule(
        backoff_limit=st.integers(0, 6),
        deadline=st.none() | st.integers(10, 200),
        policy=st.sampled_from(CleanPodPolicy),
    )
    def the_user_changes_what_may_always_change(
        self, backoff_limit: int, deadline: int | None, policy: CleanPodPolicy
    ) -> None:
        self._edit(backoff_limit=backoff_limit, active_deadline=deadline, clean_pod_policy=policy)

    def _edit(self, **fields: Any) -> None:
        job = self.cluster.job
        spec = msgspec.structs.replace(job.spec, **fields)
        if spec != job.spec:
            self.cluster.job = with_spec(job, spec, generation=job.generation + 1)
            self.cluster.look()

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 61.0]))
    def time_goes_by(self, seconds: float) -> None:
        self.cluster.now += seconds

    # -- what always holds

    @invariant()
    def no_place_has_two_live_pods(self) -> None:
        places = [pod.index for pod in self.cluster.pods.values() if is_live(pod)]
        assert len(places) == len(set(places))

    @invariant()
    def all_pods_are_of_one_kind(self) -> None:
        kinds = {self.cluster.made_from[pod.uid].args for pod in self.cluster.pods.values() if is_live(pod)}
        assert len(kinds) <= 1

    @invariant()
    def names_are_unique(self) -> None:
        assert len({pod.name for pod in self.cluster.pods.values()}) == len(self.cluster.pods)

    def teardown(self) -> None:
        """Once nothing goes wrong any more, the job comes to the end that it deserves."""
        if not hasattr(self, "cluster"):
            return
        cluster = self.cluster
        cluster.store.readable = True
        self.the_spec_is_mended()
        cluster.full = False
        self.a_suspended_job_rests()
        self._edit(suspend=False)
        for _ in range(20):
            self.deletions_come_to_their_end()
            self.all_pods_start()
            cluster.agents_form_an_round()
            self.a_second_plan_does_nothing()
            if cluster.job.status.state.finished:
                break
            if cluster.run_ended is None and self._is_complete():
                cluster.agents_end_the_run(OutcomeState.SUCCEEDED)
            cluster.now += LONGEST_BACK_OFF
        self._assert_the_right_end()

    def a_suspended_job_rests(self) -> None:
        cluster = self.cluster
        self._edit(suspend=True)
        for _ in range(2):
            self.a_second_plan_does_nothing()
            self.deletions_come_to_their_end()
        self.a_second_plan_does_nothing()
        status = cluster.job.status
        if not status.state.finished and not cluster.job.deleting:
            assert status.state is JobState.SUSPENDED
            assert (status.applied_spec, status.active, status.replicas) == (None, None, 0)
            assert all(pod.terminating and not runs(pod) for pod in cluster.pods.values())
            assert (cluster.etcd, cluster.group, cluster.guard) == (False, None, None)

    def _is_complete(self) -> bool:
        round, job = self.cluster.store.round, self.cluster.job
        live = [pod for pod in self.cluster.pods.values() if is_live(pod)]
        return round is not None and len(round.members) == len(live) == job.spec.desired

    def _assert_the_right_end(self) -> None:
        cluster = self.cluster
        job, status = cluster.job, cluster.job.status
        assert status.state.finished, "the job never comes to an end"
        match finish_reason(status):
            case Reason.RUN_SUCCEEDED:
                assert OutcomeState.SUCCEEDED in cluster.endings
            case Reason.RUN_FAILED:
                assert OutcomeState.FAILED in cluster.endings
            case Reason.NO_AGENT:
                assert cluster.no_agent
            case Reason.BAD_INPUT:
                assert cluster.refused_input
            case Reason.DEADLINE_EXCEEDED | Reason.POD_FAILURE_POLICY:
                pass  # judged by the cluster when it was said
            case _:
                assert status.pod_failures == len(cluster.deaths_seen)
        cluster.now += max(EXIT_PERIOD, job.spec.ttl_after_finished or 0.0)
        for _ in range(3):
            self.a_second_plan_does_nothing()
            self.deletions_come_to_their_end()
        assert cluster.deleted is (job.spec.ttl_after_finished is not None), "the job goes when its time has come"
        left = [pod for pod in cluster.pods.values() if pod.sidecars_running or runs(pod)]
        if cluster.deleted or job.spec.clean_pod_policy is not CleanPodPolicy.NONE:
            assert not left, "a pod outlives its job"
        if job.spec.clean_pod_policy is CleanPodPolicy.ALL and not cluster.deleted:
            assert not [pod for pod in cluster.pods.values() if not pod.terminating], "a pod is not cleaned up"
        assert (cluster.etcd, cluster.group, cluster.guard) == (False, None, None), "the store outlives its job"


def _standing(todo: Plan) -> dict[str, Any]:
    """What a plan says again each time."""
    return {
        "report": todo.report,
        "etcd": todo.etcd,
        "min_member": todo.min_member,
        "min_available": todo.min_available,
        "wake_at": todo.wake_at,
    }


TestAnyLife = AnyLife.TestCase
TestAnyLife.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
