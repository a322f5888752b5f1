"""Whatever happens to a job, and wherever the operator is interrupted, the plan keeps its promises.

A user edits the spec, pods and agents and the store do what they may do, and the operator sees the world late, acts on
what it saw before the world went on, and dies between any two of its writes.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from elastic_operator.model import Job, Misfit, Observed, Plan, Pod, PodPhase, Unfit
from elastic_operator.names import ConditionType, Reason
from elastic_operator.plan import plan
from elastic_operator.plan.ending import FAREWELL
from elastic_operator.plan.places import ENDED_PODS_KEPT, LONGEST_BACK_OFF
from tests.support.builders import a_job
from tests.support.simulated_cluster import ConflictError, OperatorKilledError, SimulatedCluster, Store, is_live
from torchelastic.contract import ExitCode, OutcomeState

ACCIDENTS = st.sampled_from([137, 139, 3, 1, 127, None])
LEAVES = st.sampled_from([143, 130])


class AnyLife(RuleBasedStateMachine):
    """One job's life."""

    @initialize(
        minimum=st.integers(1, 3),
        more=st.integers(0, 3),
        replicas=st.none() | st.integers(1, 5),
        max_restarts=st.integers(0, 6),
    )
    def begin(self, minimum: int, more: int, replicas: int | None, max_restarts: int) -> None:
        maximum = minimum + more
        wanted = None if replicas is None else min(max(replicas, minimum), maximum)
        self.cluster = SimulatedCluster(
            a_job(minimum=minimum, maximum=maximum, replicas=wanted, max_restarts=max_restarts)
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
        self._assert_nothing_is_left_to_do()

    def _is_troubled(self) -> bool:
        """Whether pods could not be made when that was tried last, or the status says so."""
        cluster = self.cluster
        said = {condition.reason for condition in cluster.job.status.conditions if condition.status}
        return bool(cluster.refusal or cluster.hindrance or said & {Reason.REFUSED, Reason.HINDERED})

    def _reconcile(self, lateness: int = 0) -> None:
        job, observed = self.cluster.observe(lateness)
        self._carry_out(job, observed, plan(job, observed, self.cluster.now))

    def _assert_nothing_is_left_to_do(self) -> None:
        job, observed = self.cluster.observe()
        again = plan(job, observed, self.cluster.now)
        if again == Plan(etcd=again.etcd, wake_at=again.wake_at, remove=again.remove):
            # Remains of pods go only when their successors can be seen: where there are many, that is one plan later.
            assert all(self.cluster.pods[removal.uid].phase.ended for removal in again.remove)
            self._carry_out(job, observed, again)
            job, observed = self.cluster.observe()
            again = plan(job, observed, self.cluster.now)
        assert again == Plan(
            etcd=self.cluster.etcd,
            wake_at=again.wake_at,
            create=again.create if self.cluster.full and not self.cluster.refuses else (),
        )
        if not job.status.state.finished:
            empty = job.spec.desired - sum(is_live(pod) for pod in observed.pods)
            remains = [pod for pod in observed.pods if pod.phase.ended and not pod.terminating]
            assert len(remains) <= max(ENDED_PODS_KEPT, empty)

    # -- pods

    def _pick(self, data: st.DataObject, pods: list[Pod]) -> Pod | None:
        return data.draw(st.sampled_from(sorted(pods, key=lambda pod: pod.uid))) if pods else None

    @rule(data=st.data())
    def a_pod_starts(self, data: st.DataObject) -> None:
        pods = [pod for pod in self.cluster.pods.values() if pod.phase is PodPhase.PENDING and not pod.terminating]
        if (pod := self._pick(data, pods)) is not None:
            self.cluster.change(pod, phase=PodPhase.RUNNING, ready=data.draw(st.booleans()), started=self.cluster.now)
            self.cluster.look()

    @rule()
    def all_pods_start(self) -> None:
        for pod in list(self.cluster.pods.values()):
            if is_live(pod) and not pod.ready:
                self.cluster.change(pod, phase=PodPhase.RUNNING, ready=True, started=self.cluster.now)
        self.cluster.look()

    @rule(data=st.data(), code=ACCIDENTS, lingers=st.booleans())
    def a_pod_dies(self, data: st.DataObject, code: int | None, lingers: bool) -> None:
        if (pod := self._pick(data, [pod for pod in self.cluster.pods.values() if not pod.phase.ended])) is not None:
            self.cluster.end(pod, code, lingers=lingers)
            self.cluster.look()

    @rule(data=st.data(), code=LEAVES, lingers=st.booleans())
    def a_pod_leaves(self, data: st.DataObject, code: int, lingers: bool) -> None:
        if (pod := self._pick(data, self.cluster.serving())) is not None:
            self.cluster.end(pod, code, lingers=lingers)
            self.cluster.look()

    @rule(data=st.data())
    def what_lingers_ends(self, data: st.DataObject) -> None:
        if (pod := self._pick(data, [pod for pod in self.cluster.pods.values() if pod.lingers])) is not None:
            self.cluster.change(pod, lingers=False)
            self.cluster.look()

    @rule(data=st.data(), dice=st.integers(0, 4))
    def a_pod_has_no_agent(self, data: st.DataObject, dice: int) -> None:
        pods = [pod for pod in self.cluster.pods.values() if pod.phase is PodPhase.PENDING]
        if dice == 0 and (pod := self._pick(data, pods)) is not None:
            self.cluster.end(pod, 128, unfit=Unfit(Misfit.NO_AGENT, "the image has no torchelastic-run"))
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
        self.cluster.pods = {uid: pod for uid, pod in self.cluster.pods.items() if not pod.terminating}
        self.cluster.look()

    # -- agents

    @rule()
    def the_agents_form_an_epoch(self) -> None:
        self.cluster.agents_form_an_epoch()
        self.cluster.look()

    @rule(state=st.sampled_from(OutcomeState))
    def the_agents_end_the_run(self, state: OutcomeState) -> None:
        self.cluster.agents_end_the_run(state)
        self.cluster.look()

    @precondition(lambda self: self.cluster.run_ended is not None)
    @rule(data=st.data(), lingers=st.booleans())
    def an_agent_hears_of_the_end(self, data: st.DataObject, lingers: bool) -> None:
        if (pod := self._pick(data, self.cluster.serving())) is not None:
            self.cluster.agents_hear_of_the_end(pod, lingers=lingers)
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
        job = self.cluster.job
        spec = replace(job.spec, min_replicas=minimum, max_replicas=minimum + more, replicas=minimum + min(place, more))
        if spec != job.spec:
            self.cluster.job = replace(job, spec=spec, generation=job.generation + 1)
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
        truth = None
        for _ in range(20):
            self.deletions_come_to_their_end()
            self.all_pods_start()
            cluster.agents_form_an_epoch()
            self.a_second_plan_does_nothing()
            if cluster.job.status.state.finished:
                break
            if (truth := cluster.run_ended) is None and self._is_complete():
                cluster.agents_end_the_run(OutcomeState.SUCCEEDED)
            cluster.now += LONGEST_BACK_OFF
        self._assert_the_right_end(truth)

    def _is_complete(self) -> bool:
        epoch, job = self.cluster.store.epoch, self.cluster.job
        live = [pod for pod in self.cluster.pods.values() if is_live(pod)]
        return epoch is not None and len(epoch.members) == len(live) == job.spec.desired

    def _assert_the_right_end(self, truth: OutcomeState | None) -> None:
        cluster = self.cluster
        status = cluster.job.status
        assert status.state.finished, "the job never comes to an end"
        reason = next(condition.reason for condition in status.conditions if condition.type == ConditionType.FINISHED)
        match reason:
            case Reason.RUN_SUCCEEDED:
                assert cluster.run_ended is OutcomeState.SUCCEEDED
            case Reason.RUN_FAILED:
                assert cluster.run_ended is OutcomeState.FAILED
            case Reason.NO_AGENT:
                assert cluster.no_agent
            case Reason.BAD_INPUT:
                assert cluster.refused_input
            case _:
                assert status.pod_failures == len(cluster.deaths_seen) > cluster.job.spec.max_restarts
        cluster.now += FAREWELL
        self.a_second_plan_does_nothing()
        self.deletions_come_to_their_end()
        self.a_second_plan_does_nothing()
        assert not [pod for pod in cluster.pods.values() if not pod.phase.ended or pod.lingers], (
            "a pod outlives its job"
        )
        assert not cluster.etcd, "the store outlives its job"


TestAnyLife = AnyLife.TestCase
TestAnyLife.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
