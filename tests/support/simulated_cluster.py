"""A simulated cluster in memory, for the model-based tests of the plan.

Its pods start, fail, stay Terminating, are evicted and deleted; its nodes become unreachable; its agents form rounds
and end the run; its store becomes unreadable or loses its keys; its API server rejects pods, or has an exhausted quota.
It records the states that an observer may see, and checks every plan that is applied.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from elastic_operator.api.constants import ConditionType, Reason
from elastic_operator.api.spec import FailureAction
from elastic_operator.api.status import JobState
from elastic_operator.controller.failures import pod_end
from elastic_operator.controller.model import (
    EtcdState,
    Job,
    Observed,
    Plan,
    Pod,
    PodEnd,
    PodPhase,
    TerminationCause,
    with_applied_spec,
)
from tests.support.builders import NOW, a_round, failure, success, termination_message, with_spec
from torchelastic.protocol.pod import ExitCode
from torchelastic.protocol.records import OutcomeRecord, OutcomeState, RoundRecord, SizeRecord

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_operator.api.spec import ElasticJobSpec, FailureRule
    from elastic_operator.api.status import JobStatus, Report
    from elastic_operator.controller.model import NewPod

NODES: Final = ("node-0", "node-1", "node-2")
DECIDED_BY_OPERATOR: Final = (Reason.POD_FAILURES, Reason.POD_FAILURE_POLICY, Reason.DEADLINE_EXCEEDED)
"""The reasons with which the operator itself finishes a job, and for which it still counts failed pods."""


class OperatorKilledError(Exception):
    """The operator was killed between two writes."""


class PodRejectedError(Exception):
    """The API server rejected a pod."""


class ConflictError(Exception):
    """The job has changed since the plan was made."""


@dataclass
class Store:
    """The keys of the job in its etcd."""

    readable: bool = True
    size: SizeRecord | None = None
    round: RoundRecord | None = None
    outcome: OutcomeRecord | None = None


def is_live(pod: Pod) -> bool:
    return not pod.phase.ended and not pod.terminating


def runs(pod: Pod) -> bool:
    """Return whether the pod's agent may still run; an agent on a lost node counts as exited."""
    return not pod.phase.ended and not (pod.terminating and pod.termination_cause is TerminationCause.NODE_LOST)


def finish_reason(status: JobStatus) -> str:
    """Return the reason with which the job has finished, or an empty string."""
    reasons = [each.reason for each in status.conditions if each.type == ConditionType.FINISHED and each.status]
    return reasons[0] if reasons else ""


def rule_for(pod: Pod, rules: tuple[FailureRule, ...]) -> FailureRule | None:
    """Return the first rule that matches a failed or disrupted pod."""
    for rule in rules:
        condition_matches = any(pod.conditions.get(each.type) == each.status for each in rule.pod_conditions)
        if condition_matches or rule.pod_reasons & pod.reasons:
            return rule
    return None


def is_charged(pod: Pod, rules: tuple[FailureRule, ...]) -> bool:
    """Return whether a failed or disrupted pod is charged; the plan computes this in another way."""
    died = pod_end(pod) is PodEnd.FAILED
    if died or pod_end(pod) is PodEnd.DISRUPTED or (pod.termination_cause is not None and pod_end(pod) is PodEnd.LEFT):
        rule = rule_for(pod, rules)
        return died if rule is None else rule.action is not FailureAction.IGNORE
    return died


class SimulatedCluster:
    """The state of the cluster, the recorded states that an observer may see, and the checks of plans."""

    def __init__(self, job: Job) -> None:
        self.now = NOW
        self.job = job
        self.pods: dict[str, Pod] = {}
        self.store = Store()
        self.etcd = False
        self.pod_group: int | None = None
        self.disruption_budget: int | None = None
        self.report: Report | None = None
        self.deleted = False
        self.run_ended: OutcomeState | None = None
        self.outcomes: set[OutcomeState] = set()
        self.applied_specs: dict[str, ElasticJobSpec] = {}
        self.known_round: dict[str, int] = {}
        self.round_at_suspension = 0
        self.had_bad_input = False
        self.no_agent = False
        self.rejects_pods = False
        self.quota_exhausted = False
        self.rejection: tuple[int, str] | None = None
        self.blocked: str | None = None
        self.counted_failures: set[str] = set()
        self.counted_pods: set[str] = set()
        self.removed: set[str] = set()
        self.recorded: list[tuple[Job, Observed]] = []
        self._uids = itertools.count()
        self.record_state()

    # -- observation

    def record_state(self) -> None:
        """Record the current state, which an observer may see now or later."""
        store = self.store
        readable = store.readable and self.etcd
        observed = Observed(
            pods=tuple(self.pods.values()),
            etcd=EtcdState.READY if self.etcd else EtcdState.ABSENT,
            store_read=readable,
            round=store.round if readable else None,
            outcome=store.outcome if readable else None,
            size=store.size if readable else None,
            rejected=self.rejection[1]
            if self.rejection is not None and self.rejection[0] == self.job.generation
            else None,
            blocked=self.blocked,
        )
        self.recorded.append((self.job, observed))

    def observe(self, lateness: int = 0) -> tuple[Job, Observed]:
        """Return the state ``lateness`` changes ago, but no state from before the last observation or write."""
        index = max(len(self.recorded) - 1 - lateness, 0)
        del self.recorded[:index]
        return self.recorded[0]

    # -- applying a plan

    def apply(self, job: Job, observed: Observed, todo: Plan, writes: int = 1_000_000) -> None:
        """Apply the plan.

        Args:
            job: the job that the plan was made for.
            observed: the observation that the plan was made for.
            todo: the plan.
            writes: the number of writes after which the operator is killed.

        Raises:
            ConflictError: the job has changed since the plan was made; nothing was written.
            OperatorKilledError: the operator was killed after this number of writes.
        """
        changes_the_job = todo.replicas is not None or todo.status is not None
        if changes_the_job and (job.generation, job.status) != (self.job.generation, self.job.status):
            raise ConflictError
        assert len({pod.uid for pod in todo.remove}) == len(todo.remove), "a pod is removed twice"
        steps: list[Callable[[], None]] = [
            lambda: self._store_report(todo),
            lambda: self._write_replicas(todo.replicas),
            lambda: self._write_status(job, observed, todo),
            lambda: self._apply_etcd(todo),
            lambda: self._apply_group_and_budget(todo),
            lambda: self._write_size(todo.size),
            *(partial(self._remove, pod.uid) for pod in todo.remove),
            *(partial(self._create, job, observed, todo, new) for new in todo.create),
            lambda: self._delete_job(todo),
        ]
        with contextlib.suppress(PodRejectedError):
            for step in steps[:writes]:
                step()
        if writes < len(steps):
            raise OperatorKilledError
        self.record_state()
        self.recorded = self.recorded[-1:]  # the operator sees its own writes

    def forget_responses(self) -> None:
        """Simulate the start of another operator, which has not sent a request to the API server yet."""
        self.rejection = self.blocked = None

    def _store_report(self, todo: Plan) -> None:
        self.report = todo.report or self.report

    def _write_replicas(self, replicas: int | None) -> None:
        if replicas is not None:
            spec = msgspec.structs.replace(self.job.spec, replicas=replicas)
            self.job = with_spec(self.job, spec, generation=self.job.generation + 1)

    def _write_status(self, job: Job, observed: Observed, todo: Plan) -> None:
        if todo.status is not None:
            self._check_charges(job, observed, todo, todo.status)
            self._check_ending(job, todo.status)
            self.job = replace(self.job, status=todo.status)
            if todo.status.state is JobState.SUSPENDED:
                self.round_at_suspension = todo.status.round

    def _apply_etcd(self, todo: Plan) -> None:
        if self.etcd and not todo.etcd:
            self.store = Store(readable=self.store.readable)
            outcome_known = self.run_ended is None or self.job.status.state.finished or self.job.deleting
            assert outcome_known, "etcd is deleted before the operator has read that the run has ended"
            if self.job.status.state.finished and not todo.delete_job and not self.job.deleting:
                assert self.report is not None, "etcd is deleted before the report is stored"
                assert (self.report.state, self.report.time_breakdown) == (
                    self.job.status.state,
                    self.job.status.time_breakdown,
                )
        self.etcd = todo.etcd

    def _apply_group_and_budget(self, todo: Plan) -> None:
        needs_no_pods = (
            self.job.status.state.finished or self.job.status.state is JobState.SUSPENDED or self.job.deleting
        )
        assert not needs_no_pods or (todo.min_member, todo.min_available) == (None, None), (
            "a PodGroup or PodDisruptionBudget is kept for a job without pods"
        )
        self.pod_group, self.disruption_budget = todo.min_member, todo.min_available

    def _delete_job(self, todo: Plan) -> None:
        if todo.delete_job:
            spec, status = self.job.spec, self.job.status
            assert status.state.finished, "a job that has not finished is deleted"
            assert status.completed is not None
            assert spec.ttl_after_finished is not None
            assert self.now >= status.completed + spec.ttl_after_finished, "a job is deleted before its TTL has expired"
            self.deleted = True
            self.job = replace(self.job, deleting=True)

    def _write_size(self, size: SizeRecord | None) -> None:
        if size is not None and self.store.readable:
            assert self.store.size is None or self.store.size.generation < size.generation
            self.store.size = size

    def _remove(self, uid: str) -> None:
        if (pod := self.pods.get(uid)) is not None:
            finished = self.job.status.state.finished
            assert finished or pod.uid in self.job.status.counted_pod_uids, "a pod is removed before it is counted"
            self.delete(pod)

    def _create(self, job: Job, observed: Observed, todo: Plan, new: NewPod) -> None:
        if any(pod.name == new.name for pod in self.pods.values()):
            return
        status = self.job.status
        assert not status.state.finished, "a pod of a finished job is created"
        assert not job.spec.suspend, "a pod of a suspended job is created"
        assert status.state is not JobState.SUSPENDED, "a pod is created before the status says that the job is resumed"
        assert observed.outcome is None, "a pod is created although the run has ended"
        had_pods = job.status.size_generation > 0
        run_continues = observed.store_read or any(is_live(pod) for pod in observed.pods) or not had_pods
        assert run_continues, "a pod is created although the run may have ended"
        assert self.run_ended is None or self.etcd, "a pod that cannot read the outcome of the run is created"
        assert status.applied_spec is not None, "a pod is created before the applied spec is in the status"
        assert new.excluded == status.excluded_nodes
        assert self.pod_group == (job.spec.min_replicas if job.spec.scheduling.gang else None), (
            "a gang-scheduled pod is created without its PodGroup"
        )
        known_round = new.resume.round if new.resume is not None else 0
        assert known_round >= self.round_at_suspension, "the resume record lacks the rounds before the suspension"
        live = [pod for pod in self.pods.values() if is_live(pod)]
        spec = with_applied_spec(job, todo).spec
        assert all(self.applied_specs[pod.uid].args == spec.args for pod in live), "live pods run different programs"
        assert all(pod.index != new.index for pod in live), "two live pods have the same index"
        assert len(live) < job.spec.max_replicas + job.spec.spares, "more live pods than the maximum and the spares"
        assert observed.rejected is None, "a rejected pod is created again"
        self._admit()
        uid = f"uid-{next(self._uids)}"
        made = float(int(self.now))  # Kubernetes stores times in whole seconds
        pod = Pod(
            new.name,
            uid,
            new.index,
            PodPhase.PENDING,
            created=made,
            failures=new.failures,
            size=new.size,
            failed=new.failed,
        )
        self.pods[uid] = pod
        self.applied_specs[uid] = spec
        self.known_round[uid] = known_round

    def _admit(self) -> None:
        self.rejection = (self.job.generation, "the spec is unacceptable") if self.rejects_pods else None
        self.blocked = f"exceeded quota at {self.now}" if self.quota_exhausted and not self.rejects_pods else None
        if self.rejects_pods or self.quota_exhausted:
            raise PodRejectedError

    def _check_charges(self, job: Job, observed: Observed, todo: Plan, status: JobStatus) -> None:
        reason = finish_reason(status)
        if job.status.state.finished or (reason and reason not in DECIDED_BY_OPERATOR):
            assert status.pod_failures == job.status.pod_failures
            return
        rules = with_applied_spec(job).spec.failure_policy.rules
        for pod in observed.pods:
            if not is_live(pod) and pod.uid not in self.counted_pods:
                charged = pod.uid not in self.removed and is_charged(pod, rules)
                unread = observed.etcd is EtcdState.READY and not observed.store_read
                if charged and pod.phase.ended and unread:
                    continue  # the run may have ended before the pod
                self.counted_pods.add(pod.uid)
                if charged:
                    self.counted_failures.add(pod.uid)
        self.removed = (self.removed & status.counted_pod_uids) | {pod.uid for pod in todo.remove}
        assert status.pod_failures == len(self.counted_failures), "a failed pod is not counted, or counted twice"
        if not status.state.finished:
            assert status.pod_failures <= max(job.spec.backoff_limit, job.status.pod_failures), (
                "the backoff limit is exceeded"
            )

    def _check_ending(self, job: Job, status: JobStatus) -> None:
        if job.status.state.finished or not status.state.finished:
            return
        match finish_reason(status):
            case Reason.DEADLINE_EXCEEDED:
                assert not job.spec.suspend
                assert job.status.active is not None
                assert job.spec.active_deadline is not None
                assert self.now >= job.status.active + job.spec.active_deadline, "the job fails before its deadline"
            case Reason.POD_FAILURES:
                assert status.pod_failures > job.spec.backoff_limit
            case Reason.POD_FAILURE_POLICY:
                rules = with_applied_spec(job).spec.failure_policy.rules
                assert any(rule.action is FailureAction.FAIL_JOB for rule in rules)

    # -- events of pods

    def change(self, pod: Pod, **fields: object) -> None:
        self.pods[pod.uid] = replace(pod, **fields)  # type: ignore[arg-type]

    def end(self, pod: Pod, code: int | None, message: str = "", **more: object) -> None:
        phase = PodPhase.SUCCEEDED if code == 0 else PodPhase.FAILED
        words = termination_message(message) if message else None
        self.change(pod, phase=phase, ready=False, exit_code=code, message=words, ended=float(int(self.now)), **more)

    def delete(self, pod: Pod) -> None:
        if pod.phase.ended and not pod.sidecars_running:
            del self.pods[pod.uid]
        else:
            self.change(pod, terminating=True, ready=False)

    def disrupt(self, pod: Pod, termination_cause: TerminationCause) -> None:
        """Disrupt a pod: preempt it, reject it at its node, or lose its node."""
        if termination_cause is TerminationCause.NOT_ADMITTED:
            self.change(
                pod,
                phase=PodPhase.FAILED,
                termination_cause=termination_cause,
                reasons=frozenset({"OutOfcpu"}),
                ended=float(int(self.now)),
            )
            return
        disrupted = replace(
            pod, termination_cause=termination_cause, conditions={"DisruptionTarget": "True"}, ready=False
        )
        self.pods[pod.uid] = replace(disrupted, terminating=True)

    def evict(self, pod: Pod) -> None:
        """Evict a pod, as a kubelet under resource pressure does."""
        marks = {
            "termination_cause": TerminationCause.DISRUPTED,
            "reasons": frozenset({"Evicted"}),
            "conditions": {"DisruptionTarget": "True"},
        }
        self.end(pod, None, **marks)

    def finish_deletions(self) -> None:
        """Remove all terminating pods, except those on lost nodes."""
        self.pods = {
            uid: pod
            for uid, pod in self.pods.items()
            if not pod.terminating or pod.termination_cause is TerminationCause.NODE_LOST
        }

    # -- actions of agents

    def serving(self) -> list[Pod]:
        return [pod for pod in self.pods.values() if pod.phase is PodPhase.RUNNING and not pod.terminating]

    def agents_form_a_round(self) -> None:
        """Form a round of the newest size that the agents know from the store or from their start."""
        serving = self.serving()
        sizes = [pod.size for pod in serving if pod.size] + ([self.store.size] if self.store.size else [])
        if not (self.store.readable and self.etcd and sizes) or self.run_ended is not None:
            return
        size = max(sizes, key=lambda size: size.generation)
        members = [pod for pod in serving if pod.name not in size.draining][: size.target]
        before = self.store.round or RoundRecord(number=0)
        if len(members) >= size.min and before.nodes != tuple(f"{pod.name}.1" for pod in members):
            number = max(before.number, *(self.known_round[pod.uid] for pod in members)) + 1
            self.store.round = a_round(*members, number=number)
            self.known_round |= dict.fromkeys([pod.uid for pod in members], number)
        elif len(members) < size.min and before.members:
            self.store.round = a_round(number=before.number + 1)

    def agents_end_the_run(self, state: OutcomeState) -> None:
        round = self.store.round
        if self.run_ended is None and self.etcd and self.store.readable and round is not None and round.members:
            members = [pod for pod in self.serving() if f"{pod.name}.1" in round.nodes]
            if members:
                self.run_ended = state
                self.outcomes.add(state)
                self.store.outcome = success() if state is OutcomeState.SUCCEEDED else failure("no restarts are left")

    def agent_exits_with_the_outcome(self, pod: Pod, *, sidecars_running: bool) -> None:
        if self.run_ended is OutcomeState.SUCCEEDED:
            self.end(pod, ExitCode.SUCCEEDED, sidecars_running=sidecars_running)
        elif self.run_ended is OutcomeState.FAILED:
            self.end(pod, ExitCode.FAILED, "no restarts are left", sidecars_running=sidecars_running)
